"""The gain of updates before the gradient norm, and the cost of steps that clip."""
