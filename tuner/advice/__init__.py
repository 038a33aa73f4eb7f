"""Further answers about a training job, in addition to its best plan.

They include a quick plan, changes that make the job fit into memory, the time that more GPU memory would save, and
goodput under failures.
"""
