"""The executor of a plan, which runs each step's optimizer updates and copies in the background, and waits for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from ebbtide.runtime.devices.base import Device
from ebbtide.runtime.devices.clock import Mark
from ebbtide.runtime.devices.lane import Completion, LaneQueue
from ebbtide.runtime.execution.allocated import Allocated
from ebbtide.runtime.execution.bodies import EarlyUpdate, OpBodies, StagedUpdate, SubgroupJob
from ebbtide.runtime.execution.gradients import GradientOps
from ebbtide.runtime.execution.subgroup_state import SubgroupState
from ebbtide.runtime.kernels.rule import UpdateRule
from ebbtide.runtime.storage.store import ExtentStore
from ebbtide.simulator.schedule import Lane as LaneName
from ebbtide.simulator.schedule import Op, OpKind
from ebbtide.simulator.update.issue import Issue
from ebbtide.simulator.update.recipes import RECIPES, Recipe, slot_limits
from ebbtide.simulator.update.steps import Queue, Slot, Step, Wait

HISTORY_STEPS = 8
KEPT_FETCHES = 4096
# After the last op of one of these kinds, a subgroup's state is in its own memory again.
STATE_ENDS = {OpKind.STATE_D2H, OpKind.STATE_WRITE, OpKind.UPDATE_DEVICE, OpKind.UPDATE_HOST, OpKind.UPDATE_HOST_EARLY}

IssuedOp = tuple[Op, Completion]


@dataclass(slots=True)
class StepRecord:
    """The operations of one training step, each with its start and end.

    The measured timeline is made from them.

    Attributes:
        origin: The GPU event of the previous step from which the times of this step's events are measured.
    """

    number: int
    origin: Mark | None = None
    ops: list[IssuedOp] = field(default_factory=list)


class IssuedOps:
    """The copies, updates and other operations of the latest optimizer steps, with methods that wait for them.

    The executor adds operations. Only the training thread uses this object. Every wait raises the errors of the
    operations that it waits for.

    Attributes:
        history: The operations of each of the latest steps, oldest step first.
        stored: Subgroups with optimizer state on a drive.
    """

    def __init__(self, device: Device, states: list[SubgroupState], store: ExtentStore | None) -> None:
        self.device, self.states, self.store = device, states, store
        self.history: deque[StepRecord] = deque(maxlen=HISTORY_STEPS)
        self.stored = frozenset(s.index for s in states if RECIPES[s.placement].state == "storage")
        # Since the latest launch: all ops of updates, and the op that completed the latest update of each subgroup.
        self._issued: list[IssuedOp] = []
        self._latest = dict[int, Completion]()
        self._published = dict[int, Completion]()  # of the latest step, keyed by subgroup
        self._own: list[IssuedOp] = []  # ops of the latest step
        self._ahead: list[IssuedOp] = []  # ops that the latest step has begun for the next one
        self._ended = 0  # number of the first ops of ``_own`` that have ended
        # Copies of parameters for forward and backward since the latest launch, for the timeline.
        self._beside: deque[IssuedOp] = deque(maxlen=KEPT_FETCHES)
        self._latest_fetch = Completion.done()

    def wait_parameters(self, subgroups: Iterable[int]) -> None:
        """Make the training streams wait for the updates that write subgroups' new parameters."""
        # Without CUDA, the calling thread waits.
        if not self.busy:
            return  # no updates are running, so nothing has to be asked of the device
        self.device.training_waits(self._published[s] for s in subgroups)

    def updates_of(self, subgroups: Iterable[int]) -> list[Completion]:
        """Return the operations that must end before the given subgroups have their new parameters."""
        return [self._published[subgroup] for subgroup in subgroups] if self.busy else []

    def wait_state(self, subgroup: int) -> None:
        """Wait until a subgroup's latest update has ended and its new state is back in host memory or on the drive."""
        for op, completion in reversed(self._own):
            if op.subgroup == subgroup and op.kind in STATE_ENDS:
                completion.wait_host()
                break
        if self.store is not None and subgroup in self.stored:
            self.store.check_restored([subgroup])

    def wait_all(self) -> None:
        """Wait for the operations of launched steps, but not for those of `wait_ahead`. Raise the first error."""
        _wait(self._own)
        self._latest_fetch.wait_host()

    def wait_ahead(self) -> None:
        """Wait until the operations that the latest optimizer step started in advance for the next step have ended."""
        _wait(self._ahead)

    def wait_memory(self) -> None:
        """Wait until all operations on subgroups whose optimizer state is in memory have ended."""
        _wait(pair for pair in (*self._own, *self._ahead) if pair[0].subgroup not in self.stored)
        self._latest_fetch.wait_host()

    def wait_under_way(self) -> None:
        """Wait for the operations, such as copies, that were started in advance for the coming optimizer step."""
        _wait(self._issued)

    @property
    def busy(self) -> bool:
        """Return whether an operation of the latest optimizer step is still running or has failed."""
        # Each op is asked until it has ended, and not again by every reader.
        while self._ended < len(self._own):
            _, completion = self._own[self._ended]
            if not completion.ended or completion.error is not None:
                return True
            self._ended += 1
        return False

    def raise_if_failed(self) -> None:
        """Raise the error of a background operation that has already failed. Do not wait for other operations."""
        for _, completion in (*self._own, *self._ahead):
            if completion.issued.is_set() and completion.error is not None:
                completion.wait_issued()


def _wait(ops: Iterable[IssuedOp]) -> None:
    for _, completion in ops:
        completion.wait_host()


# Copies that do not happen if GPU memory is host memory: the update kernel writes directly to the destination.
WRITTEN_BY = {OpKind.PARAMETER_H2D, OpKind.PARAMETER_D2H}

Body = Callable[[int], None]  # called with a subgroup


class Executor(IssuedOps):
    """The executor of a plan. It owns the lanes (threads and streams that run copies and updates in order).

    Only the training thread calls `prefetch` and `launch`. A step's operations run in the background after
    `launch` returns. `wait_parameters`, `wait_state` and `wait_all` wait only for the operations that they
    need, and raise their errors.
    """

    def __init__(
        self,
        device: Device,
        made: Allocated,
        threads: int,
        rule: UpdateRule,
        store: ExtentStore | None = None,
        arrival: Sequence[int] | None = None,
    ) -> None:
        """Start threads and streams. ``arrival`` is the order of complete gradients. None: the last subgroup first."""
        plan, states = made.plan, made.states
        super().__init__(device, states, store)
        self.slots, self.host_slots = made.slots, made.host_slots
        self.rule, self.early_updates = rule, made.early_updates
        if any(RECIPES[s.placement].queue is Queue.DEVICE for s in states):
            self.prepare_device()
        self._version = 0  # version of the state that the latest step writes to drives
        recipes = [way.recipe for way in plan.ways]
        buffers = slot_limits(len(self.slots), recipes, len(self.host_slots))
        self.parameter_slots = self._slots_for(Slot.PARAMETER, recipes, buffers, device.host_empty)
        self.outgoing_slots = self._slots_for(Slot.OUTGOING, recipes, buffers, device.device_empty)
        coming = arrival or range(len(states))[::-1]
        redo = [way.redo for way in plan.ways]
        self.issue = Issue(recipes, plan.issue_order, coming, buffers, plan.prefetch, self._add, self._arrived, redo)
        self._jobs: list[SubgroupJob] = []
        self._ready = dict[int, SubgroupJob]()  # early updates that may begin
        self._complete = dict[int, Completion]()  # op after which a subgroup's gradient on the device is complete
        self._staged = dict[int, StagedUpdate]()  # the latest staged update of each subgroup
        self._reads = dict[int, Completion]()  # the latest read of each stored subgroup
        self._begun = False
        # Last, because allocations above may fail, and then no code would end the lanes' threads.
        self.lanes: dict[LaneName, LaneQueue] = device.lanes()
        self.gradients = GradientOps(device, self.lanes)
        self.bodies = OpBodies(device, self.lanes, states, rule, threads, store)

    def prepare_device(self) -> None:
        """Compile the GPU kernels that optimizer updates may run, so that no training step waits for the compiler."""
        dtypes = self.states[0].gradient.dtype, self.states[0].wire.dtype
        self.device.prepare(self.rule.forms(), 1 + len(self.rule.moments), *dtypes)

    def _begin_ahead(self) -> None:
        if not self._begun:
            self._begun = True
            self.issue.ahead()

    def _slots_for(
        self,
        slot: Slot,
        recipes: Sequence[Recipe],
        buffers: Mapping[Slot, int],
        empty: Callable[[int, torch.dtype], torch.Tensor],
    ) -> list[torch.Tensor]:
        users = [state for state, recipe in zip(self.states, recipes, strict=True) if slot in recipe.slots]
        if self.device.unified or not users:
            return []
        largest = max(users, key=lambda s: s.elements)
        return [empty(largest.elements, largest.wire.dtype) for _ in range(buffers[slot])]

    # -- launching ---------------------------------------------------------------------------

    def prefetch(self, *, early_updates: bool = True) -> None:
        """Start to copy subgroups' state to staging buffers on the GPU, before the gradient norm is known."""
        self._begin_ahead()
        self.issue.backward(None, early=early_updates)

    def update_early(self, subgroup: int, job: SubgroupJob) -> None:
        """Start a subgroup's early update, which writes to spare buffers until `settle` commits or drops it.

        The update waits for the subgroup's gradient and, if it is staged, for the copy of its state to the GPU. ``job``
        is the update of a step that neither clips nor overflows.
        """
        self._begin_ahead()
        self._ready[subgroup] = job
        if not self.issue.recipes[subgroup].gradient_steps:
            self._complete[subgroup] = Completion.done(self.device.current_event())
        self.issue.gradient(subgroup)

    def _arrived(self, subgroup: int) -> list[Completion]:
        if subgroup in self._complete:
            return [self._complete[subgroup]]
        return self.gradients.arrived(subgroup) if self.issue.recipes[subgroup].gradient_steps else []

    def drop_early_updates(self, subgroups: Iterable[int] | None = None) -> bool:
        """Discard the updates that began before the gradient norm was known. Return whether there were any.

        These updates have not changed the subgroups' optimizer state, because they write to other buffers.

        Args:
            subgroups: Subgroups whose early updates are discarded. None selects all subgroups.
        """
        some = list(self.early_updates.wires if subgroups is None else subgroups)
        waiting = [s for s in some if self._ready.pop(s, None)]
        dropped = self.early_updates.drop(some)
        for subgroup in {*waiting, *dropped}:
            self.issue.drop(subgroup)
            self._complete.pop(subgroup, None)
        return bool(dropped or waiting)

    def skip(self) -> bool:
        """End an optimizer step that makes no updates, such as after an overflow."""
        dropped = self.drop_early_updates()
        self.issue.skip()
        return dropped

    def settle(self, jobs: list[SubgroupJob]) -> list[SubgroupState]:
        """Decide for each early update whether its result is kept or dropped, now that the gradient norm is known."""
        # If the step clips, the scale differs, and the early update is dropped. Call this method before `launch`.
        self.drop_early_updates(self.early_updates.wrong(jobs))
        return self.early_updates.take(self.states)

    def launch(self, jobs: list[SubgroupJob], iteration: int = 0) -> None:
        """Start the updates of an optimizer step, which then run in the background.

        Before this call, each subgroup's gradient must have been sent to the memory in which the subgroup's update
        will run.
        """
        self._begin_ahead()
        self._ready.clear()
        self._complete.clear()
        self._jobs = jobs
        self._version = self.store.tick() if self.store is not None and self.stored else 0
        barrier = Completion.done(self.device.current_event())
        begun = [*self._beside, *self.gradients.take_parts()]
        record = StepRecord(iteration, self.device.mark(barrier.event), begun)
        self._beside.clear()
        self._published, _ = self.issue.norm(barrier)
        self._own, self._issued = self._issued, []
        self.issue.ahead(barrier)
        self._ahead, self._issued = self._issued, []
        record.ops += [*self._own, *self._ahead]
        self.history.append(record)
        self._ended = 0

    def _add(self, step: Step, subgroup: int, waits: list[Completion]) -> Completion:
        if self.device.unified and step.kind in WRITTEN_BY:  # the kernel wrote directly to the destination
            return self._latest[subgroup]
        op = Op(-1, step.kind, step.lane, 0.0, subgroup=subgroup)
        completion = self._latest[subgroup] = Completion(op.label)
        self._issued.append((op, completion))
        # An update must not write to parameters in host memory while a copy to the GPU still reads them.
        if Wait.NORM in step.waits:
            waits = [*waits, self._latest_fetch]
        body = self._body(step, subgroup, completion)
        self.lanes[op.lane].submit(lambda: self._run(body, op), waits, completion)
        return completion

    def _body(self, step: Step, subgroup: int, end: Completion) -> Body:
        match step.kind:
            case OpKind.STATE_READ:
                self._reads[subgroup] = end
                return partial(self.bodies.state_read, self._host_slot(subgroup))
            case OpKind.STATE_WRITE:
                return partial(self.bodies.state_write, self._host_slot(subgroup), self._version)
            case OpKind.UPDATE_HOST:
                slot = self._host_slot(subgroup) if subgroup in self.stored else None
                return partial(self.bodies.update_host, slot, self._parameter_out(subgroup), self._jobs[subgroup])
            case OpKind.UPDATE_HOST_EARLY:
                out = self.early_updates.wires[subgroup]
                return partial(self.bodies.update_host_early, self._begin_early(subgroup), out)
            case OpKind.PARAMETER_H2D | OpKind.PARAMETER_D2H:
                return partial(self.bodies.copy_parameters, step.lane, self._parameter_out(subgroup))
            case OpKind.STATE_H2D:
                slot_ = self.slots[self.issue.holds[Slot.STAGING, subgroup]]
                self._staged[subgroup] = StagedUpdate.of(self.states[subgroup], slot_, end)
                return partial(self.bodies.state_h2d, self._staged[subgroup])
            case OpKind.UPDATE_DEVICE_EARLY:
                staged = self._staged[subgroup]
                staged.early = self._begin_early(subgroup)
                return partial(self.bodies.update_staged, staged, staged.early.job, staged.wire)
            case OpKind.STATE_D2H:
                early_out = self.early_updates.wires.get(subgroup)
                return partial(self.bodies.state_d2h, self._staged.pop(subgroup), early_out)
        # After an early update that was redone, the new parameters are at their final place.
        out = self.states[subgroup].wire if subgroup in self.early_updates.wires else self._parameter_out(subgroup)
        if subgroup in self._staged:
            return partial(self.bodies.update_staged, self._staged[subgroup], self._jobs[subgroup], out)
        return partial(self.bodies.update_resident, out, self._jobs[subgroup])

    def _begin_early(self, subgroup: int) -> EarlyUpdate:
        return self.early_updates.begin(self.states[subgroup], self._ready.pop(subgroup))

    def _host_slot(self, subgroup: int) -> tuple[torch.Tensor, ...]:
        number = self.issue.holds[Slot.STATE, subgroup]
        return self.host_slots[number].views(self.states[subgroup].elements)

    def _parameter_out(self, subgroup: int) -> torch.Tensor:
        own, state = self.early_updates.wires.get(subgroup), self.states[subgroup]
        if own is not None:
            return own
        for slot, buffers in ((Slot.PARAMETER, self.parameter_slots), (Slot.OUTGOING, self.outgoing_slots)):
            number = self.issue.holds.get((slot, subgroup))
            if number is not None and buffers:
                return buffers[number][: state.elements]
        return state.wire

    def _run(self, body: Body, op: Op) -> None:
        if self.gradients.before_op is not None:
            self.gradients.before_op(op)
        body(op.subgroup)

    def fetch(self, to: torch.Tensor, source: torch.Tensor, waits: list[Completion]) -> Completion:
        """Start to copy parameters from ``source`` in host memory to ``to`` in GPU memory, without waiting.

        Return a `Completion`, which marks the end of the copy. The copy begins when the operations in ``waits`` and the
        copies of earlier calls have ended. The caller may release its reference to ``to`` at any time. No update
        overwrites ``source`` before the copy has read it.
        """
        lane = self.lanes[LaneName.H2D_FETCH]
        op = Op(-1, OpKind.PARAMETER_FETCH, LaneName.H2D_FETCH, to.nbytes)
        completion = self._latest_fetch = Completion(op.label)
        self._beside.append((op, completion))
        lane.submit(lambda: self._run(lambda _: self.device.fetch(to, source, lane.stream), op), waits, completion)
        return completion

    # -- state that others write or read ---------------------------------------------------

    def state_written(self, subgroups: Iterable[int]) -> None:
        """Make the plan use the optimizer state that the caller has written to the tensors of the given subgroups.

        A caller is, for example, DeepSpeed's `safe_set_full_fp32_param`. No update of the subgroups may be running.
        Older copies of their state in staging buffers on the GPU become invalid. State that belongs on a drive is
        written there before this method returns.
        """
        subgroups = list(subgroups)
        self.drop_early_updates(subgroups)
        for subgroup in subgroups:
            if self.store is not None and subgroup in self.stored:
                if subgroup in self._reads:
                    self._reads[subgroup].wait_host()  # reads for the next step
                self.store.write(subgroup, self.states[subgroup].state)
        self.bodies.outdate(subgroups)

    def state_loaded(self) -> None:
        """Make all subgroups use the optimizer state that a checkpoint load has restored.

        State that belongs on a drive is written there, unless the load used the state that was on the drive already.
        """
        self.drop_early_updates()
        adopted = set() if self.store is None else self.store.take_adopted()
        self.state_written(state.index for state in self.states if state.index not in adopted)
        self.bodies.outdate(adopted)

    def state_shown(self) -> None:
        """Wait for running copies to staging buffers, and outdate them, since the caller may change the original."""
        self.drop_early_updates()
        for staged in self._staged.values():
            staged.came.wait_host()
        self.bodies.outdate(self._staged)

    def bring_back(self) -> list[SubgroupState]:
        """Copy optimizer state from the spare buffers of early updates back to the training framework's own tensors.

        Early updates of these subgroups that are in progress are dropped. Return when the copies have ended.

        Returns:
            The subgroups whose state has moved.
        """
        moved = self.early_updates.away(self.states)
        if moved:
            self.drop_early_updates([state.index for state in moved])
            self.wait_under_way()  # these ops write to the place to which the state moves
        for state in moved:
            # No checkpoint reads the overwritten memory, because the early update has waited for the gate.
            self.early_updates.bring_back(state)
            if state.index in self._staged:
                self._staged[state.index].origin = state.state
        return moved

    def close(self, *, with_device: bool = True) -> None:
        """End the executor's threads after all queued operations.

        Also wait for copies that were started for a skipped step, because their buffers are released afterwards.

        Args:
            with_device: If False, keep the device open for the executor of the next plan.
        """
        try:
            self.wait_under_way()
            self.gradients.wait()
        finally:
            for lane in self.lanes.values():
                lane.close()
            self._jobs = []  # they hold gradients, which the next executor moves
            self._staged.clear()  # they hold staging buffers
            self.early_updates.close(self.states)
            if with_device:
                self.device.close()
            else:
                for slot in self.parameter_slots:
                    self.device.host_release(slot)
            # Release the memory.
            self.slots, self.parameter_slots, self.outgoing_slots, self.host_slots = [], [], [], []
