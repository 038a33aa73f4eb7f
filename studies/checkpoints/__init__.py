"""The training runs of the checkpoint studies."""
