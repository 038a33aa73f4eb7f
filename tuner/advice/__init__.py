"""Answers that need further plans: quick plans, changes that make a job fit, and goodput under failures."""
