"""The search for a training plan, mainly for the placement of each subgroup."""
