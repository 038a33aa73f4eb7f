"""Study of checkpoints on disk after training was killed while it committed a checkpoint."""
