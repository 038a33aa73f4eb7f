"""What a plan takes of device and host memory: the only place that says so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from simulator.plan import Plan
from simulator.update.optimizer import FP32_BYTES, OptimizerState
from simulator.update.recipes import RECIPES, Placement, Slot, slot_limits
from simulator.workload import Workload

STAGING_ALIGNMENT = 64  # elements: each tensor of a staging slot begins on a 256-byte border


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of one rank that a plan holds all through an iteration.

    Activations, which come and go, and what a checkpoint reserves are not in it.

    Attributes:
        device_bytes: the workload's base (parameters, buckets), resident state, gradients that
            stay on the device, staging slots.
        host_bytes: state and gradients that live there, parameter slots; with accumulation, the
            gradients of the window before, whatever the placement.
    """

    device_bytes: int
    host_bytes: int


def footprint(workload: Workload, plan: Plan) -> Footprint:
    """Of a plan for this workload.

    Below ZeRO-3 DeepSpeed's flat partitions keep room for resident state too.
    """
    of_plan = plan_bytes(
        workload.subgroups, plan.placements, plan.staging_slots, workload.optimizer_state,
        workload.grad_bytes_per_param, workload.wire_bytes, stage=workload.zero_stage,
        micro_batches=workload.gradient_accumulation_steps,
    )  # fmt: skip
    return Footprint(workload.device_base_bytes + of_plan.device_bytes, of_plan.host_bytes)


def plan_bytes(
    subgroups: Sequence[int],
    placements: Sequence[Placement],
    staging_slots: int,
    optimizer: OptimizerState,
    gradient_bytes: int,
    wire_bytes: int,
    *,
    stage: int = 3,
    micro_batches: int = 1,
) -> Footprint:
    """What the update itself takes, without the workload's base.

    Args:
        micro_batches: of a step.
    """
    elements: Counter[Placement] = Counter()
    largest: Counter[Placement] = Counter()
    for size, placement in zip(subgroups, placements, strict=True):
        elements[placement] += size
        largest[placement] = max(largest[placement], size)
    slots = slot_limits(staging_slots, Counter(placements))
    keeps = keeps_window(micro_batches, gradient_bytes, wire_bytes, stage)
    per_param = bytes_per_param(optimizer, gradient_bytes, stage=stage, keeps_window=keeps)
    device, host = (sum(elements[p] * held[i] for p, held in per_param.items()) for i in (0, 1))
    return Footprint(
        device + slots[Slot.STAGING] * slot_bytes(largest["device"], optimizer),
        host + slots[Slot.PARAMETER] * largest["host"] * wire_bytes,
    )


def bytes_per_param(
    optimizer: OptimizerState, gradient_bytes: int, *, stage: int = 3, keeps_window: bool = False
) -> dict[Placement, tuple[int, int]]:
    """(device, host) bytes of each placement's state and gradients, per parameter.

    Args:
        keeps_window: the gradients of the window before are kept on the host.
    """
    held = {}
    for placement, recipe in RECIPES.items():
        taken = {"device": 0, "host": 0}
        taken[recipe.state] += optimizer.state_bytes
        taken[recipe.gradient] += gradient_bytes
        if stage < 3 and recipe.state == "device":
            taken["host"] += optimizer.state_bytes
        if keeps_window:
            taken["host"] += gradient_bytes
        held[placement] = (taken["device"], taken["host"])
    return held


def keeps_window(micro_batches: int, gradient_bytes: int, wire_bytes: int, stage: int) -> bool:
    """The gradients of the window before are kept while the next ones arrive.

    DeepSpeed applies them again to a parameter that the window's last micro-batch does not reach.
    Below ZeRO-3 it adds up itself, on the device, what accumulates wider than it travels.
    """
    return micro_batches > 1 and (stage == 3 or gradient_bytes <= wire_bytes)


def slot_bytes(largest: int, optimizer: OptimizerState) -> int:
    """Of a staging slot that holds any visiting subgroup."""
    aligned = -(-largest // STAGING_ALIGNMENT) * STAGING_ALIGNMENT
    return aligned * optimizer.tensor_count * FP32_BYTES
