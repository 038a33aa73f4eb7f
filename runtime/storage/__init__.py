"""Optimizer state on drives. A new version never overwrites the last finished one, so that a checkpoint can
keep the finished version without a copy.

This package depends on no training framework. Other code uses its class `ExtentStore` (`store.py`).
"""
