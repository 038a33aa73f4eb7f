"""Measures a machine and a workload."""

from profiler.machine import measure_machine
from profiler.workload import profile_engine

__all__ = ["measure_machine", "profile_engine"]
