"""Corrections of a machine's rates, and intervals of predictions, learned from measured training runs."""
