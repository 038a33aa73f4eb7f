"""Study of killed training with stored optimizer state, and of the files left on the drives."""
