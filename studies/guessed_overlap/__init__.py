"""Study of early updates: their gain, and the cost of steps that clip."""
