"""Study of what early updates (before the gradient norm is known) gain, and what they cost when a step clips."""
