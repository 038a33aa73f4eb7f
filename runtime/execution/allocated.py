"""A plan as it can be executed: with the buffers that were allocated, and the number of CPU threads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from ebbtide.runtime.devices.base import Device
from ebbtide.runtime.execution.early_updates import EarlyUpdates
from ebbtide.runtime.execution.engine import TrainingEngine
from ebbtide.runtime.execution.stored import host_slots, stored_sizes
from ebbtide.runtime.execution.subgroup_state import StagingSlot, SubgroupState, place_sums, staging_slots
from ebbtide.runtime.execution.switching import Movement
from ebbtide.runtime.hardware.launcher import local_ranks
from ebbtide.runtime.hardware.usable import usable
from ebbtide.runtime.storage.store import ExtentStore
from ebbtide.simulator.plan import Placement, Plan
from ebbtide.simulator.update.holding import keeps_window
from ebbtide.simulator.update.order import FORWARD, order_of
from ebbtide.simulator.update.way import Way
from ebbtide.simulator.workload import WireDtype

DTYPES: dict[WireDtype, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True)
class Allocated:
    """A plan with the tensors and buffers that its updates use.

    Attributes:
        plan: The plan, reduced to what memory allows.
        states: The subgroups' tensors, in the memory that ``plan`` names.
        slots: Staging buffers in GPU memory, each for one subgroup.
        host_slots: Host buffers to read and write state on a drive.
        early_updates: Spare buffers for early updates.
    """

    plan: Plan
    states: list[SubgroupState]
    slots: list[StagingSlot]
    host_slots: list[StagingSlot]
    early_updates: EarlyUpdates


def allocate(
    plan: Plan, engine: TrainingEngine, device: Device, store: ExtentStore | None, states: list[SubgroupState] | None
) -> Allocated:
    """Move all subgroups to the memory that a plan names, and allocate the buffers that its updates use.

    Args:
        store: The store of optimizer state on drives. None if no plan has kept state there.
        states: The present tensors of each subgroup, which are replaced by the new ones. None if the subgroups still
            have the tensors that the framework made.
    """
    plan = _in_order_of_use(plan, engine)
    rule, sizes = engine.update_rule(), engine.sizes()
    tensors = 1 + len(rule.moments)
    waits = Way("device", early=True) in plan.ways and not device.unified
    staged = [n for n, p in zip(sizes, plan.placements, strict=True) if p == "device"]
    present: Any = [None] * plan.subgroup_count if states is None else states
    movement = Movement(engine, device, store, present)
    movement.move_out(plan)
    wire = DTYPES[engine.wire_dtype()] if waits else None
    slots = staging_slots(device, plan.staging_slots, staged, tensors, wire)
    placed = []
    for index, (placement, location) in enumerate(zip(plan.placements, plan.parameter_locations, strict=True)):
        there: Placement = "host" if placement == "device" and not slots else placement
        placed.append(movement.move(index, there, location))
    engine.settle()
    plan = _as_allocated(plan, placed, len(slots))
    # Early updates would write the model's parameters before the norm is known.
    if device.unified or rule.own_step:
        plan = plan.with_bits(early=False)
    plan = _with_sums(plan, placed, engine, device)
    stored = host_slots(plan.host_slots, stored_sizes(plan, sizes), tensors)
    early_updates = EarlyUpdates(device, placed, plan.updated_early, shared=engine.shares_state)
    return Allocated(plan, placed, slots, stored, early_updates)


def _in_order_of_use(plan: Plan, engine: TrainingEngine) -> Plan:
    if plan.order != FORWARD or engine.update_rule().own_step:  # these update subgroups in DeepSpeed's order
        return plan
    needed = engine.first_use()
    used = sorted(range(len(needed)), key=needed.__getitem__)
    if used == list(range(len(needed))):
        return plan
    return plan.placed(plan.placements, order=order_of(used, plan.placements))


def _as_allocated(plan: Plan, states: list[SubgroupState], slots: int) -> Plan:
    pairs = zip(plan.ways, states, strict=True)
    ways = [way._replace(placement=s.placement, parameters=s.parameter_location).fitted() for way, s in pairs]
    return plan.with_ways(ways, staging_slots=slots, prefetch=min(plan.prefetch, slots))


def _with_sums(plan: Plan, states: list[SubgroupState], engine: TrainingEngine, device: Device) -> Plan:
    if device.unified or engine.update_rule().own_step or not keeps_gradients(engine, states[0]):
        return plan.with_bits(sum_on_device=False)
    wanted = [i for i, way in enumerate(plan.ways) if way.sum_on_device]
    there = {*wanted[: place_sums(device, [states[i] for i in wanted])]}
    ways = tuple(way._replace(sum_on_device=i in there) for i, way in enumerate(plan.ways))
    return plan.model_copy(update={"ways": ways})


def keeps_gradients(engine: TrainingEngine, state: SubgroupState) -> bool:
    """Return whether the previous step's gradients must be kept while a step sums those of its micro-batches."""
    sizes = state.gradient.element_size(), state.wire.element_size()
    return keeps_window(engine.micro_batches(), *sizes, engine.zero_stage())


def arrival_of(plan: Plan, engine: TrainingEngine) -> list[int] | None:
    """Return the order in which the subgroups' gradients become complete in backward. None if the plan does not depend
    on the order, because no staged update starts before the gradient norm is known.
    """
    if Way("device", early=True) not in plan.ways:
        return None
    needed = engine.first_use()
    return sorted(range(len(needed)), key=lambda s: (needed[s], s), reverse=True)


def threads_of(plan: Plan, device: Device) -> int:
    """Return the number of threads of the optimizer update on the CPU: the plan's, or the number of available cores."""
    if plan.threads:
        return plan.threads
    if device.cores:
        return len(device.cores)
    share = max(1, usable().cores // local_ranks())
    return max(1, min(share, torch.get_num_threads())) if device.unified else share
