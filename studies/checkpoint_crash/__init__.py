"""Training that is killed inside the commit protocol, and what is left on disk."""
