"""Questions that take many simulations, or none: bounds, checkpoint costs, what-ifs, goodput."""
