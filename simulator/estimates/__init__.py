"""Machines and workloads without a measurement: presets, and models from their configuration."""
