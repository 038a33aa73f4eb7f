"""Checks before an engine is taken over: versions, members, settings, the plan."""
