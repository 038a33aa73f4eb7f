"""Searches the best plan; the ``tune`` command."""
