"""The search for a training plan's placements. A placement is the memory of a subgroup's optimizer state.

A subgroup is a part of DeepSpeed's optimizer state. The folder also has the memory limits of the search.
"""
