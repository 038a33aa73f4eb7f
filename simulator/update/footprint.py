"""What a plan takes of device and host memory: the only place that says so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from simulator.plan import Plan
from simulator.update.optimizer import FP32_BYTES, OptimizerState
from simulator.update.recipes import RECIPES, Memory, Placement, Slot, Way, slot_limits, users
from simulator.workload import Workload

PARAMETER_BUFFERS = 2  # layers whose parameters are on the device at once: this one and the next
STAGING_ALIGNMENT = 64  # elements: each tensor of a staging slot begins on a 256-byte border


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of one rank that a plan holds all through an iteration.

    Activations, which come and go, and what a checkpoint reserves are not in it.

    Attributes:
        device_bytes: the workload's base (parameters, buckets), resident state, gradients that
            stay on the device, staging slots.
        host_bytes: state, gradients and parameters that live there, parameter slots; with
            accumulation, the gradients of the window before, whatever the placement.
    """

    device_bytes: int
    host_bytes: int


def footprint(workload: Workload, plan: Plan) -> Footprint:
    """Of a plan for this workload.

    Below ZeRO-3 DeepSpeed's flat partitions keep room for resident state too. Of the parameters
    that live on the host, those of two layers are on the device.
    """
    of_plan = plan_bytes(
        workload.subgroups, plan.placements, plan.staging_slots, workload.optimizer_state,
        workload.grad_bytes_per_param, workload.wire_bytes, stage=workload.zero_stage,
        micro_batches=workload.gradient_accumulation_steps, homes=plan.parameter_homes,
    )  # fmt: skip
    gone = moved_out(fetched_elements(workload, plan.parameter_homes)) * workload.wire_bytes
    base = max(0, workload.device_base_bytes - gone)
    return Footprint(base + of_plan.device_bytes, of_plan.host_bytes)


def fetched_elements(workload: Workload, homes: Sequence[Memory]) -> list[int]:
    """Elements of each layer's parameters that live on the host."""
    if "host" not in homes:
        return [0] * len(workload.layers)
    return [sum(n for s, n in held if homes[s] == "host") for held in workload.shares()]


def moved_out(fetched: Sequence[int]) -> int:
    """Elements that the device does not hold, of what `fetched_elements` gives."""
    return max(0, sum(fetched) - PARAMETER_BUFFERS * max(fetched))


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
    homes: Sequence[Memory] = (),
) -> Footprint:
    """What the update itself takes, and what lives on the host; without the workload's base.

    Args:
        micro_batches: of a step.
        homes: of each subgroup's parameters; empty: all on the device.
    """
    everywhere: tuple[Memory, ...] = ("device",)
    ways = list(zip(placements, homes or everywhere * len(placements), strict=True))
    elements: Counter[Way] = Counter()
    largest: Counter[Way] = Counter()
    for size, way in zip(subgroups, ways, strict=True):
        elements[way] += size
        largest[way] = max(largest[way], size)
    keeps = keeps_window(micro_batches, gradient_bytes, wire_bytes, stage)
    per_param = bytes_per_param(optimizer, gradient_bytes, stage=stage, keeps_window=keeps)
    device, host = (sum(n * per_param[way[0]][i] for way, n in elements.items()) for i in (0, 1))
    on_host = sum(n for way, n in elements.items() if way[1] == "host") * wire_bytes
    slots = buffer_bytes(
        slot_limits(staging_slots, Counter(ways)), largest, optimizer, wire_bytes
    )  # fmt: skip
    return Footprint(device + slots.device_bytes, host + on_host + slots.host_bytes)


def buffer_bytes(
    slots: Mapping[Slot, int], largest: Mapping[Way, int], optimizer: OptimizerState,
    wire_bytes: int,
) -> Footprint:  # fmt: skip
    """What the buffers take that subgroups use in turn; each holds the largest of its users."""
    most = {slot: max((largest[way] for way in users(largest, slot)), default=0) for slot in Slot}
    return Footprint(
        slots[Slot.STAGING] * slot_bytes(most[Slot.STAGING], optimizer)
        + slots[Slot.OUTGOING] * most[Slot.OUTGOING] * wire_bytes,
        slots[Slot.PARAMETER] * most[Slot.PARAMETER] * wire_bytes,
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
