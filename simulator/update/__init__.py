"""The optimizer's update: its state, the ops of each placement, the subgroups' order, and its memory."""
