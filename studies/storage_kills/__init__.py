"""Training on stored state that is killed, and what is left on the drives."""
