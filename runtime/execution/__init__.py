"""Executes a plan's schedule on streams; knows no training framework."""
