"""The connection of a training framework's optimizer with the executor of a plan, and the timeline of training."""

from __future__ import annotations

import contextlib
import logging
import statistics
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from ebbtide.runtime.devices.base import Device
from ebbtide.runtime.devices.lane import BackgroundError
from ebbtide.runtime.devices.passes import Pass, WatchedPasses
from ebbtide.runtime.execution.allocated import (
    LockedBuffers,
    LostPlanError,
    SwitchError,
    allocate,
    arrival_of,
    keeps_gradients,
    release_frames,
    threads_of,
)
from ebbtide.runtime.execution.bodies import SubgroupJob
from ebbtide.runtime.execution.engine import TrainingEngine
from ebbtide.runtime.execution.executor import Executor
from ebbtide.runtime.execution.gradients import GradientBuffers
from ebbtide.runtime.execution.stored import grown_store, open_store, stored_sizes
from ebbtide.runtime.execution.subgroup_state import SubgroupState
from ebbtide.runtime.kernels.step import UpdateStep
from ebbtide.runtime.storage.errors import DamagedError
from ebbtide.runtime.storage.store import ExtentStore
from ebbtide.runtime.storage.training import StoredSteps
from ebbtide.simulator.plan import Plan, PlanError
from ebbtide.simulator.schedule import Lane, OpKind, Span
from ebbtide.simulator.schedules.ebbtide import check_locations
from ebbtide.simulator.timeline import Timeline
from ebbtide.simulator.update.order import order_of
from ebbtide.simulator.update.pausing import UNKNOWN, PauseRule
from ebbtide.simulator.update.recipes import RECIPES

logger = logging.getLogger("ebbtide")
PADDING = 1e-3  # share of the elements by which ZeRO-1 and 2 may pad other parameter groups differently


def fitted(plan: Plan, subgroups: tuple[int, ...], sub_group_size: int, zero_stage: int) -> Plan:
    """Return a plan for an engine that cuts the same elements into other subgroups, because its optimizer has other
    parameter groups.

    A plan that was made from a model's config does not know them. The Trainer, for example, has one group with weight
    decay and one without. Each of the engine's subgroups is updated as the plan's subgroup at its place. A plan for
    another model or ``sub_group_size`` is returned unchanged, and `check_plan` refuses it.
    """
    elements, planned = sum(subgroups), sum(plan.subgroups)
    other_model = abs(elements - planned) > (PADDING * planned if zero_stage < 3 else 0)
    if plan.subgroups in ((), subgroups) or other_model or plan.config_subgroup_size != sub_group_size:
        return plan
    ends, begins = [*accumulate(plan.subgroups)], [0, *accumulate(subgroups)]
    middles = ((begin + size / 2) * planned / elements for begin, size in zip(begins, subgroups, strict=False))
    meant = [bisect_left(ends, middle) for middle in middles]
    ways = [plan.ways[i] for i in meant]
    turn = {subgroup: number for number, subgroup in enumerate(plan.issue_order)}
    issue = sorted(range(len(meant)), key=lambda k: turn[meant[k]])
    order = order_of(issue, [way.placement for way in ways])
    logger.info(
        "the plan's %d subgroups are %d here, because the optimizer has other parameter groups than the plan was made "
        "for. Each is updated as the plan's subgroup at its place",
        plan.subgroup_count,
        len(subgroups),
    )
    return plan.with_ways(ways, subgroups=subgroups, order=order, workload_fingerprint="")


def check_plan(plan: Plan, subgroups: tuple[int, ...], sub_group_size: int, zero_stage: int) -> None:
    """Check that a plan was made for the training engine's subgroups and ZeRO stage.

    Raises:
        PlanError: The plan does not match. The message says what differs and which config key to change.
    """
    if plan.subgroups and plan.subgroups != subgroups:
        raise PlanError(
            "the plan must be made for this model's subgroups, but it has "
            f"{_summary(plan.subgroups)} and the engine has {_summary(subgroups)}: "
            + _way_out(plan, subgroups, sub_group_size)
        )
    if plan.subgroup_count != len(subgroups):
        raise PlanError(
            f"plan.ways must set the placement of the engine's {len(subgroups)} subgroups, but sets the placement of "
            f"{plan.subgroup_count} subgroups. Plan again with `tune plan` for sub_group_size {sub_group_size}"
        )
    check_locations(plan, zero_stage)
    if plan.stores and not plan.drives:
        raise PlanError(
            "plan.storage_dir must name a folder if a subgroup has placement 'stored', but got "
            f"{plan.storage_dir!r}: set it in the plan"
        )


def _way_out(plan: Plan, subgroups: tuple[int, ...], sub_group_size: int) -> str:
    if plan.config_subgroup_size != sub_group_size:
        return (
            f"set zero_optimization.sub_group_size to {plan.config_subgroup_size} (it is "
            f"{sub_group_size}) if the model is the same, else plan again with `tune plan`"
        )
    if sum(plan.subgroups) != sum(subgroups):
        return "the model, its trainable parameters or the number of ranks differ: plan again with `tune plan`"
    return "the groups of the parameters differ: plan again with `tune plan`"


def _summary(subgroups: tuple[int, ...]) -> str:
    return f"{len(subgroups)} subgroups of {sum(subgroups)} elements in all"


if TYPE_CHECKING:
    from ebbtide.runtime.devices.base import Device
    from ebbtide.runtime.devices.clock import Mark, Moment
    from ebbtide.runtime.devices.lane import Completion
    from ebbtide.runtime.execution.executor import StepRecord

KEPT_SPANS = 64


@dataclass(frozen=True, slots=True)
class _TimedPhase:
    """A phase of a training step, such as forward.

    Its begin and end are GPU events on the training stream. Without CUDA, they are times of the host's clock.
    """

    kind: OpKind
    iteration: int
    begin: Moment
    end: Moment


@dataclass
class Recorder:
    """A recorder of the times at which forward, backward and optimizer step begin and end.

    On CUDA the training thread runs ahead of the GPU. The recorder therefore uses events on the training
    stream, which give the GPU's time. On other devices it uses the host's clock.
    """

    device: Device
    origin_s: float = field(default_factory=time.perf_counter)
    iteration: int = 0
    _noted: deque[_TimedPhase] = field(default_factory=lambda: deque(maxlen=KEPT_SPANS))
    _begun: dict[OpKind, Moment] = field(default_factory=dict)
    _issued: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_SPANS))
    _issue_began_s: float = 0.0

    def forward_begins(self) -> None:
        self._begin(OpKind.FORWARD)

    def forward_ends(self) -> None:
        self._end(OpKind.FORWARD)

    def backward_begins(self) -> None:
        self._begin(OpKind.BACKWARD)

    def backward_ends(self) -> None:
        self._end(OpKind.BACKWARD)

    def gather_begins(self) -> None:
        """Record that the ranks begin to exchange updated parameters at the end of a step."""
        # Nothing is recorded unless steps are recorded in detail (see `watch`).
        if self.device.watched is not None:
            self.device.watched.begins(OpKind.PARAMETER_GATHER, self.iteration)

    def gather_ends(self) -> None:
        """Record that the exchange of updated parameters among the ranks has ended."""
        # Nothing is recorded unless steps are recorded in detail (see `watch`).
        if self.device.watched is not None:
            self.device.watched.ends(OpKind.PARAMETER_GATHER)

    def step_begins(self) -> None:
        self._issue_began_s = time.perf_counter()
        self._begin(OpKind.STEP_END)

    def step_ends(self) -> None:
        self._end(OpKind.STEP_END)
        self.iteration += 1

    def issue_waited(self, seconds: float) -> None:
        """Leave out the seconds of the present optimizer step that the CPU has spent waiting for the GPU."""
        self._issue_began_s += seconds

    def issue_ends(self) -> None:
        """Record that the optimizer step has started all updates."""
        self._issued.append(time.perf_counter() - self._issue_began_s)

    @property
    def step_issue_s(self) -> float:
        """Return the median CPU seconds that ``step()`` takes to start all updates, without waits for the GPU.

        It is 0 if the model runs on the CPU, because its forward and backward then use the same cores.
        """
        return statistics.median(self._issued) if self._issued and self.device.name == "cuda" else 0.0

    def watch(self) -> None:
        """Start to measure in first micro-batches when gradients are computed, and when the GPU waits for copies."""
        self.device.watched = WatchedPasses(self.device)

    def unwatch(self) -> None:
        """End the measurement that `watch` began, and discard the measured times."""
        # `watch` measures in forward and backward when each gradient is computed, and when the GPU waits for copies.
        self.device.watched = None

    def forget_step(self) -> None:
        """Discard the times that were measured in the latest finished step's forward and backward."""
        # The times tell when each gradient was computed, and when the GPU waited for copies. Nothing happens unless
        # such times are being measured (see `watch`).
        if self.device.watched is not None:
            self.device.watched.forget(self.iteration - 1)

    def passes(self) -> list[Pass]:
        """Return the forwards and backwards of first micro-batches since `watch` that the GPU has finished.

        For ZeRO-1 and 2, the list also contains the exchange of updated parameters at the end of each step.
        """
        return [] if self.device.watched is None else self.device.watched.passes()

    def _begin(self, kind: OpKind) -> None:
        if self.device.watched is not None and kind in (OpKind.FORWARD, OpKind.BACKWARD):
            self.device.watched.begins(kind, self.iteration)
        self._begun[kind] = self.device.moment()

    def _end(self, kind: OpKind) -> None:
        if self.device.watched is not None:
            self.device.watched.ends(kind)
        begun = self._begun.pop(kind, None)
        if begun is not None:
            self._noted.append(_TimedPhase(kind, self.iteration, begun, self.device.moment()))

    def timeline(self, history: Iterable[StepRecord]) -> Timeline:
        """Return a measured timeline: the copies and updates of the given steps, and every forward, backward and
        ``step()`` since the first of these steps.

        A forward, backward or ``step()`` that the GPU has not finished yet is left out.
        """
        records = list(history)
        first = records[0].number if records else 0
        spans = [
            Span(
                noted.kind,
                Lane.COMPUTE,
                noted.begin.reached_s - self.origin_s,
                noted.end.reached_s - self.origin_s,
                iteration=noted.iteration,
            )
            for noted in self._noted
            if noted.iteration >= first and noted.end.is_past
        ]
        for record in records:
            for op, completion in record.ops:
                start_s, end_s = self._times(completion, record.origin)
                spans.append(Span(op.kind, op.lane, start_s, end_s, op.subgroup, iteration=record.number))
        return Timeline(spans=tuple(sorted(spans, key=lambda s: s.start_s)), source="measured")

    def _times(self, completion: Completion, origin: Mark | None) -> tuple[float, float]:
        start, end = completion.start_event, completion.event
        if start is None or end is None or origin is None:
            return completion.start_s - self.origin_s, completion.end_s - self.origin_s
        return origin.date_s(start) - self.origin_s, origin.date_s(end) - self.origin_s


class Session:
    """The execution of a plan on one training engine. Only the training thread uses it.

    Attributes:
        after_step: Functions to call, in order, after each optimizer step, once step counter and learning-rate schedule
            have advanced. A change of the plan comes first, and checkpoints come last.
        after_switch: Functions to call after a switch, whether the new plan runs or the old one again.
        before_switch: Functions to call before subgroups move to other buffers. Each one waits until some
            reader of the old buffers, such as a checkpoint, has finished.
        stored: The optimizer state on drives, which a checkpoint commits there without a copy.
        set_aside: The plan to return to, while a temporary plan runs that leaves more GPU memory free.
            Steps under the temporary plan are not measured for planning.
        expected_s: Predicted seconds of an iteration under the plan. None if nothing has predicted it.
        overlaps: True if a plan's updates may continue during the next forward.
    """

    def __init__(self, engine: TrainingEngine, plan: Plan, device: Device, *, overlap_forward: bool = True) -> None:
        """Start a plan. Without ``overlap_forward``, every step waits for its updates, whatever the plan says."""
        self.engine = engine
        self.device = device
        self.overlaps = overlap_forward and engine.overlaps_forward
        self.recorder = Recorder(device)
        self.after_step: list[Callable[[], None]] = []
        self.before_switch: list[Callable[[], object]] = []
        self.after_switch: list[Callable[[], None]] = []
        self.set_aside: Plan | None = None
        self.closed = False
        self._lost: Exception | None = None  # reason why the session can run no plan any more
        self._store: ExtentStore | None = None
        # Functions, because a switch replaces the executor. `executor.stored` is not used, because it is set when the
        # executor is made, and a switch that fails midway has moved some states since.
        self.stored = StoredSteps(
            lambda: self._store,
            lambda: frozenset(s.index for s in self.executor.states if RECIPES[s.placement].state == "storage"),
            lambda: self.executor.wait_all(),  # noqa: PLW0108
        )
        self.pausing = PauseRule()
        self.expected_s: float | None = None
        self._expected_step: tuple[list[UpdateStep], float] | None = None  # values for the coming step
        # Ranks gather parameters together. If only some of them waited for their updates in step(), all ranks would
        # wait forever.
        if self.overlaps and engine.any_rank(not plan.overlap_forward):
            plan = plan.model_copy(update={"overlap_forward": False})
        with contextlib.ExitStack() as undo:  # no thread and no lock outlives an error
            undo.callback(self._close_store)
            self.plan, self._executor = self._build(plan, None)
            undo.callback(self._executor.close)
            self._account_for(self.plan)
            self._gradient_buffers = engine.gradient_buffers(
                device, self.executor.states, self.executor.gradients, self._complete
            )
            self._make_spares()
            undo.pop_all()

    @property
    def executor(self) -> Executor:
        """Return the executor of the plan that runs."""
        self._check_runs()
        return self._executor

    @property
    def gradient_buffers(self) -> GradientBuffers[Any]:
        """Return the buffers that collect gradients under the plan that runs. Raise the errors of `executor`."""
        self._check_runs()
        return self._gradient_buffers

    @property
    def states(self) -> list[SubgroupState]:
        """Return the present tensors of each subgroup, even if no plan runs any more."""
        return self._executor.states

    def _check_runs(self) -> None:
        if self._lost is not None:
            raise self._lost

    def _make_spares(self) -> None:
        if keeps_gradients(self.engine, self.executor.states[0]):
            self.gradient_buffers.make_spares()

    def _build(self, plan: Plan, states: list[SubgroupState] | None) -> tuple[Plan, Executor]:
        engine, device = self.engine, self.device
        if not self.overlaps:
            plan = plan.model_copy(update={"overlap_forward": False})
        rule, sizes = engine.update_rule(), engine.sizes()
        if states is None:
            self._store = open_store(plan, stored_sizes(plan, sizes), 1 + len(rule.moments))
            engine.prepare(device)
        made = allocate(plan, engine, device, self._store, states)
        threads, arrival = threads_of(made.plan, device), arrival_of(made.plan, engine)
        return made.plan, Executor(device, made, threads, rule, self._store, arrival)

    def _account_for(self, plan: Plan) -> None:
        self.expected_s = plan.prediction.iteration_s if plan.prediction else None
        times = plan.prediction.step_times if plan.prediction else None
        self.pausing = PauseRule(times or UNKNOWN, self.pausing.steps, self.pausing.clipped)

    @property
    def saves_in_flight(self) -> bool:
        """Return whether state dicts are being collected, and reads wait for no drive: the checkpoint does later."""
        return self.stored.apart and self.plan.stores

    def wait_for_readers(self) -> None:
        """Wait until running updates have ended, so that code that is not part of ebbtide can read optimizer state.

        While a checkpoint collects the state dicts, this method does not wait for updates of state on a drive, because
        this state is not read then.
        """
        if self.saves_in_flight:
            self.executor.wait_memory()
        else:
            self.executor.wait_all()
            self.stored.check_restored()

    # -- a step ------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Record the beginning of an optimizer step, for the measured timeline."""
        self.device.backward_threads.steps()
        self.executor.raise_if_failed()
        self.recorder.step_begins()

    def prefetch(self) -> None:
        """Start to copy optimizer state to the GPU for the coming optimizer step, before the gradient norm is known."""
        self.executor.prefetch(early_updates=self.pausing.on)

    def _complete(self, subgroup: int) -> None:
        self._begin_early(subgroup)
        self.executor.issue.come_in()  # into staging buffers that are free

    def _begin_early(self, subgroup: int) -> None:
        again = self.executor.drop_early_updates([subgroup])
        if again or subgroup not in self.executor.early_updates.wires or not self.pausing.on:
            return
        if not self.engine.early_updates_allowed():
            return
        self._expected_step = self._expected_step or self.engine.expected_step()
        steps, scale = self._expected_step
        job = SubgroupJob(steps[subgroup], self.gradient_buffers.segments(subgroup, scale))
        self.executor.update_early(subgroup, job)

    def _settle(self, jobs: list[SubgroupJob]) -> None:
        begun = len(self.executor.early_updates.begun)
        moved = self.executor.settle(jobs)
        self._expected_step = None
        self.pausing.stepped(len(moved) == begun if begun else None)
        for state in moved:
            self.engine.adopt(state)
        if moved:
            self._register_saved()

    def update(self, scale: float) -> None:
        """Start the updates of an optimizer step in the background. ``scale`` unscales and clips the gradients.

        Raises:
            RuntimeError: The engine has not ended the accumulation (`GradientBuffers.close_window`).
        """
        self.gradient_buffers.check_closed()
        self.gradient_buffers.stepped(scale)
        steps = self.engine.hyperparameters()
        jobs = [SubgroupJob(step, self.gradient_buffers.segments(index, scale)) for index, step in enumerate(steps)]
        self.pausing.counted(clipped=self._clipped(scale))
        self._settle(jobs)
        self.executor.launch(jobs, self.recorder.iteration)

    def _clipped(self, scale: float) -> bool:
        return scale != self.engine.unclipped_scale()

    def skip(self) -> None:
        """End an optimizer step without updates, because a gradient was infinite or NaN."""
        self.gradient_buffers.stepped(None)
        self._expected_step = None
        self.pausing.counted(clipped=True)
        self.pausing.stepped(False if self.executor.skip() else None)

    def stepped(self) -> None:
        """Call the functions of ``after_step``, such as a checkpoint's start, after the framework's own step."""
        for call in self.after_step:
            call()

    def timeline(self, *, wait: bool = True) -> Timeline:
        """Return the measured timeline of the latest training steps, in the format of the simulator's timeline.

        Args:
            wait: If False, include only steps that have ended completely, without waiting.
        """
        if wait:
            self.executor.wait_all()
            self.executor.wait_ahead()
        history = self.executor.history
        ended = [r for r in history if all(completion.ended for _, completion in r.ops)]
        return self.recorder.timeline(ended)

    # -- another plan ------------------------------------------------------------------------

    def switch(self, plan: Plan) -> None:
        """Replace the plan that runs by another one, and move every subgroup to the memory that the new plan names.

        No bit of the training result changes. Call this from the training thread outside of forward and
        backward: between two steps, or between two micro-batches of a step. It waits for running updates and
        for a running checkpoint, which still reads the old buffers.

        After every error except the last three, the old plan goes on, with the same results.

        Raises:
            PlanError: The plan was made for other subgroups.
            StorageError: The drives have no room for the state that the plan keeps there.
            SwitchError: The new plan could not be started, for example because memory is short.
            BackgroundError, DamagedError: An update failed in the background before, or state on a drive is damaged.
                Training cannot continue.
            LostPlanError: The new plan could not be started, and the old one not be restored. Training cannot continue.
        """
        self._check_can_run(plan)
        self.executor.wait_all()
        for wait in self.before_switch:
            wait()
        stored = stored_sizes(plan, self.engine.sizes())
        store, tensors = self._store, 1 + len(self.engine.update_rule().moments)
        self._store = grown_store(store, plan, stored, tensors)
        former, old, locked = self.plan, self.executor, LockedBuffers(self.device)
        try:
            self._leave()
            self._enter(plan, old)
        except BaseException as error:
            release_frames(error)
            # Ranks gather together, and other ranks may have switched, so the new plan's overlap_forward is kept.
            back = former.model_copy(update={"overlap_forward": plan.overlap_forward})
            self._go_back(back, old, locked, error)
            if store is None:
                self._close_store()
            if isinstance(error, Exception):
                raise SwitchError(error) from error
            raise

    def _check_can_run(self, plan: Plan) -> None:
        check_plan(plan, self.engine.sizes(), self.plan.subgroup_size, self.engine.zero_stage())
        if self.engine.update_rule().own_step and plan.count("host") < plan.subgroup_count:
            raise PlanError(
                "plan.ways must have placement 'host' for all subgroups, because this optimizer runs its own step() "
                f"in host memory, but only {plan.count('host')} of {plan.subgroup_count} subgroups have it. Give a "
                "plan that keeps all optimizer state in host memory"
            )

    def _leave(self) -> None:
        self.engine.publish()
        self._executor.drop_early_updates()
        self._executor.close(with_device=False)
        self._gradient_buffers.close()
        self._register({state.index: () for state in self.states})

    def _enter(self, plan: Plan, former: Executor) -> None:
        self.plan, self._executor = self._build(plan, self._executor.states)
        self._account_for(self.plan)
        now, before = self._executor.bodies, former.bodies
        now.gate, now.spent = before.gate, before.spent
        self._executor.gradients.before_op = former.gradients.before_op
        self._gradient_buffers = self._gradient_buffers.moved(self._executor.states, self._executor.gradients)
        self._make_spares()
        self._register_saved()
        for call in self.after_switch:
            call()

    def _go_back(self, plan: Plan, former: Executor, locked: LockedBuffers, error: BaseException) -> None:
        try:
            self._leave()
            locked.release_later_ones(self.states)
            self._enter(plan, former)
        except BaseException as second:
            release_frames(second)
            # A damaged state, or an update that failed, is raised as it is, because no plan can continue from it.
            if not isinstance(second, BackgroundError | DamagedError):
                second = LostPlanError(error, second)
            self._lost = second
            raise second from error

    def _register_saved(self) -> None:
        self._register({i: self.engine.saved_state(i) for i in self.plan.issue_order})

    def _register(self, tensors: dict[int, tuple[torch.Tensor, ...]]) -> None:
        if self.executor.bodies.gate is not None:
            self.executor.bodies.gate.register_all(tensors)

    # -- the end -----------------------------------------------------------------------------

    def close(self) -> None:
        """End the execution of a plan and close its store on drives. Afterwards raise the error of a
        background update, if one has failed.
        """
        if self.closed:
            return
        self.closed = True
        self.recorder.unwatch()  # the device may serve another engine
        with contextlib.ExitStack() as ends:
            ends.callback(self._close_store)
            ends.callback(self._close_executor)
            if self._lost is None:
                self.executor.wait_all()

    def _close_executor(self) -> None:
        try:
            self._executor.close()
        except Exception:
            if self._lost is None:  # otherwise the failed switch has raised the error
                raise

    def _close_store(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            store.close()

    def host_bytes(self) -> int:
        """Return the bytes of host memory that a plan's optimizer state, gradients, buffers and parameters
        take in total on this rank.
        """
        unified = self.device.unified
        total, wires = 0, dict[int, int]()  # dict: parameter buffers by address, because subgroups may share one
        for state in self.executor.states:
            # A framework with its own buffers keeps host memory for resident state too.
            recipe = RECIPES[state.placement]
            there = recipe.state == "host" or self.engine.shares_state
            if there or (unified and recipe.state == "device"):
                total += sum(t.nbytes for t in state.state)
            if recipe.gradient == "host" or unified:
                total += state.gradient.nbytes
            if state.parameter_location == "host":
                wires[state.wire.data_ptr()] = max(state.wire.nbytes, wires.get(state.wire.data_ptr(), 0))
        total += sum(wires.values()) + sum(t.nbytes for t in self.executor.parameter_slots)
        total += self.engine.update_rule().unplaced_bytes(self.engine.sizes(), self.executor.states[0].p.dtype)
        total += sum(slot.nbytes for slot in self.executor.host_slots)
        total += self.executor.early_updates.nbytes
        return total + self.gradient_buffers.spare_bytes()
