"""The placement of every subgroup: the search, its moves, and its limits."""
