"""Study of training that is killed inside the commit protocol of a checkpoint, and of the files left on disk."""
