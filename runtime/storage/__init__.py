"""Optimizer state on drives. A new version never overwrites the last finished one, so no copy is needed to
keep it.

This package depends on no training framework. Other code uses its class `ExtentStore` (`store.py`).
"""
