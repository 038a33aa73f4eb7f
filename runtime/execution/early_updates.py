"""Updates that begin before the norm is known, and what becomes of them at the barrier."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from ebbtide.runtime.devices.base import Device
from ebbtide.runtime.devices.lane import Completion
from ebbtide.runtime.execution.gradients import Segment
from ebbtide.runtime.execution.subgroup_state import StagingSlot, SubgroupState
from ebbtide.runtime.kernels.step import UpdateStep


@dataclass(frozen=True, slots=True)
class SubgroupJob:
    """The work of one step on one subgroup."""

    step: UpdateStep
    segments: list[Segment]

    def equals(self, other: SubgroupJob) -> bool:
        """To the bit: the same kernel reads the same scalars and the same gradient."""
        return _scalars(self) == _scalars(other)


@dataclass(slots=True)
class EarlyUpdate:
    """An update out of place: ``source`` stays, ``into`` is the subgroup's state if it was right.

    ``dropped`` is set by the training thread; what has not begun by then does nothing.
    """

    job: SubgroupJob
    source: tuple[torch.Tensor, ...]
    into: tuple[torch.Tensor, ...]
    dropped: bool = False


@dataclass(slots=True)
class StagedUpdate:
    """A subgroup in a staging slot.

    Attributes:
        home: Its state when it came, which goes back there unless the update is early.
        into: The slot's buffers for its state.
        wire: The slot's buffer for an early update's new parameters.
        came: The end of the copy that brings the state.
        guess: The early update. None: it waits for the norm.
    """

    origin: tuple[torch.Tensor, ...]
    into: tuple[torch.Tensor, ...]
    wire: torch.Tensor | None
    came: Completion
    early: EarlyUpdate | None = None

    @classmethod
    def of(cls, state: SubgroupState, slot: StagingSlot, came: Completion) -> Self:
        """Return the visit of a subgroup to a slot."""
        wire = None if slot.wire is None else slot.wire[: state.elements]
        return cls(state.state, slot.views(state.elements), wire, came)

    @property
    def dropped(self) -> bool:
        """True if the early update was wrong. What of the visit has not begun then does nothing."""
        return self.early is not None and self.early.dropped


class EarlyUpdates:
    """Called by the training thread alone; the host lane fills the spares.

    Attributes:
        wires: by subgroup, where its new parameters wait for the norm.
        begun: of this step.
    """

    def __init__(self, device: Device, states: Sequence[SubgroupState], *, shared: bool = False) -> None:
        """Reserve the memory.

        Args:
            states: The subgroups that are updated early.
            shared: Whether their state is part of larger tensors, which the framework keeps (`bring_back`).
        """
        self._device = device
        self._kept = {s.index: s.state for s in states} if shared else {}
        self._spares = {s.index: tuple(device.host_empty(t.numel(), t.dtype) for t in s.state) for s in states}
        self.wires = {s.index: device.host_empty(s.elements, s.wire.dtype) for s in states}
        self.begun: dict[int, EarlyUpdate] = {}

    @property
    def nbytes(self) -> int:
        """Host memory of all that is there twice."""
        spares = (t for spare in self._spares.values() for t in spare)
        return sum(t.nbytes for t in (*spares, *self.wires.values()))

    def begin(self, state: SubgroupState, job: SubgroupJob) -> EarlyUpdate:
        """To be submitted by who calls."""
        early = EarlyUpdate(job, state.state, self._spares[state.index])
        self.begun[state.index] = early
        return early

    def drop(self, subgroups: Iterable[int]) -> dict[int, EarlyUpdate]:
        """Those of them that had begun."""
        dropped = {s: self.begun.pop(s) for s in list(subgroups) if s in self.begun}
        for early in dropped.values():
            early.dropped = True
        return dropped

    def wrong(self, jobs: Sequence[SubgroupJob]) -> list[int]:
        """Whose guess is not what ``jobs``, by subgroup, ask for."""
        return [s for s, early in self.begun.items() if not early.job.equals(jobs[s])]

    def take(self, states: Sequence[SubgroupState]) -> list[SubgroupState]:
        """Commit the remaining early updates: swap state and spare. Return those subgroups in order."""
        taken = [states[subgroup] for subgroup in sorted(self.begun)]
        for state in taken:
            early = self.begun.pop(state.index)
            state.state, self._spares[state.index] = early.into, early.source
        return taken

    def away(self, states: Sequence[SubgroupState]) -> list[SubgroupState]:
        """Return those whose state is in a spare, and not in the framework's tensors."""
        return [state for state in states if self._kept.get(state.index, state.state) is not state.state]

    def bring_back(self, state: SubgroupState) -> None:
        """Copy a subgroup's state from its spare to the framework's tensors, where the state is from now on.

        No update of the subgroup is under way.
        """
        origin = self._kept[state.index]
        for to, source in zip(origin, state.state, strict=True):
            to.copy_(source)
        state.state, self._spares[state.index] = origin, state.state

    def close(self, states: Sequence[SubgroupState]) -> None:
        """Give the memory back. No update is under way.

        Args:
            states: All subgroups.
        """
        self.drop(list(self.begun))
        for state in self.away(states):
            self.bring_back(state)
        for tensor in (*(t for s in self._spares.values() for t in s), *self.wires.values()):
            self._device.host_release(tensor)
        self._spares.clear()
        self.wires.clear()


def _scalars(job: SubgroupJob) -> object:
    step = job.step
    parts = [
        (s.start, s.end, s.gradient.data_ptr(), s.gradient.dtype, step.scalars(s.scale).tobytes()) for s in job.segments
    ]
    return step.kernel, step.variant, parts


def spares_of(
    device: Device,
    states: Sequence[SubgroupState],
    updated_early: Mapping[int, bool] | Sequence[bool],
    *,
    shared: bool = False,
) -> EarlyUpdates:
    """Return the memory for the subgroups that a plan updates early.

    Args:
        shared: see `EarlyUpdates`.
    """
    return EarlyUpdates(device, [state for state in states if updated_early[state.index]], shared=shared)
