"""When a checkpoint is visible: votes, commits, retention, drains."""
