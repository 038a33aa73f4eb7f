"""The runtime's execution of a plan's schedule on streams. It depends on no training framework."""
