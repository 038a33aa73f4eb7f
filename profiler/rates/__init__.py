"""What a machine is capable of: its rates, alone, side by side and with all ranks at once."""
