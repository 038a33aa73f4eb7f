"""Checks before a plan takes over a DeepSpeed engine: of DeepSpeed's version and private members, the
config and the plan.
"""
