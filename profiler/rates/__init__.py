"""Measurements of a machine's rates (copies, updates, storage): one activity alone, two at once, all ranks at once."""
