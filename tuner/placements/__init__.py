"""The search for the best placement of every subgroup: its moves and the memory limits."""
