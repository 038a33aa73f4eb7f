"""The rules behind `simulator.analysis.bound`, computed from the recipes."""
