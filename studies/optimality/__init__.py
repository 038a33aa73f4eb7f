"""Distance of the tuner's plans from the best possible."""
