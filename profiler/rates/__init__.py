"""Measurements of a machine's rates: alone, with concurrent work, and with all ranks together."""
