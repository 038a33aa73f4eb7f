"""The comparison in ``tune verify`` of a script's training under a plan and without one.

The other runs are DeepSpeed without a plan ("stock") and training without offload.
"""
