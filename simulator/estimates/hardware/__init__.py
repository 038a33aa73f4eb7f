"""Speeds and memory sizes of the preset machines, from data sheets and publications."""
