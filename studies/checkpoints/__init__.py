"""The training runs behind the checkpoint studies."""
