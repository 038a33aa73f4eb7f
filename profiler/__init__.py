"""Measures a machine and a workload."""
