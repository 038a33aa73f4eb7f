"""Study of optimizer state on drives when training is killed: no finished training step may be lost."""
