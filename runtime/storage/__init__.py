"""Optimizer state on storage, written out of place, so that a finished step needs no copy to last.

Knows no training framework. `ExtentStore` (`store.py`) is what others call.
"""
