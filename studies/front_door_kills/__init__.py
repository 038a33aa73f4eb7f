"""Study of unchanged training scripts that are killed while they save and rotate checkpoints."""
