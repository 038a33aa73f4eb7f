"""Figures of the preset machines, from data sheets and publications."""
