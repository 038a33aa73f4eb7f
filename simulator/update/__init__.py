"""The optimizer's update: the optimizer state, the ops of each placement, the order of updates, and the memory."""
