"""Trainers that delete, rotate and end: what their hands must not lose."""
