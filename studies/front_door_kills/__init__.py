"""Study of users' training scripts that are killed while they save or delete checkpoints."""
