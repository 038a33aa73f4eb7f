"""The suite of checks and measurements for a machine with a GPU."""
