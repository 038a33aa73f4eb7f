"""Study of what is on disk after training was killed while it committed a checkpoint."""
