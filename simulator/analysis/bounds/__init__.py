"""The rules from which the lower bound of an iteration's time (`ebbtide.simulator.analysis.bound`) follows."""
