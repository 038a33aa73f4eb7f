"""Rates of a machine: alone, with concurrent work, and with all ranks at once."""
