"""Checks before a plan takes over a DeepSpeed engine: versions, private members, settings and the plan."""
