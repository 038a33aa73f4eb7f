"""Training runs that the studies of checkpoints share."""
