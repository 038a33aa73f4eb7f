"""The protection of checkpoints in two cases: a trainer deletes old ones, or the process ends during a save."""
