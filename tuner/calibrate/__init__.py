"""Rates and intervals learned from runs and their logs."""
