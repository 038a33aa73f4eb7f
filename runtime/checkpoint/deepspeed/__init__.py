"""The code that replaces DeepSpeed's functions for saving, loading and resuming checkpoints."""
