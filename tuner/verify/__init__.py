"""The comparison in ``tune verify`` of a script's training under a plan with its training without one.

The runs without a plan are DeepSpeed alone ("stock") and training without offload.
"""
