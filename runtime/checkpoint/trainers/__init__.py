"""The protection of checkpoints from trainers that delete and rotate them or end the process."""
