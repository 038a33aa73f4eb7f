"""Machines and workloads estimated without a measurement: from presets, and from models' configs."""
