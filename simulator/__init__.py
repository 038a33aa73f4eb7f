"""The public names of ebbtide's simulator, which predicts the start and end of each op of a training iteration.

Importing this package loads numpy and pydantic. scipy and numba are loaded with the first simulation.
"""

from typing import TYPE_CHECKING, Any

from ebbtide.simulator.estimates.estimate import workload_from_model
from ebbtide.simulator.estimates.models.architecture import architecture
from ebbtide.simulator.estimates.models.blocks import Architecture, ModelError
from ebbtide.simulator.estimates.presets import preset, preset_names
from ebbtide.simulator.machine import Machine
from ebbtide.simulator.plan import CheckpointPlan, Placement, Plan, PlanError, Prediction, Way
from ebbtide.simulator.quantity import Quantity
from ebbtide.simulator.schedule import Lane, Op, OpKind, Schedule, ScheduleBuilder, Span
from ebbtide.simulator.schedules.ebbtide import build_schedule
from ebbtide.simulator.schedules.strategies import STRATEGIES, build_strategy
from ebbtide.simulator.timeline import MemorySample, Timeline
from ebbtide.simulator.workload import Layer, MemoryPoint, Workload

if TYPE_CHECKING:
    from ebbtide.simulator.engines.reference import simulate

__all__ = [
    "STRATEGIES",
    "Architecture",
    "CheckpointPlan",
    "Lane",
    "Layer",
    "Machine",
    "MemoryPoint",
    "MemorySample",
    "ModelError",
    "Op",
    "OpKind",
    "Placement",
    "Plan",
    "PlanError",
    "Prediction",
    "Quantity",
    "Schedule",
    "ScheduleBuilder",
    "Span",
    "Timeline",
    "Way",
    "Workload",
    "architecture",
    "build_schedule",
    "build_strategy",
    "preset",
    "preset_names",
    "simulate",
    "workload_from_model",
]


def __getattr__(name: str) -> Any:
    # The function imports numba, which takes as long as all other imports together. `tune --help` does not need it.
    if name == "simulate":
        from ebbtide.simulator.engines.reference import simulate

        return simulate
    raise AttributeError(f"module 'ebbtide.simulator' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
