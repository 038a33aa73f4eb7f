"""The rules that together give the lower bound of an iteration's time (`ebbtide.simulator.analysis.bound`).

Each rule is a set of rows of a linear program, which says what no plan can do.
"""
