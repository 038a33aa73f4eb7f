"""Analyses that use the simulator: lower bounds of the iteration time, checkpoint costs, what-ifs and goodput."""
