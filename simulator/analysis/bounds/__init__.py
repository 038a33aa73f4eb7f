"""The rules of `ebbtide.simulator.analysis.bound`, computed from the op templates of placements."""
