"""Unchanged training scripts, killed while they save and rotate."""
