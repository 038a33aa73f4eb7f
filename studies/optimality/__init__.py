"""Study of how far the tuner's plans are from the best possible plans."""
