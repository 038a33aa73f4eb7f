"""A switch from one plan to another: the movement of subgroups' tensors to the memory that the new plan names, and the
errors of a switch that fails.
"""

from __future__ import annotations

import traceback
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, replace

from ebbtide.runtime.devices.base import Device
from ebbtide.runtime.execution.engine import TrainingEngine
from ebbtide.runtime.execution.subgroup_state import Buffers, SubgroupState, place, place_parameters
from ebbtide.runtime.storage.store import ExtentStore
from ebbtide.simulator.plan import ParameterLocation, Placement, Plan
from ebbtide.simulator.update.recipes import RECIPES


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
