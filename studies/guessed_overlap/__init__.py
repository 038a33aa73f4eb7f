"""Study of early updates (before the gradient norm is known): their gain, and the cost of clipping."""
