"""The search for a training plan, mainly for the placement of each subgroup: the memory where the
subgroup's optimizer state lives and is updated.

A subgroup is a part of DeepSpeed's optimizer state.
"""
