"""Measures a machine and a workload."""

from profiler.engine import profile_engine
from profiler.machine import measure_machine

__all__ = ["measure_machine", "profile_engine"]
