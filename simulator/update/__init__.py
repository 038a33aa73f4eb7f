"""The model of the optimizer's update, which the simulator and the runtime share.

It defines the optimizer state, the ops of an update for each placement, the order of updates, and the memory that a
plan uses.
"""
