"""The presentation of a training plan to its user: a table that compares the plan with other ways to
train, the reasons for the plan, and reports.
"""
