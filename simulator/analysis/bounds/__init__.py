"""The rules that together give the lower bound of an iteration's time (`ebbtide.simulator.analysis.bound`).

Each rule is a limit that every plan obeys, written as constraints of one linear program.
"""
