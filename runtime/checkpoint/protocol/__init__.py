"""The protocol that makes checkpoints visible: votes, commits and retention."""
