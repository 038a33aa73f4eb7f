"""Training runs that several studies of checkpoints share."""
