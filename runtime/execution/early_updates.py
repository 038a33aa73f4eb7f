"""Early updates: optimizer updates that start before the gradient norm is known.

Once the norm is known, the new state is kept, or dropped if gradients must be clipped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
    """The optimizer update of one subgroup in one step: its hyperparameters and gradients."""

    step: UpdateStep
    segments: list[Segment]

    def equals(self, other: SubgroupJob) -> bool:
        """Return whether this update and another one of the same subgroup give identical bits."""
        return _scalars(self) == _scalars(other)


@dataclass(slots=True)
class EarlyUpdate:
    """An update of one subgroup that starts before the gradient norm is known.

    It reads the subgroup's present state, ``source``, and writes to the spare buffers ``into``. If the step
    neither clips nor overflows, ``into`` becomes the present state. Otherwise the training thread sets
    ``dropped``, and parts of the update that have not started by then do nothing.
    """

    job: SubgroupJob
    source: tuple[torch.Tensor, ...]
    into: tuple[torch.Tensor, ...]
    dropped: bool = False


@dataclass(slots=True)
class StagedUpdate:
    """A subgroup in a staging buffer: its optimizer state is copied to GPU memory for its update.

    Attributes:
        origin: The subgroup's state in host memory. If the update waits for the gradient norm, the new state is
            copied back to it. Otherwise the new state is copied to a spare buffer in host memory.
        wire: The staging buffer's tensor for new parameters, if the update starts before the gradient norm is known.
        early: The early update. None if the update waits for the norm.
    """

    origin: tuple[torch.Tensor, ...]
    into: tuple[torch.Tensor, ...]
    wire: torch.Tensor | None
    came: Completion
    early: EarlyUpdate | None = None

    @classmethod
    def of(cls, state: SubgroupState, slot: StagingSlot, came: Completion) -> Self:
        """Build the object that describes a subgroup's update in a staging buffer on the GPU."""
        wire = None if slot.wire is None else slot.wire[: state.elements]
        return cls(state.state, slot.views(state.elements), wire, came)

    @property
    def dropped(self) -> bool:
        """Return whether the subgroup's early update was dropped, so that its operations do nothing if they start."""
        return self.early is not None and self.early.dropped


class EarlyUpdates:
    """The early updates of a step, which start before the gradient norm is known, and their spare buffers in host
    memory.

    Only the training thread calls the methods. Updates on the CPU fill the spare buffers.

    Attributes:
        wires: For each subgroup, the host buffer for the new parameters, in the model's dtype. They are copied to the
            model only after the gradient norm is known.
        begun: For each subgroup, the update that has begun early in the present step.
    """

    def __init__(
        self, device: Device, states: Sequence[SubgroupState], updated_early: Sequence[bool], *, shared: bool = False
    ) -> None:
        """Reserve spare buffers in host memory for the subgroups that are updated before the gradient norm is known.

        Args:
            updated_early: For each subgroup, whether the plan updates it early.
            shared: True if their state is part of larger tensors that the training framework keeps (see `bring_back`).
        """
        states = [state for state in states if updated_early[state.index]]
        self._device = device
        self._kept = {s.index: s.state for s in states} if shared else {}
        self._spares = {s.index: tuple(device.host_empty(t.numel(), t.dtype) for t in s.state) for s in states}
        self.wires = {s.index: device.host_empty(s.elements, s.wire.dtype) for s in states}
        self.begun: dict[int, EarlyUpdate] = {}

    @property
    def nbytes(self) -> int:
        """Return the bytes of the spare host buffers for early updates."""
        spares = (t for spare in self._spares.values() for t in spare)
        return sum(t.nbytes for t in (*spares, *self.wires.values()))

    def begin(self, state: SubgroupState, job: SubgroupJob) -> EarlyUpdate:
        """Create the early update of a subgroup: an update that starts before the gradient norm is known."""
        early = EarlyUpdate(job, state.state, self._spares[state.index])
        self.begun[state.index] = early
        return early

    def drop(self, subgroups: Iterable[int]) -> dict[int, EarlyUpdate]:
        """Drop the early updates of the given subgroups: updates that began before the gradient norm was known.

        Return the dropped updates by subgroup. A subgroup without an early update in this step is left out.
        """
        dropped = {s: self.begun.pop(s) for s in list(subgroups) if s in self.begun}
        for early in dropped.values():
            early.dropped = True
        return dropped

    def wrong(self, jobs: Sequence[SubgroupJob]) -> list[int]:
        """Return the subgroups whose early update cannot be kept, for example because the step clips gradients."""
        return [s for s, early in self.begun.items() if not early.job.equals(jobs[s])]

    def take(self, states: Sequence[SubgroupState]) -> list[SubgroupState]:
        """Keep the results of the step's early updates that were not dropped. Return the subgroups of these updates.

        The spare buffers become the subgroups' state, and the tensors with the old state become spare buffers.
        """
        taken = [states[subgroup] for subgroup in sorted(self.begun)]
        for state in taken:
            early = self.begun.pop(state.index)
            state.state, self._spares[state.index] = early.into, early.source
        return taken

    def away(self, states: Sequence[SubgroupState]) -> list[SubgroupState]:
        """Return the subgroups with their newest optimizer state in a spare buffer, because an early update wrote it
        there.
        """
        return [state for state in states if self._kept.get(state.index, state.state) is not state.state]

    def bring_back(self, state: SubgroupState) -> None:
        """Copy a subgroup's optimizer state from a spare buffer back to the training framework's own tensors.

        The state is in the spare buffer because an early update has written it there. After this call, training uses
        the framework's tensors. No update of the subgroup may be running.
        """
        origin = self._kept[state.index]
        for to, source in zip(origin, state.state, strict=True):
            to.copy_(source)
        state.state, self._spares[state.index] = origin, state.state

    def close(self, states: Sequence[SubgroupState]) -> None:
        """Release the spare buffers of early updates.

        No update may be running.

        Args:
            states: The optimizer state of all subgroups. State in a spare buffer is copied back first.
        """
        self.drop(list(self.begun))
        for state in self.away(states):
            self.bring_back(state)
        for tensor in (*(t for s in self._spares.values() for t in s), *self.wires.values()):
            self._device.host_release(tensor)
        self._spares.clear()
        self.wires.clear()
        self._kept.clear()


def _scalars(job: SubgroupJob) -> object:
    step = job.step
    parts = [
        (s.start, s.end, s.gradient.data_ptr(), s.gradient.dtype, step.scalars(s.scale).tobytes()) for s in job.segments
    ]
    return step.kernel, step.variant, parts
