"""The code of a plan's operations, which the lanes' threads run: copies and updates of subgroups' state."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence

import torch
from ebbtide.runtime.checkpoint.live_state import LiveState
from ebbtide.runtime.devices.base import Device
from ebbtide.runtime.devices.lane import Lane
from ebbtide.runtime.execution.early_updates import EarlyUpdate, StagedUpdate, SubgroupJob
from ebbtide.runtime.execution.subgroup_state import SubgroupState
from ebbtide.runtime.kernels.rule import UpdateRule
from ebbtide.runtime.kernels.step import UpdateStep
from ebbtide.runtime.storage.store import ExtentStore
from ebbtide.simulator.schedule import Lane as LaneName

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
        lanes: Mapping[LaneName, Lane],
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
        """Record that the optimizer state of the given subgroups has changed, or may change, in the memory where it
        lives.
        """
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
