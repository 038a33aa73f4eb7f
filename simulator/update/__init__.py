"""The optimizer's update, written once: what its state is, the ops of each placement, the order of
the subgroups, and what a plan takes of memory.
"""
