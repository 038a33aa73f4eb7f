"""The presentation of a plan to its user: the comparison with other ways to train, the reasons, and reports."""
