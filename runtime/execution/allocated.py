"""A plan as it can be executed: with the buffers that were allocated, and the number of CPU threads. And the switch
from one plan to another: the movement of subgroups' tensors to the memory that the new plan names.
"""

from __future__ import annotations

import traceback
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from ebbtide.runtime.devices.base import Device
from ebbtide.runtime.execution.bodies import EarlyUpdates
from ebbtide.runtime.execution.engine import TrainingEngine
from ebbtide.runtime.execution.stored import host_slots, stored_sizes
from ebbtide.runtime.execution.subgroup_state import (
    Buffers,
    StagingSlot,
    SubgroupState,
    place,
    place_parameters,
    place_sums,
    staging_slots,
)
from ebbtide.runtime.hardware.launcher import local_ranks
from ebbtide.runtime.hardware.usable import usable
from ebbtide.runtime.storage.store import ExtentStore
from ebbtide.simulator.plan import ParameterLocation, Placement, Plan
from ebbtide.simulator.update.holding import keeps_window
from ebbtide.simulator.update.order import FORWARD, order_of
from ebbtide.simulator.update.recipes import RECIPES
from ebbtide.simulator.update.way import Way
from ebbtide.simulator.workload import WireDtype


@dataclass
class Movement:
    """The movement of all subgroups to the memory that a plan names, one subgroup at a time.

    After an error, each subgroup is either where it was or where it should go. ``states`` tells which, so that another
    movement can continue from there.

    Attributes:
        store: The store of optimizer state on drives. None if no plan has kept state there.
        states: The present tensors of each subgroup. None for a subgroup with the tensors that the framework made.
    """

    engine: TrainingEngine
    device: Device
    store: ExtentStore | None
    states: list[SubgroupState | None]

    def move_out(self, plan: Plan) -> None:
        """Move state, gradients and parameters out of GPU memory if a plan keeps them elsewhere. This makes room for
        the tensors that the plan keeps in GPU memory.
        """
        now = [state.parameter_location if state else self.engine.parameter_location() for state in self.states]
        apart = now != [*plan.parameter_locations]
        for index, (way, location) in enumerate(zip(plan.ways, now, strict=True)):
            state = self.states[index]
            there: ParameterLocation = "host" if way.parameters == "host" else location
            if state is not None and _leaves_device(state.placement, way.placement):
                self.move(index, way.placement, there, apart=apart)
            elif apart:
                self._move_parameters(index, there)
        if apart:
            self.engine.settle()

    def move(
        self, subgroup: int, placement: Placement, location: ParameterLocation, *, apart: bool = False
    ) -> SubgroupState:
        """Move a subgroup's tensors to the given memory, and make the framework use them there.

        Args:
            apart: If True, parameters that are already in this memory, but share a buffer with other subgroups, are
                copied to a tensor of their own.
        """
        now = self.states[subgroup]
        before, store = self.engine.take(subgroup, now), self.store
        if now is not None and RECIPES[now.placement].state == "storage":
            if RECIPES[placement].state == "storage":
                store = None  # the store already exists
            else:  # a copy, because the view changes when the store does
                before = replace(before, state=tuple(t.clone() for t in before.state))
        return self._use(before, place(self.device, subgroup, placement, location, before, apart=apart, store=store))

    def _move_parameters(self, subgroup: int, location: ParameterLocation) -> None:
        now = self.states[subgroup]
        before = self.engine.take(subgroup, now)
        location, wire = place_parameters(self.device, subgroup, location, before, apart=True)
        there: Placement = "host" if now is None else now.placement
        self._use(before, SubgroupState(subgroup, there, before.state, wire, before.gradient, location))

    def _use(self, before: Buffers, state: SubgroupState) -> SubgroupState:
        self.engine.adopt(state)
        self.states[state.index] = state  # the former state is not needed any more, and must not keep memory
        pairs = [(before.gradient, state.gradient), (before.wire, state.wire)]
        if not self.engine.shares_state:
            pairs += zip(before.state, state.state, strict=True)
        for left, kept in pairs:
            if left.data_ptr() != kept.data_ptr():
                self.device.host_release(left)
        return state


def _leaves_device(before: Placement, after: Placement) -> bool:
    was, will = RECIPES[before], RECIPES[after]
    return was.state == "device" != will.state or was.gradient == "device" != will.gradient


class SwitchError(RuntimeError):
    """An error: a switch to another plan failed. Training goes on with the plan that ran before."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(
            f"the switch to another plan failed, because of {_named(cause)}. Training goes on with the plan that ran "
            "before, and no result has changed. Free memory, or give a plan that needs less of it "
            "(tune plan --gpu-memory, --host-memory)"
        )


class LostPlanError(RuntimeError):
    """An error: a switch to another plan failed half-way, and the plan before could not be restored. The training run
    cannot continue.
    """

    def __init__(self, cause: BaseException, second: BaseException) -> None:
        super().__init__(
            f"the switch to another plan failed half-way, because of {_named(cause)}. The plan that ran before could "
            f"not be restored, because of {_named(second)}. Training cannot continue: start it again, and resume from "
            "the newest checkpoint"
        )


def _named(error: BaseException) -> str:
    first_line, *_ = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {first_line.rstrip('.')}" if first_line else type(error).__name__


def release_frames(error: BaseException) -> None:
    """Replace the traceback of an error by a note with its text, which is printed with the error.

    The traceback itself keeps all variables of the functions that have failed, such as tensors in GPU memory, until the
    error is handled.
    """
    links: list[BaseException | None] = [error]
    while links:
        one = links.pop()
        if one is not None and one.__traceback__ is not None:
            where = "".join(traceback.format_tb(one.__traceback__))
            traceback.clear_frames(one.__traceback__)
            one.__traceback__ = None
            one.add_note(f"Raised at:\n{where}")
            links += [one.__cause__, one.__context__]


class LockedBuffers:
    """The host buffers of a device that were page-locked at some moment, so that buffers of an attempt that failed
    later can be found.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        # Weak references, because buffers may be released meanwhile.
        self._known = [weakref.ref(buffer) for buffer in device.host_buffers()]

    def release_later_ones(self, states: Iterable[SubgroupState]) -> None:
        """Release the buffers that were made since then, except for those that the given subgroups use."""
        known = {id(buffer) for ref in self._known if (buffer := ref()) is not None}
        used = {t.data_ptr() for state in states for t in (*state.state, state.gradient, state.wire)}
        for buffer in self._device.host_buffers():
            if id(buffer) not in known and buffer.data_ptr() not in used:
                self._device.host_release(buffer)


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
