"""The suite for a machine with a GPU."""
