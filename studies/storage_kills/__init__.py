"""Study of optimizer state on drives when training is killed: no finished step may be lost."""
