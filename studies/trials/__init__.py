"""Ways to train that studies compare: one way per process, or several plans on one engine."""
