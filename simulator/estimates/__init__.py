"""Machines and workloads that are estimated instead of measured: machine presets, and workloads from models'
configs.
"""
