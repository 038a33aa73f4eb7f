"""Hooks on modules that take the places of DeepSpeed's."""
