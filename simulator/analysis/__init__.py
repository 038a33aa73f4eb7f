"""Analyses with the simulator: lower bounds of the iteration time, costs of checkpoints, what-if tables, goodput."""
