"""A study of the CPU time that a training step takes of the training thread."""
