"""Runs the update's DAG on lanes, one template per step."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import torch
from ebbtide.runtime.devices.base import Device
from ebbtide.runtime.devices.clock import Mark
from ebbtide.runtime.devices.lane import Completion, Lane
from ebbtide.runtime.execution.gradient_ops import GradientOps
from ebbtide.runtime.execution.guesses import Guess, Guesses, SubgroupJob
from ebbtide.runtime.execution.step_template import GradientOp, TemplateOp
from ebbtide.runtime.execution.subgroup_state import StagingSlot, StateStore, SubgroupState
from ebbtide.runtime.execution.visits import Visit, Visits
from ebbtide.runtime.kernels.rule import UpdateRule
from ebbtide.runtime.kernels.step import UpdateStep
from ebbtide.simulator.schedule import Lane as LaneName
from ebbtide.simulator.schedule import Op, OpKind
from ebbtide.simulator.update.recipes import PARAMETER_SLOTS, RECIPES, Queue, recipe_of

HISTORY_STEPS = 8
KEPT_FETCHES = 4096
# Crossings that need no copy where device and host memory are one, and who does their work there.
WRITTEN_BY = {OpKind.PARAMETER_H2D: OpKind.UPDATE_HOST, OpKind.PARAMETER_D2H: OpKind.UPDATE_DEVICE}
VISITS = {OpKind.STATE_H2D, OpKind.UPDATE_DEVICE, OpKind.VISIT_GUESSED, OpKind.STATE_D2H}


# The last elements of master and moments in host memory, before the update; its step.
Spent = tuple[list[torch.Tensor], UpdateStep]
Body = Callable[[int, int, SubgroupJob | None], None]  # of a subgroup, in a step; its job


class UpdateGate(Protocol):
    """Who must be asked before a subgroup's state is overwritten (the checkpoint engine)."""

    def before_update(self, subgroup: int) -> None:
        """Returns once the state may be overwritten; raises if the asker has failed."""


@dataclass(slots=True)
class StepRecord:
    """The ops of one step with their completions, for the measured timeline.

    ``origin`` dates their events: the step before this one on the device's clock.
    """

    number: int
    origin: Mark | None = None
    ops: list[tuple[Op, Completion]] = field(default_factory=list)


class Executor:
    """Owns the lanes. `prefetch` and `launch` are called by the training thread alone.

    A step's ops run in the background after `launch` returns; `wait_parameters`, `wait_state` and
    `wait_all` wait for just what they need and raise what went wrong.
    """

    def __init__(
        self,
        device: Device,
        states: list[SubgroupState],
        slots: list[StagingSlot],
        template: list[TemplateOp],
        threads: int,
        rule: UpdateRule,
        gradients: Sequence[GradientOp] = (),
        store: StateStore | None = None,
        host_slots: Sequence[StagingSlot] = (),
        guesses: Guesses | None = None,
        prefetch: int = 0,
        arrival: Sequence[int] | None = None,
    ) -> None:
        """``store``: of the stored subgroups, whose state passes through ``host_slots``;
        ``guesses``: memory of the ``template``'s guessed ones; ``prefetch``: the plan's;
        ``arrival``: in which order gradients come; None: the last subgroup's first.
        """
        self.device, self.states, self.slots = device, states, slots
        self.template = template
        self.threads = threads
        self.rule = rule
        self.store = store
        self.host_slots = list(host_slots)
        self.guesses = guesses or Guesses(device, [])
        self._anew = _redone(template, states)
        self._prepare()
        self.gate: UpdateGate | None = None
        self.lanes: dict[LaneName, Lane] = device.lanes()
        self.gradients = GradientOps(device, self.lanes, gradients)
        self.history: deque[StepRecord] = deque(maxlen=HISTORY_STEPS)
        self._previous: list[Completion] = [Completion.done() for _ in template]
        self._current: list[Completion | None] = [None] * len(template)
        self._jobs: list[SubgroupJob] = []
        self._steps = self._version = 0  # launched; of what the latest writes to storage
        self._ended = 0  # of the latest step's ops, in order: seen to have ended
        self._own = sum(not item.ahead for item in template)  # behind them what is the next step's
        self.spent = dict[int, Spent]()  # by subgroup, of its latest update: `_keep_spent`
        # Subgroups whose state was written behind the prefetch.
        self._stale, self._stale_lock = set[int](), threading.Lock()
        self._guessed = _before_norm(template)
        # In the order of the plan, in which all take their slots.
        self._reads = _of_kind(template, OpKind.STATE_READ)
        self._incoming = _of_kind(template, OpKind.PARAMETER_H2D, but=self._guessed)
        self._outgoing = _of_kind(template, OpKind.PARAMETER_D2H)
        self.parameter_slots = self._slots_for(self._incoming, device.host_empty)
        self.outgoing_slots = self._slots_for(self._outgoing, device.device_empty)
        self._bodies = self._body_by_kind()
        self._position = {(t.op.kind, t.op.subgroup): i for i, t in enumerate(template)}
        published = (published_by(s, guessed=s.index in self._guessed) for s in states)
        self._published = [self._position[kind, i] for i, kind in enumerate(published)]
        self.visits = self._visits_of(prefetch, arrival)
        self._late = set[int]()  # of the latest step, visits that nobody guessed, or wrong
        # Since the latest launch, for the timeline: copies for passes and dropped guesses.
        self._beside: deque[tuple[Op, Completion]] = deque(maxlen=KEPT_FETCHES)
        self._latest_fetch = Completion.done()
        self._begun = False

    def _body_by_kind(self) -> dict[OpKind, Body]:
        return {
            OpKind.UPDATE_DEVICE: self._update_resident,
            OpKind.UPDATE_HOST: self._update_host,
            OpKind.STATE_READ: self._state_read,
            OpKind.PARAMETER_H2D: self._parameter_h2d,
            OpKind.PARAMETER_D2H: self._parameter_d2h,
        }

    def _keep_spent(
        self, subgroup: int, source: Sequence[torch.Tensor], job: SubgroupJob, stream: object = None
    ) -> None:
        """Of the elements whose gradient stock spends, what an update is about to overwrite."""
        elements = self.states[subgroup].elements
        begin = self.rule.tail_begin(elements) if self.rule.spends else elements
        if begin < elements:
            last = [tensor[begin:elements] for tensor in source]
            kept, _ = self.spent.get(subgroup) or (
                [self.device.host_empty(len(tensor), tensor.dtype) for tensor in last],
                None,
            )
            self.spent[subgroup] = kept, job.step
            for to, tensor in zip(kept, last, strict=True):
                if stream is None:
                    to.copy_(tensor)
                else:
                    self.device.copy(to, tensor, LaneName.D2H, stream)

    def _prepare(self) -> None:
        updated = [s for s in self.states if RECIPES[s.placement].queue is Queue.DEVICE]
        if updated:
            dtypes = updated[0].gradient.dtype, updated[0].wire.dtype
            self.device.prepare(self.rule.forms(), 1 + len(self.rule.moments), *dtypes)

    def _visits_of(self, prefetch: int, arrival: Sequence[int] | None) -> Visits:
        visiting = _of_kind(self.template, OpKind.STATE_H2D)
        order = sorted(visiting, key=self._published.__getitem__)
        coming = arrival or range(len(self.states))[::-1]
        guessed = [s for s in coming if s in visiting and s in self._guessed]
        return Visits(self.slots, order, guessed, prefetch)

    def _begin_ahead(self) -> None:
        """Of the first step what else the step before would have begun: not before training does,
        since a load may still come.
        """
        if self._begun:
            return
        self._begun = True
        self._steps -= 1
        for position, item in enumerate(self.template):
            if item.ahead:
                self._submit(position, replace(item, now=()), [])
                begun, self._current[position] = self._current[position], None
                assert begun is not None
                self._previous[position] = begun
        self._steps += 1

    def _slots_for(
        self, users: dict[int, int], empty: Callable[[int, torch.dtype], torch.Tensor]
    ) -> list[torch.Tensor]:
        """Buffers of new parameters that these subgroups take in turn."""
        if self.device.unified or not users:
            return []
        largest = max((self.states[i] for i in users), key=lambda s: s.elements)
        count = min(PARAMETER_SLOTS, len(users))
        return [empty(largest.elements, largest.wire.dtype) for _ in range(count)]

    @property
    def before_op(self) -> Callable[[Op], None] | None:
        """Called first in every op, on its lane: fault and delay injection."""
        return self.gradients.before_op

    @before_op.setter
    def before_op(self, call: Callable[[Op], None] | None) -> None:
        self.gradients.before_op = call

    # -- launching ---------------------------------------------------------------------------

    def prefetch(self, *, guesses: bool = True) -> None:
        """Starts the copies that need no norm but the activations' room: visiting subgroups'
        state, of those that are guessed in this step first.
        """
        self._begin_ahead()
        self.visits.begin(guesses=guesses)
        self.come_in()

    def come_in(self) -> None:
        """As `EbbtideLoop._come_in`."""
        while (subgroup := self.visits.next()) is not None:
            position = self._position[OpKind.STATE_H2D, subgroup]
            self._submit(position, self.template[position], [])
            self._guess_visit(subgroup)

    def guess(self, subgroup: int, job: SubgroupJob) -> None:
        """Start a subgroup's update in backward, out of place, behind its gradient's arrival; that
        of a visit when it is in a slot. `settle` says whether ``job`` was right.
        """
        self._begin_ahead()
        if subgroup in self.visits.guessed:
            complete = Completion.done(self.device.current_event())
            self.visits.ready[subgroup] = job, complete
            self._guess_visit(subgroup)
            self.come_in()
            return
        (position,) = self._guessed[subgroup]
        guess = self.guesses.begin(self.states[subgroup], job)
        self._submit(
            position,
            self.template[position],
            self.gradients.arrived(subgroup),
            body=partial(self._update_guessed, guess),
            job=job,
        )

    def _guess_visit(self, subgroup: int) -> None:
        """On to its way home, if its gradient is complete and a slot has been taken."""
        if subgroup not in self.visits.ready or subgroup not in self.visits.inside:
            return
        job, complete = self.visits.ready.pop(subgroup)
        self.visits.inside[subgroup].guess = self.guesses.begin(self.states[subgroup], job)
        _, update, leave = self._guessed[subgroup]
        self._submit(update, self.template[update], [complete], job=job)
        self._submit(leave, self.template[leave], [])

    def drop_guesses(self, subgroups: Iterable[int] | None = None) -> bool:
        """These subgroups' (None: all), which are wrong; whether there were any."""
        some = list(self._guessed if subgroups is None else subgroups)
        waiting = [s for s in some if self.visits.ready.pop(s, None)]
        dropped = self.guesses.drop(some)
        for subgroup in dropped:
            for position in self._guessed[subgroup]:
                begun, self._current[position] = self._current[position], None
                assert begun is not None
                self._beside.append((self.template[position].op, begun))
        return bool(dropped or waiting)

    def skip(self) -> bool:
        """This step updates nothing; whether there were guesses."""
        dropped = self.drop_guesses()
        self.visits.end()
        return dropped

    def settle(self, jobs: list[SubgroupJob]) -> list[SubgroupState]:
        """Before `launch` of ``jobs``: wrong guesses are dropped, the others' state and spare
        change places; those subgroups, whose state is now elsewhere.
        """
        self.drop_guesses(self.guesses.wrong(jobs))
        return self.guesses.take(self.states)

    def launch(self, jobs: list[SubgroupJob], iteration: int = 0) -> None:
        """Starts this step's updates: ``jobs`` by subgroup, of whose gradients all were sent home.

        ``iteration`` is the training loop's number, for the measured timeline.
        """
        self._begin_ahead()
        self.visits.end()
        self._jobs = jobs
        self._version = self.store.tick() if self.store is not None and self._reads else 0
        barrier = Completion.done(self.device.current_event())
        begun = [*self._beside, *self.gradients.take_parts()]
        record = StepRecord(iteration, self.device.mark(barrier.event), begun)
        self._beside.clear()
        # No parameter is written in host memory while a copy for a pass still reads it.
        barriers = [barrier, self._latest_fetch]
        anew = {i: item for i, item in self._anew.items() if self._current[i] is None}
        self._late = {self.template[i].op.subgroup for i in anew} & {*self.visits.guessed}
        if self._late:
            self._leave(barriers)
        for position, item in enumerate(self.template):
            # Who visits comes in ahead of its update: by then there is a slot.
            if not (item.guessed or item.op.kind == OpKind.STATE_H2D):
                self._begin(position, item, barriers)
        for position, completion in enumerate(self._current):
            assert completion is not None
            op = anew.get(position, self.template[position]).op
            if self._written_by(op) is None:
                record.ops.append((op, completion))
        self.history.append(record)
        self._previous = [c for c in self._current if c is not None]
        self._ended = 0
        self._current = [None] * len(self.template)
        self._steps += 1

    def _leave(self, barriers: list[Completion]) -> None:
        """Who has a slot is updated first, in the plan's order: the others need it."""
        for subgroup in [s for s in self.visits.order if s in self.visits.inside]:
            end = self._position[OpKind.STATE_D2H, subgroup]
            self._begin(end, self._anew.get(end, self.template[end]), barriers)

    def _begin(self, position: int, item: TemplateOp, barriers: list[Completion]) -> None:
        """Behind the norm, what has not begun before; a subgroup that nobody has guessed, or that
        was guessed wrong, in its turn of the plan's order.
        """
        for i in item.now:
            if self._current[i] is None:
                self._begin(i, self._anew.get(i, self.template[i]), barriers)
        if self._current[position] is None:
            waits = list(barriers) if item.needs_norm or item.guessed else []
            if item.needs_arrival:
                waits += self.gradients.arrived(item.op.subgroup)
            self._submit(position, item, waits)

    def _submit(
        self,
        position: int,
        item: TemplateOp,
        waits: list[Completion],
        *,
        body: Body | None = None,
        job: SubgroupJob | None = None,
    ) -> None:
        """``body``, ``job``: None: those of the op and of the step."""
        op = item.op
        written = self._written_by(op)
        if written is not None:  # the kernel wrote the parameters where they are read
            self._current[position] = self._current[written]
            return
        waits = waits + [c for i in item.now if (c := self._current[i]) is not None]
        waits += [self._previous[i] for i in item.before]
        completion = Completion(op.label)
        self._current[position] = completion
        number, jobs = self._steps + item.ahead, self._jobs
        if op.subgroup in self.visits and op.kind in VISITS:
            body, waits = self._visit(op, waits, completion)
        body = body or self._bodies.get(op.kind) or partial(self._state_write, self._version)
        job = job or (jobs[op.subgroup] if item.needs_gradient else None)
        lane = self.lanes[op.lane]
        lane.submit(lambda: self._run(body, op, number, job), waits, completion)

    def _written_by(self, op: Op) -> int | None:
        """The op, by position, behind which nothing is left to be done for this one."""
        if self.device.unified and op.kind in WRITTEN_BY:
            return self._position[WRITTEN_BY[op.kind], op.subgroup]
        if op.kind == OpKind.PARAMETER_H2D and op.subgroup in self._late:
            return self._position[OpKind.VISIT_GUESSED, op.subgroup]
        return None

    def _visit(self, op: Op, waits: list[Completion], end: Completion) -> tuple[Body, list[Completion]]:
        """What an op of a visit does, in its slot, and what it waits for beside ``waits``."""
        if op.kind == OpKind.STATE_H2D:
            visit, free = self.visits.come(self.states[op.subgroup])
            return partial(self._state_h2d, visit), [*waits, *free]
        visit = self.visits.inside[op.subgroup]
        if op.kind == OpKind.STATE_D2H:
            self.visits.leaves(op.subgroup, end)
            return partial(self._state_d2h, visit), waits
        return partial(self._update_visit, visit), waits

    def _run(self, body: Body, op: Op, number: int, job: SubgroupJob | None) -> None:
        if self.before_op is not None:
            self.before_op(op)
        body(op.subgroup, number, job)

    # -- bodies, on the lanes' threads -------------------------------------------------------

    def _host_slot(self, subgroup: int, number: int) -> tuple[torch.Tensor, ...]:
        """Read r, of all steps, uses slot r mod slots; the template's waits keep two apart: a read
        waits for the write of read r - slots.
        """
        use = number * len(self._reads) + self._reads[subgroup]
        return self.host_slots[use % len(self.host_slots)].views(self.states[subgroup].elements)

    def _stream(self, lane: LaneName) -> object | None:
        return self.lanes[lane].stream

    def _state_read(self, subgroup: int, number: int, job: SubgroupJob | None) -> None:
        del job
        self._was_stale(subgroup)
        assert self.store is not None
        self.store.read(subgroup, self._host_slot(subgroup, number))

    def _state_write(self, version: int, subgroup: int, number: int, job: SubgroupJob | None) -> None:
        del job
        self._ask_gate(subgroup)  # readers see the new state from the write's end on
        assert self.store is not None
        self.store.write(subgroup, self._host_slot(subgroup, number), version)

    def _state_h2d(self, visit: Visit, subgroup: int, number: int, job: SubgroupJob | None) -> None:
        del number, job
        if visit.dropped:
            return
        self._was_stale(subgroup)
        stream = self._stream(LaneName.H2D)
        for to, source in zip(visit.into, visit.home, strict=True):
            self.device.copy(to, source, LaneName.H2D, stream)

    def _update_resident(self, subgroup: int, number: int, job: SubgroupJob | None) -> None:
        self._ask_gate(subgroup)
        out = self._parameter_out(subgroup, number)
        self._update_device(subgroup, self.states[subgroup].state, out, job)

    def _update_visit(self, visit: Visit, subgroup: int, number: int, job: SubgroupJob | None) -> None:
        if visit.dropped:
            return
        if self._was_stale(subgroup):
            for to, source in zip(visit.into, visit.home, strict=True):
                self.device.copy(to, source, LaneName.H2D, self._stream(LaneName.DEVICE_UPDATE))
        out = self._parameter_out(subgroup, number) if visit.guess is None else visit.wire
        assert out is not None
        self._update_device(subgroup, visit.into, out, job)

    def _update_device(
        self, subgroup: int, target: tuple[torch.Tensor, ...], out: torch.Tensor, job: SubgroupJob | None
    ) -> None:
        assert job is not None
        state, stream = self.states[subgroup], self._stream(LaneName.DEVICE_UPDATE)
        self._keep_spent(subgroup, target, job, stream)
        for part in job.segments:
            span = slice(part.start, part.end)
            self.device.update(
                [t[span] for t in target],
                part.gradient,
                out[span],
                job.step,
                part.scale,
                self.rule.tail(state.elements, part.start, part.end),
                stream,
            )

    def _was_stale(self, subgroup: int) -> bool:
        """Whether it was; from now on it is not."""
        with self._stale_lock:
            stale = subgroup in self._stale
            self._stale.discard(subgroup)
        return stale

    def _state_d2h(self, visit: Visit, subgroup: int, number: int, job: SubgroupJob | None) -> None:
        del number, job
        if visit.dropped:
            return
        self._ask_gate(subgroup)  # of a guess too: what is written now was live a step ago
        stream, home, leaving = self._stream(LaneName.D2H), visit.home, visit.into
        if visit.guess is not None:
            assert visit.wire is not None
            home = (*visit.guess.into, self.guesses.wires[subgroup])
            leaving = (*leaving, visit.wire)
        for to, source in zip(home, leaving, strict=True):
            self.device.copy(to, source, LaneName.D2H, stream)

    def _update_host(self, subgroup: int, number: int, job: SubgroupJob | None) -> None:
        assert job is not None
        state = self.states[subgroup]
        target = state.state
        if subgroup in self._reads:
            target = self._host_slot(subgroup, number)
            if self._was_stale(subgroup):
                self._state_read(subgroup, number, None)
        else:
            self._ask_gate(subgroup)
        out = self._parameter_out(subgroup, number)
        self._keep_spent(subgroup, target, job)
        with self.device.host_update(state.elements):
            parts = [(part.start, part.end, part.gradient, part.scale) for part in job.segments]
            self.rule.update(target, parts, out, job.step, self.threads)

    def _update_guessed(self, guess: Guess, subgroup: int, number: int, job: SubgroupJob | None) -> None:
        assert job is not None
        if guess.dropped:
            return
        # What is written now was live a step ago: a checkpoint may still be reading it.
        self._ask_gate(subgroup)
        out = self._parameter_out(subgroup, number)
        self._keep_spent(subgroup, guess.source, job)
        with self.device.host_update(self.states[subgroup].elements, out_of_place=True):
            parts = [(part.start, part.end, part.gradient, part.scale) for part in job.segments]
            self.rule.update(guess.into, parts, out, job.step, self.threads, guess.source)

    def _parameter_out(self, subgroup: int, number: int) -> torch.Tensor:
        """Where the kernel writes: in place, or to a slot; as `_host_slot`, in turn over all steps.
        On the host, where updates are guessed, to a buffer of the subgroup's own.
        """
        if subgroup in self._guessed and subgroup not in self.visits.guessed:
            return self.guesses.wires[subgroup]
        state = self.states[subgroup]
        users, slots = self._incoming, self.parameter_slots
        if subgroup in self._outgoing:
            users, slots = self._outgoing, self.outgoing_slots
        if not slots or subgroup not in users:
            return state.wire
        use = number * len(users) + users[subgroup]
        return slots[use % len(slots)][: state.elements]

    def _parameter_h2d(self, subgroup: int, number: int, job: SubgroupJob | None) -> None:
        del job
        lane = LaneName.H2D_PARAMETERS
        source = self.guesses.wires.get(subgroup)
        if source is None:
            source = self._parameter_out(subgroup, number)
        self.device.copy(self.states[subgroup].wire, source, lane, self._stream(lane))

    def _parameter_d2h(self, subgroup: int, number: int, job: SubgroupJob | None) -> None:
        del job
        lane = LaneName.D2H
        source = self._parameter_out(subgroup, number)
        self.device.copy(self.states[subgroup].wire, source, lane, self._stream(lane))

    def _ask_gate(self, subgroup: int) -> None:
        if self.gate is not None:
            self.gate.before_update(subgroup)

    # -- waiting -----------------------------------------------------------------------------

    def _completion(self, kinds: Iterable[OpKind], subgroup: int) -> Completion:
        for kind in kinds:
            position = self._position.get((kind, subgroup))
            if position is not None:
                return self._previous[position]
        raise AssertionError(f"subgroup {subgroup} has no update in the template")

    def wait_parameters(self, subgroups: Iterable[int]) -> None:
        """Makes the caller (on CUDA: the training streams) wait for these subgroups' parameters.

        Raises:
            BackgroundError: the update failed.
        """
        if not self.busy:
            return  # the rest of the iteration reads without a word to the device
        self.device.training_waits(self._previous[self._published[s]] for s in subgroups)

    def updates_of(self, subgroups: Iterable[int]) -> list[Completion]:
        """What has to end before these subgroups' parameters are new; empty: they are."""
        if not self.busy:
            return []
        return [self._previous[self._published[subgroup]] for subgroup in subgroups]

    def fetch(self, to: torch.Tensor, source: torch.Tensor, waits: list[Completion]) -> Completion:
        """Starts a copy of parameters from host to device memory, behind ``waits``.

        In the order of the calls; nobody waits here. ``to`` may be dropped at any time, the source
        is overwritten by no update before it has been read.
        """
        lane = self.lanes[LaneName.H2D_FETCH]
        op = Op(-1, OpKind.PARAMETER_FETCH, LaneName.H2D_FETCH, to.nbytes)
        completion = self._latest_fetch = Completion(op.label)
        self._beside.append((op, completion))

        def body() -> None:
            if self.before_op is not None:
                self.before_op(op)
            self.device.fetch(to, source, lane.stream)

        lane.submit(body, waits, completion)
        return completion

    def wait_state(self, subgroup: int) -> None:
        """Blocks until the latest update of the subgroup is back where its state lives."""
        kinds = (OpKind.STATE_D2H, OpKind.STATE_WRITE, OpKind.UPDATE_DEVICE, OpKind.UPDATE_HOST, OpKind.UPDATE_GUESSED)
        self._completion(kinds, subgroup).wait_host()
        if self.store is not None and subgroup in self._reads:
            self.store.check_restored([subgroup])

    def wait_all(self) -> None:
        """Blocks until every op of the launched steps has ended; raises the first failure. What has
        begun for the next step goes on (`wait_ahead`).
        """
        for completion in (*self._previous[: self._own], self._latest_fetch):
            completion.wait_host()

    def wait_ahead(self) -> None:
        """Likewise of what the latest step has begun for the next one."""
        for completion in self._previous[self._own :]:
            completion.wait_host()

    def wait_memory(self) -> None:
        """Likewise of the subgroups whose state lives in memory: what is stored goes on too."""
        for item, completion in zip(self.template, self._previous, strict=True):
            if RECIPES[self.states[item.op.subgroup].placement].state != "storage":
                completion.wait_host()
        self._latest_fetch.wait_host()

    @property
    def busy(self) -> bool:
        """True while an op of the latest step has not ended, or has failed."""
        # What has ended stays so: each op is asked until then, not again at every reader.
        while self._ended < self._own:
            completion = self._previous[self._ended]
            if not completion.ended or completion.error is not None:
                return True
            self._ended += 1
        return False

    def raise_if_failed(self) -> None:
        """Raises what has failed so far, without waiting for the rest."""
        for completion in self._previous:
            if completion.issued.is_set() and completion.error is not None:
                completion.wait_issued()

    def state_written(self, subgroups: Iterable[int]) -> None:
        """Somebody else wrote these subgroups' state, while no update of them was running: what was
        prefetched of it is void, and what is stored goes to storage; blocks.
        """
        subgroups = list(subgroups)
        self.drop_guesses(subgroups)
        for subgroup in subgroups:
            if self.store is not None and subgroup in self._reads:
                self._completion((OpKind.STATE_READ,), subgroup).wait_host()  # the next step's
                self.store.write(subgroup, self.states[subgroup].state)
        self._outdate(subgroups)

    def state_loaded(self) -> None:
        """`state_written` of all subgroups, but for those whose state was adopted on storage."""
        self.drop_guesses()
        adopted = set() if self.store is None else self.store.take_adopted()
        self.state_written(state.index for state in self.states if state.index not in adopted)
        self._outdate(adopted)

    def state_shown(self) -> None:
        """To somebody who may write to it: what has come into a slot comes once more, and blocks
        until that is there which is on its way, since it may be neither old nor new.
        """
        self.drop_guesses()
        for subgroup in self.visits.inside:
            came = self._current[self._position[OpKind.STATE_H2D, subgroup]]
            if came is not None:
                came.wait_host()
        self._outdate(self.visits.inside)

    def _outdate(self, subgroups: Iterable[int]) -> None:
        with self._stale_lock:
            self._stale.update(subgroups)

    def close(self, *, with_device: bool = True) -> None:
        """Ends the lanes' threads after what is queued; the device stays for a successor's sake.

        What was prefetched for a step that was skipped may still be on its way into slots, and from
        host memory, that are given back after this: it is waited for.
        """
        try:
            for completion in (*self._current, *(end for _, end in self._beside)):
                if completion is not None:
                    completion.wait_host()
            self.gradients.wait()
        finally:
            for lane in self.lanes.values():
                lane.close()
            self._jobs = []  # they hold gradients, which a successor moves
            self.visits.close()  # and slots
            self.guesses.close()
            if with_device:
                self.device.close()
                # A framework may never let its engine go.
                self.slots, self.parameter_slots, self.host_slots = [], [], []


def _before_norm(template: Sequence[TemplateOp]) -> dict[int, list[int]]:
    """By subgroup, the positions of what needs no norm, of those that are guessed."""
    found: dict[int, list[int]] = {}
    for position, item in enumerate(template):
        if item.guessed:
            found.setdefault(item.op.subgroup, []).append(position)
    return found


def _redone(template: Sequence[TemplateOp], states: Sequence[SubgroupState]) -> dict[int, TemplateOp]:
    """By its place, what a guess is where nobody has guessed, or wrong."""
    kinds = {OpKind.UPDATE_GUESSED: OpKind.UPDATE_HOST, OpKind.VISIT_GUESSED: OpKind.UPDATE_DEVICE}

    def ordinary(op: Op) -> Op:
        if op.kind == OpKind.STATE_D2H:  # without the parameters
            return op._replace(work=sum(t.nbytes for t in states[op.subgroup].state))
        return op._replace(kind=kinds.get(op.kind, op.kind))

    return {i: replace(item, op=ordinary(item.op)) for i, item in enumerate(template) if item.guessed}


def published_by(state: SubgroupState, *, guessed: bool = False) -> OpKind:
    """The op after whose end the subgroup's parameters may be read."""
    steps = recipe_of(state.placement, state.parameter_home, guessed=guessed).steps
    return next(step.kind for step in steps if step.publishes)


def _of_kind(template: list[TemplateOp], kind: OpKind, but: Container[int] = ()) -> dict[int, int]:
    """Subgroup -> its place among those with such an op, in the order in which their lane runs
    a step's: what begins ahead is first.
    """
    items = sorted((i for i in template if i.op.kind == kind), key=lambda i: not i.ahead)
    subgroups = (item.op.subgroup for item in items if item.op.subgroup not in but)
    return {subgroup: place for place, subgroup in enumerate(subgroups)}
