"""The rules behind `ebbtide.simulator.analysis.bound`, computed from the recipes."""
