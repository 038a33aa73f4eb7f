"""Analyses on top of the simulator: lower bounds, checkpoint costs, what-ifs and goodput."""
