"""Experiments: each runs as ``python -m studies.NAME --json PATH``."""
