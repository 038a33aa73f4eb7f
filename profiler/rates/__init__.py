"""Measurements of a machine's rates: one activity alone, two activities at once, and all ranks at once."""
