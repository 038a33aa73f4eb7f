"""Optimizer state on drives, written out of place, so that a finished step lasts without a copy.

It depends on no training framework. Other code calls `ExtentStore` (`store.py`).
"""
