"""The connection between a training framework's optimizer and the executor that runs a plan for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from ebbtide.runtime.devices.base import Device
from ebbtide.runtime.execution.allocated import as_allocated, threads_of
from ebbtide.runtime.execution.early_updates import SubgroupJob, spares_of
from ebbtide.runtime.execution.engine import TrainingEngine
from ebbtide.runtime.execution.executor import Executor
from ebbtide.runtime.execution.plan_check import check_plan
from ebbtide.runtime.execution.recorder import Recorder
from ebbtide.runtime.execution.step_template import gradient_template
from ebbtide.runtime.execution.stored import grown_store, host_slots, open_store, stored_sizes
from ebbtide.runtime.execution.subgroup_state import (
    Buffers,
    SubgroupState,
    place,
    place_parameters,
    place_sums,
    staging_slots,
)
from ebbtide.runtime.kernels.step import UpdateStep
from ebbtide.runtime.storage.store import ExtentStore
from ebbtide.runtime.storage.training import StoredSteps
from ebbtide.simulator.plan import ParameterLocation, Placement, Plan, PlanError
from ebbtide.simulator.timeline import Timeline
from ebbtide.simulator.update.holding import keeps_window
from ebbtide.simulator.update.order import FORWARD, order_of
from ebbtide.simulator.update.pausing import UNKNOWN, PauseRule
from ebbtide.simulator.update.recipes import RECIPES
from ebbtide.simulator.update.way import Way
from ebbtide.simulator.workload import WireDtype

DTYPES: dict[WireDtype, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Session:
    """The execution of a plan on one training engine. Only the training thread uses it.

    Attributes:
        after_step: Functions to call, in order, after each optimizer step, once step counter and
            learning-rate schedule have advanced. A change of the plan comes first, and checkpoints come
            last.
        before_switch: Functions to call before subgroups move to other buffers. Each one waits until some
            reader of the old buffers, such as a checkpoint, has finished.
        stored: The optimizer state on drives, which a checkpoint commits there without a copy.
        watch: The `ebbtide.runtime.replan.watch.Watch` that compares measured times of the plan with
            predicted ones. None if they are not compared.
        set_aside: The plan to return to, while a temporary plan runs that leaves more GPU memory free.
            Steps under the temporary plan are not measured for planning.
        overlaps: True if a plan's updates may continue during the next forward.
    """

    def __init__(self, engine: TrainingEngine, plan: Plan, device: Device, *, overlap_forward: bool = True) -> None:
        """Start the execution of a plan on a training engine.

        Args:
            overlap_forward: If False, every step waits for its updates, whatever the plan says.
        """
        self.engine = engine
        self.device = device
        self.overlaps = overlap_forward and engine.overlaps_forward
        self.recorder = Recorder(device)
        self.after_step: list[Callable[[], None]] = []
        self.before_switch: list[Callable[[], object]] = []
        self.watch: Any = None
        self.set_aside: Plan | None = None
        self.closed = False
        self._store: ExtentStore | None = None
        self.stored = StoredSteps(lambda: self._store, lambda: frozenset(self._on_storage()), self._wait_all)
        self.pausing = PauseRule()
        self._expected_step: tuple[list[UpdateStep], float] | None = None  # of the coming step
        # Ranks gather together: where one waits for its updates and another does not, both would
        # wait for ever.
        if self.overlaps and engine.any_rank(not plan.overlap_forward):
            plan = plan.model_copy(update={"overlap_forward": False})
        self.plan, self.executor = self._build(plan)
        self._account_for(self.plan)
        self.gradient_buffers = engine.gradient_buffers(
            device, self.executor.states, self.executor.gradients, self._complete
        )
        self._make_spares()

    def _make_spares(self) -> None:
        if self._keeps_window(self.executor.states[0]):
            self.gradient_buffers.make_spares()

    def _keeps_window(self, state: SubgroupState) -> bool:
        sizes = state.gradient.element_size(), state.wire.element_size()
        return keeps_window(self.engine.micro_batches(), *sizes, self.engine.zero_stage())

    def _build(self, plan: Plan, running: Executor | None = None) -> tuple[Plan, Executor]:
        if not self.overlaps:
            plan = plan.model_copy(update={"overlap_forward": False})
        plan = self._in_order_of_use(plan)
        sizes, placements = self.engine.sizes(), plan.placements
        staged = [n for n, p in zip(sizes, placements, strict=True) if p == "device"]
        rule = self.engine.update_rule()
        tensors = 1 + len(rule.moments)
        wire = self.engine.wire_dtype()
        waits = Way("device", early=True) in plan.ways and not self.device.unified
        stored = stored_sizes(plan, sizes)
        if self._store is None and stored:
            self._store = open_store(plan, stored, tensors)
        if running is None:
            self.engine.prepare(self.device)
        before = self._moved_out(plan, running)
        slots = staging_slots(self.device, plan.staging_slots, staged, tensors, DTYPES[wire] if waits else None)
        states = []
        for index, (placement, location) in enumerate(zip(placements, plan.parameter_locations, strict=True)):
            there: Placement = "host" if placement == "device" and not slots else placement
            states.append(self._move(index, before[index], there, location))
            before[index] = states[index]  # the former state has ended, and keeps nothing alive
        self.engine.settle()
        plan = as_allocated(plan, states, len(slots))
        # Parameters would be new before the norm.
        if self.device.unified or rule.own_step:
            plan = plan.with_bits(early=False)
        plan = self._place_sums(plan, states)
        return plan, Executor(
            self.device,
            states,
            plan,
            slots,
            threads_of(plan, self.device),
            rule,
            gradient_template(sizes, wire, plan),
            self._store,
            host_slots(plan.host_slots, stored, tensors),
            spares_of(self.device, states, plan.updated_early, shared=self.engine.shares_state),
            self._arrival(plan),
        )

    def _account_for(self, plan: Plan) -> None:
        times = plan.prediction.step_times if plan.prediction else None
        self.pausing = PauseRule(times or UNKNOWN, self.pausing.steps, self.pausing.clipped)

    def _place_sums(self, plan: Plan, states: list[SubgroupState]) -> Plan:
        if self.device.unified or self.engine.update_rule().own_step or not self._keeps_window(states[0]):
            return plan.with_bits(sum_on_device=False)
        wanted = [i for i, way in enumerate(plan.ways) if way.sum_on_device]
        there = {*wanted[: place_sums(self.device, [states[i] for i in wanted])]}
        ways = tuple(way._replace(sum_on_device=i in there) for i, way in enumerate(plan.ways))
        return plan.model_copy(update={"ways": ways})

    def _in_order_of_use(self, plan: Plan) -> Plan:
        if plan.order != FORWARD or self.engine.update_rule().own_step:  # in stock's order
            return plan
        needed = self.engine.first_use()
        used = sorted(range(len(needed)), key=needed.__getitem__)
        if used == list(range(len(needed))):
            return plan
        return plan.placed(plan.placements, order=order_of(used, plan.placements))

    def _arrival(self, plan: Plan) -> list[int] | None:
        if Way("device", early=True) not in plan.ways:
            return None
        needed = self.engine.first_use()
        return sorted(range(len(needed)), key=lambda s: (needed[s], s), reverse=True)

    def _moved_out(self, plan: Plan, running: Executor | None) -> list[SubgroupState | None]:
        """Move state, gradients and parameters out of GPU memory if a new plan keeps them elsewhere. This makes room
        for the tensors that the plan keeps in GPU memory.

        Returns:
            The tensors of each subgroup. None for a subgroup that still uses the tensors that the training framework
            allocated.
        """
        states: list[SubgroupState | None] = [None] * len(plan.ways)
        if running is not None:
            states = running.states  # type: ignore[assignment]
        now = [state.parameter_location if state else self.engine.parameter_location() for state in states]
        apart = now != [*plan.parameter_locations]
        for index, (way, location) in enumerate(zip(plan.ways, now, strict=True)):
            state = states[index]
            leaves = state is not None and _leaves_device(state.placement, way.placement)
            there: ParameterLocation = "host" if way.parameters == "host" else location
            if leaves:
                states[index] = self._move(index, state, way.placement, there, apart=apart)
            elif apart:
                states[index] = self._move_parameters(index, state, there)
        if apart:
            self.engine.settle()
        return states

    def _move(
        self,
        subgroup: int,
        now: SubgroupState | None,
        placement: Placement,
        location: ParameterLocation,
        *,
        apart: bool = False,
    ) -> SubgroupState:
        """Move a subgroup's tensors to the given memory, and make the framework use them there.

        Args:
            now: The subgroup's present tensors. None if they are still the ones that the framework made.
            placement: Placement that the optimizer state gets.
            location: Memory that the parameters get.
            apart: If True, parameters that are already in this memory, but share a buffer with other subgroups, are
                copied to a tensor of their own.
        """
        before, store = self.engine.take(subgroup, now), self._store
        if now is not None and RECIPES[now.placement].state == "storage":
            if RECIPES[placement].state == "storage":
                store = None  # it is there
            else:  # what the view shows changes with the store
                before = replace(before, state=tuple(t.clone() for t in before.state))
        return self._use(before, place(self.device, subgroup, placement, location, before, apart=apart, store=store))

    def _move_parameters(self, subgroup: int, now: SubgroupState | None, location: ParameterLocation) -> SubgroupState:
        """Move the 16-bit parameters of a subgroup, and leave its optimizer state where it is."""
        before = self.engine.take(subgroup, now)
        location, wire = place_parameters(self.device, subgroup, location, before, apart=True)
        there: Placement = "host" if now is None else now.placement
        return self._use(before, SubgroupState(subgroup, there, before.state, wire, before.gradient, location))

    def _use(self, before: Buffers, state: SubgroupState) -> SubgroupState:
        """Let the engine use a subgroup's new tensors, and release those that the new tensors replace."""
        self.engine.adopt(state)
        pairs = [(before.gradient, state.gradient), (before.wire, state.wire)]
        if not self.engine.shares_state:
            pairs += zip(before.state, state.state, strict=True)
        for left, kept in pairs:
            if left.data_ptr() != kept.data_ptr():
                self.device.host_release(left)
        return state

    @property
    def saves_in_flight(self) -> bool:
        """Return whether a checkpoint is collecting the state dicts at present, and the plan keeps optimizer state on a
        drive.

        While this is so, code that reads state does not wait for updates that still write to the drive. The checkpoint
        waits for these writes later.
        """
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

    def _wait_all(self) -> None:
        self.executor.wait_all()  # of the plan that runs then

    def _on_storage(self) -> Iterable[int]:
        states = self.executor.states
        return (s.index for s in states if RECIPES[s.placement].state == "storage")

    # -- a step ------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Record the beginning of an optimizer step, for the measured timeline.

        Raises:
            BackgroundError: An earlier update or checkpoint failed in the background.
        """
        self.executor.raise_if_failed()
        self.recorder.step_begins()

    def prefetch(self) -> None:
        """Start to copy optimizer state to the GPU for the coming optimizer step, before the gradient norm is known.

        Call this method in the backward of the step's last micro-batch, before the first gradient is stored. Repeated
        calls are allowed.
        """
        self.executor.prefetch(early_updates=self.pausing.on)

    def _complete(self, subgroup: int) -> None:
        self._begin_early(subgroup)
        self.executor.come_in()

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
        """Start the updates of an optimizer step in the background.

        Args:
            scale: Factor that unscales and clips the gradients.

        Raises:
            RuntimeError: The engine has not ended the accumulation of micro-batches (`GradientBuffers.close_window`).
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
        """Call the functions that must run after each optimizer step (``after_step``), such as the start of
        a checkpoint.

        The training framework must have completed its optimizer step.
        """
        for call in self.after_step:
            call()

    def timeline(self, *, wait: bool = True) -> Timeline:
        """Return the measured timeline of the latest training steps, in the format of the simulator's
        timeline.

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
        """Replace the plan that runs by another one, and move every subgroup to the memory that the new
        plan names.

        No bit of the training result changes. Call this from the training thread outside of forward and
        backward:
        between two steps, or between two micro-batches of a step. It waits for running updates and for a
        running checkpoint, which still reads the old buffers.

        Raises:
            PlanError: The plan was made for other subgroups.
            StorageError: The drives have no room for the state that the plan keeps there.
            BackgroundError, CheckpointError: An update or a checkpoint failed in the background before.
        """
        check_plan(plan, self.engine.sizes(), self.plan.subgroup_size, self.engine.zero_stage())
        if self.engine.update_rule().own_step and plan.count("host") < plan.subgroup_count:
            raise PlanError(
                "plan.ways must have placement 'host' for all subgroups, because this optimizer runs its own step() "
                f"in host memory, but only {plan.count('host')} of {plan.subgroup_count} subgroups have it. Give a "
                "plan that keeps all optimizer state in host memory"
            )
        stored = stored_sizes(plan, self.engine.sizes())
        tensors = 1 + len(self.engine.update_rule().moments)
        self._store = grown_store(self._store, plan, stored, tensors)
        self.executor.wait_all()
        for wait in self.before_switch:
            wait()
        old = self.executor
        self.engine.publish()
        old.drop_early_updates()
        old.close(with_device=False)
        self.gradient_buffers.close()
        self._register({state.index: () for state in old.states})
        self.plan, self.executor = self._build(plan, old)
        self._account_for(self.plan)
        now, before = self.executor.bodies, old.bodies
        now.gate, now.spent, self.executor.before_op = before.gate, before.spent, old.before_op
        self.gradient_buffers = self.gradient_buffers.moved(self.executor.states, self.executor.gradients)
        self._make_spares()
        self._register_saved()

    def _register_saved(self) -> None:
        self._register({i: self.engine.saved_state(i) for i in self.plan.issue_order})

    def _register(self, tensors: dict[int, tuple[torch.Tensor, ...]]) -> None:
        register = getattr(self.executor.bodies.gate, "register_all", None)
        if callable(register):
            register(tensors)

    # -- the end -----------------------------------------------------------------------------

    def close(self) -> None:
        """End the execution of a plan and close its store on drives. Afterwards raise the error of a
        background update, if one has failed.
        """
        if self.closed:
            return
        try:
            self.executor.wait_all()
        finally:
            self.closed = True
            self.recorder.unwatch()  # the device may serve another engine
            self.executor.close()
            if self._store is not None:
                self._store.close()

    def host_bytes(self) -> int:
        """Return the bytes of host memory that a plan's optimizer state, gradients, buffers and parameters
        take in total on this rank.
        """
        unified = self.device.unified
        total, wires = 0, dict[int, int]()  # some may share theirs
        for state in self.executor.states:
            # A framework that keeps its own buffers keeps the room of resident state in them too.
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


def _leaves_device(before: Placement, after: Placement) -> bool:
    """Return whether a subgroup's state or gradient is in GPU memory with one placement, but not with another one."""
    was, will = RECIPES[before], RECIPES[after]
    return was.state == "device" != will.state or was.gradient == "device" != will.gradient
