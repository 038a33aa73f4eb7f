"""The part of the runtime that runs a plan's optimizer updates and copies. It depends on no training framework."""
