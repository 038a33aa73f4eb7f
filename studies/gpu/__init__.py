"""A suite of checks and measurements of ebbtide for a machine with a GPU."""
