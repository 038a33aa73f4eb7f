"""Simulate a schedule on a machine: the readable reference, and the same compiled by numba."""
