"""How far the tuner's plans can be from the best."""
