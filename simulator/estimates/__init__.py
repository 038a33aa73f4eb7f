"""Machines and workloads that nobody has measured: presets, and models from their configuration."""
