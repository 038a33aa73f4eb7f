"""The code of a plan's operations, which the lanes' threads run: copies and updates of subgroups' state.

An early update starts before the gradient norm is known. Once the norm is known, the new state is kept, or dropped if
gradients must be clipped.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from ebbtide.runtime.checkpoint.live_state import LiveState
from ebbtide.runtime.devices.base import Device
from ebbtide.runtime.devices.lane import Completion, LaneQueue
from ebbtide.runtime.execution.gradients import Segment
from ebbtide.runtime.execution.subgroup_state import StagingSlot, SubgroupState
from ebbtide.runtime.kernels.rule import UpdateRule
from ebbtide.runtime.kernels.step import UpdateStep
from ebbtide.runtime.storage.store import ExtentStore
from ebbtide.simulator.schedule import Lane as LaneName


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
        """Reserve host buffers. With ``shared``, the state is part of larger tensors that stay (see `bring_back`)."""
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
        """Return the subgroups with their newest optimizer state in a spare buffer, where an early update wrote it."""
        return [state for state in states if self._kept.get(state.index, state.state) is not state.state]

    def bring_back(self, state: SubgroupState) -> None:
        """Copy optimizer state from a spare buffer, where an early update wrote it, to the framework's own tensors.

        No update of the subgroup may be running.
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


# The last elements of master and moments in host memory before the update, and the update's step.
Spent = tuple[list[torch.Tensor], UpdateStep]
Tensors = tuple[torch.Tensor, ...]


class OpBodies:
    """A set of methods, one for each operation that moves or updates subgroups' state. The executor passes the buffers.

    Attributes:
        gate: The object that an update asks before it overwrites state, because a checkpoint may still be reading the
            state. None if no checkpoint reads the state.
        spent: The last elements of each subgroup's state before its latest update, with this update's hyperparameters.
            From them, `UpdateRule.spent` computes how DeepSpeed would have changed the gradient. Some of DeepSpeed's
            CPU ops overwrite a gradient's last elements when they apply it, and ebbtide's updates do not. The dict is
            empty if DeepSpeed's op does not overwrite gradients (`UpdateRule.spends` is False).
    """

    def __init__(
        self,
        device: Device,
        lanes: Mapping[LaneName, LaneQueue],
        states: Sequence[SubgroupState],
        rule: UpdateRule,
        threads: int,
        store: ExtentStore | None,
    ) -> None:
        self._device, self._lanes, self._states = device, lanes, states
        self._rule, self._threads, self._store = rule, threads, store
        self.gate: LiveState | None = None
        self.spent = dict[int, Spent]()
        self._stale, self._stale_lock = set[int](), threading.Lock()

    def outdate(self, subgroups: Iterable[int]) -> None:
        """Record that the subgroups' optimizer state has changed, or may change, in the memory where it lives."""
        with self._stale_lock:
            self._stale.update(subgroups)

    def _was_stale(self, subgroup: int) -> bool:
        with self._stale_lock:
            stale = subgroup in self._stale
            self._stale.discard(subgroup)
        return stale

    def _ask_gate(self, subgroup: int) -> None:
        if self.gate is not None:
            self.gate.before_update(subgroup)

    def _copy(self, to: Sequence[torch.Tensor], source: Sequence[torch.Tensor], lane: LaneName, on: LaneName) -> None:
        stream = self._lanes[on].stream
        for target, origin in zip(to, source, strict=True):
            self._device.copy(target, origin, lane, stream)

    def copy_parameters(self, lane: LaneName, source: torch.Tensor, subgroup: int) -> None:
        self._copy([self._states[subgroup].wire], [source], lane, lane)

    def state_read(self, slot: Tensors, subgroup: int) -> None:
        self._was_stale(subgroup)
        assert self._store is not None
        self._store.read(subgroup, slot)

    def state_write(self, slot: Tensors, version: int, subgroup: int) -> None:
        self._ask_gate(subgroup)  # readers see the new state from the end of the write on
        assert self._store is not None
        self._store.write(subgroup, slot, version)

    def state_h2d(self, staged: StagedUpdate, subgroup: int) -> None:
        if not staged.dropped:
            self._was_stale(subgroup)
            self._copy(staged.into, staged.origin, LaneName.H2D, LaneName.H2D)

    def state_d2h(self, staged: StagedUpdate, out: torch.Tensor | None, subgroup: int) -> None:
        """Copy a subgroup's new state from the GPU to host memory.

        Args:
            out: Host memory to which the subgroup's new parameters are also copied, if the update started before the
                gradient norm was known. Otherwise unused.
        """
        if staged.dropped:
            return
        self._ask_gate(subgroup)  # also for an early update: the memory that is written held the live state a step ago
        if staged.early is None:
            self._copy(staged.origin, staged.into, LaneName.D2H, LaneName.D2H)
        else:
            assert staged.wire is not None
            assert out is not None
            self._copy((*staged.early.into, out), (*staged.into, staged.wire), LaneName.D2H, LaneName.D2H)

    def update_resident(self, out: torch.Tensor, job: SubgroupJob, subgroup: int) -> None:
        self._ask_gate(subgroup)
        self._update_device(subgroup, self._states[subgroup].state, out, job)

    def update_staged(self, staged: StagedUpdate, job: SubgroupJob, out: torch.Tensor | None, subgroup: int) -> None:
        if staged.dropped:
            return
        if self._was_stale(subgroup):
            self._copy(staged.into, staged.origin, LaneName.H2D, LaneName.DEVICE_UPDATE)
        assert out is not None
        self._update_device(subgroup, staged.into, out, job)

    def _update_device(self, subgroup: int, target: Tensors, out: torch.Tensor, job: SubgroupJob) -> None:
        state, stream = self._states[subgroup], self._lanes[LaneName.DEVICE_UPDATE].stream
        self._keep_spent(subgroup, target, job, stream)
        for part in job.segments:
            span = slice(part.start, part.end)
            tail = self._rule.tail(state.elements, part.start, part.end)
            parts = [t[span] for t in target]
            self._device.update(parts, part.gradient, out[span], job.step, part.scale, tail, stream)

    def update_host(self, slot: Tensors | None, out: torch.Tensor, job: SubgroupJob, subgroup: int) -> None:
        """Update a subgroup in host memory.

        Args:
            slot: Host buffer with the state of a subgroup on a drive. None if the state is in host memory.
        """
        if slot is None:
            self._ask_gate(subgroup)
        elif self._was_stale(subgroup):
            self.state_read(slot, subgroup)
        target = self._states[subgroup].state if slot is None else slot
        self._update_host(subgroup, target, out, job)

    def update_host_early(self, early: EarlyUpdate, out: torch.Tensor, subgroup: int) -> None:
        if not early.dropped:
            # The memory that is written held the live state a step ago, and a checkpoint may still be reading it.
            self._ask_gate(subgroup)
            self._update_host(subgroup, early.into, out, early.job, early.source)

    def _update_host(
        self, subgroup: int, target: Tensors, out: torch.Tensor, job: SubgroupJob, source: Tensors | None = None
    ) -> None:
        self._keep_spent(subgroup, target if source is None else source, job)
        with self._device.host_update(self._states[subgroup].elements, out_of_place=source is not None):
            parts = [(part.start, part.end, part.gradient, part.scale) for part in job.segments]
            self._rule.update(target, parts, out, job.step, self._threads, source)

    def _keep_spent(
        self, subgroup: int, source: Sequence[torch.Tensor], job: SubgroupJob, stream: object = None
    ) -> None:
        elements = self._states[subgroup].elements
        begin = self._rule.tail_begin(elements) if self._rule.spends else elements
        if begin == elements:
            return
        last = [tensor[begin:elements] for tensor in source]
        kept, _ = self.spent.get(subgroup) or ([self._device.host_empty(len(t), t.dtype) for t in last], None)
        self.spent[subgroup] = kept, job.step
        for to, tensor in zip(kept, last, strict=True):
            if stream is None:
                to.copy_(tensor)
            else:
                self._device.copy(to, tensor, LaneName.D2H, stream)
