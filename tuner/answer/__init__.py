"""Answers for users: a plan's table, its reasons, and reports."""
