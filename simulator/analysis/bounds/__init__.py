"""The rules of the lower bound of an iteration's time (`ebbtide.simulator.analysis.bound`)."""
