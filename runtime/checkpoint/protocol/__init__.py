"""The visibility of checkpoints: votes, commits, retention."""
