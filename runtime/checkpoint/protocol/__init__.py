"""The protocol that makes a checkpoint visible once all ranks have written it, and deletes old checkpoints."""
