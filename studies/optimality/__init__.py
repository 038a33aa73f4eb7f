"""Study of the distance of the tuner's plans from the best possible plans."""
