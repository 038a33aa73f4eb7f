"""ZeRO-3 parameters of a single rank, which holds them whole."""
