"""Checks before a DeepSpeed engine is taken over: versions, private members, settings and the plan."""
