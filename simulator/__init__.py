"""The nouns of ebbtide and the simulator that replays one training iteration.

Loads numpy, pydantic, scipy and numba; what-ifs load pandas and joblib when they ask for them.
"""

from simulator.analysis.what_if import what_if
from simulator.engines.reference import simulate
from simulator.estimates.architecture import architecture
from simulator.estimates.blocks import Architecture, ModelError
from simulator.estimates.job import workload_from_model
from simulator.estimates.presets import preset, preset_names
from simulator.machine import Machine
from simulator.plan import CheckpointPlan, Placement, PlacementRun, Plan, PlanError, Prediction
from simulator.quantity import Quantity
from simulator.schedule import Lane, Op, OpKind, Schedule, ScheduleBuilder
from simulator.schedules.ebbtide import build_schedule
from simulator.schedules.strategies import STRATEGIES, build_strategy
from simulator.span import Span
from simulator.timeline import MemorySample, Timeline
from simulator.workload import Layer, MemoryPoint, Workload

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
    "PlacementRun",
    "Plan",
    "PlanError",
    "Prediction",
    "Quantity",
    "Schedule",
    "ScheduleBuilder",
    "Span",
    "Timeline",
    "Workload",
    "architecture",
    "build_schedule",
    "build_strategy",
    "preset",
    "preset_names",
    "simulate",
    "what_if",
    "workload_from_model",
]
