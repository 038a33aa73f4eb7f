"""Machines and workloads that are estimated, not measured: from presets, and from the configs of models."""
