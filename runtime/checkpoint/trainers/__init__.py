"""The protection of checkpoints against trainers that delete old ones, and against the end of the process."""
