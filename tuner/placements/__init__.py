"""Where every subgroup goes: the search, its moves, and what limits them."""
