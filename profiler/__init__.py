"""Tools that measure a machine's speed and a training script's workload, as input of the search for a plan.

Submodules are imported on first use, so that starting a script under the profiler does not import torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ebbtide.profiler.engine import SampledProfile, profile_engine
    from ebbtide.profiler.machine import measure_machine

__all__ = ["SampledProfile", "measure_machine", "profile_engine"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'ebbtide.profiler' has no attribute {name!r}")
    from ebbtide.profiler import engine, machine

    return getattr(machine if name == "measure_machine" else engine, name)


def __dir__() -> list[str]:
    return __all__
