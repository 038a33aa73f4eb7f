"""Rates of a machine, and intervals of predictions, learned from runs and their logs."""
