"""Machines and workloads that are estimated, not measured: machine presets, and workloads from models' configs."""
