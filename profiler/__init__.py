"""Measures a machine and a workload."""

from profiler.engine import SampledProfile, profile_engine
from profiler.machine import measure_machine

__all__ = ["SampledProfile", "measure_machine", "profile_engine"]
