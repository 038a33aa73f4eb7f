"""Early updates: updates that start before the gradient norm is known, and are then committed or dropped."""

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
    """The optimizer update of one subgroup in one step: hyperparameters and gradients."""

    step: UpdateStep
    segments: list[Segment]

    def equals(self, other: SubgroupJob) -> bool:
        """Return whether two updates give identical bits: the same kernel, the same scalars, the same gradient."""
        return _scalars(self) == _scalars(other)


@dataclass(slots=True)
class EarlyUpdate:
    """An early update of one subgroup, which writes to spare buffers instead of the live state.

    ``source`` is the live state. ``into`` becomes the live state if the early update was right. The training
    thread sets ``dropped``, and parts of the update that have not started by then do nothing.
    """

    job: SubgroupJob
    source: tuple[torch.Tensor, ...]
    into: tuple[torch.Tensor, ...]
    dropped: bool = False


@dataclass(slots=True)
class StagedUpdate:
    """A subgroup in a staging buffer in GPU memory.

    Attributes:
        origin: The subgroup's state in host memory. The new state is copied back there unless the update
            is early.
        into: The staging buffer's tensors for the state.
        wire: The staging buffer's tensor for new parameters of an early update.
        came: The end of the copy of the state to the staging buffer.
        early: The early update. None if the update waits for the gradient norm.
    """

    origin: tuple[torch.Tensor, ...]
    into: tuple[torch.Tensor, ...]
    wire: torch.Tensor | None
    came: Completion
    early: EarlyUpdate | None = None

    @classmethod
    def of(cls, state: SubgroupState, slot: StagingSlot, came: Completion) -> Self:
        """Build the staged update of a subgroup, which is in a staging buffer in GPU memory."""
        wire = None if slot.wire is None else slot.wire[: state.elements]
        return cls(state.state, slot.views(state.elements), wire, came)

    @property
    def dropped(self) -> bool:
        """Return whether an early update was wrong and dropped. Its ops that have not started then do nothing."""
        return self.early is not None and self.early.dropped


class EarlyUpdates:
    """The early updates of a step, and their spare buffers in host memory.

    Only the training thread calls it. The host lane fills the spare buffers.

    Attributes:
        wires: By subgroup, the buffer in which its new parameters wait for the gradient norm.
        begun: By subgroup, the early updates that have begun in the present step.
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
        """Return the bytes of host memory that the spare buffers of early updates take."""
        spares = (t for spare in self._spares.values() for t in spare)
        return sum(t.nbytes for t in (*spares, *self.wires.values()))

    def begin(self, state: SubgroupState, job: SubgroupJob) -> EarlyUpdate:
        """Create a subgroup's early update, for the caller to submit to a lane."""
        early = EarlyUpdate(job, state.state, self._spares[state.index])
        self.begun[state.index] = early
        return early

    def drop(self, subgroups: Iterable[int]) -> dict[int, EarlyUpdate]:
        """Drop the early updates of the given subgroups. Return those that had begun, by subgroup."""
        dropped = {s: self.begun.pop(s) for s in list(subgroups) if s in self.begun}
        for early in dropped.values():
            early.dropped = True
        return dropped

    def wrong(self, jobs: Sequence[SubgroupJob]) -> list[int]:
        """Return the subgroups with an early update that differs from the update in ``jobs``."""
        return [s for s, early in self.begun.items() if not early.job.equals(jobs[s])]

    def take(self, states: Sequence[SubgroupState]) -> list[SubgroupState]:
        """Commit the remaining early updates by exchanging live state and spare buffers. Return their subgroups."""
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
