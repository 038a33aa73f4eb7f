"""Experiments that measure ebbtide. Each runs as ``python -m studies.NAME --json PATH``."""
