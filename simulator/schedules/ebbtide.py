"""Builds the schedule of ebbtide's iteration from a workload and a plan, by the recipes."""

from __future__ import annotations

from collections import Counter

from simulator.plan import Plan, PlanError
from simulator.schedule import Lane, OpKind, Schedule
from simulator.schedules.loop import ALL_CORES, TrainingLoop
from simulator.update.footprint import fetched_elements, footprint
from simulator.update.recipes import (
    GRADIENT_FETCH,
    GRADIENT_HOME,
    Bytes,
    Slot,
    Step,
    Wait,
    recipe_of,
    slot_limits,
)
from simulator.workload import Workload


def build_schedule(
    workload: Workload, plan: Plan, iterations: int = 3, *, fused: bool = True
) -> Schedule:
    """The schedule that the runtime executes under ``plan``, for some iterations in a row.

    Three iterations are enough to see the steady state: the first one starts with nothing to wait
    for, the period is read between the ends of the second and the third backward.

    Args:
        fused: the host kernel reads wire gradients, scales, updates and writes wire parameters in
            one pass; False shows what stock's separate passes would cost in the same schedule.

    Raises:
        PlanError: the plan covers another number of subgroups than the workload has.
    """
    loop = EbbtideLoop(workload, plan, fused=fused)
    loop.run(iterations)
    return loop.schedule(iterations)


def check_homes(plan: Plan, zero_stage: int) -> None:
    """Raises PlanError: parameters live on the host where DeepSpeed keeps them whole."""
    if zero_stage < 3 and "host" in plan.parameter_homes:
        raise PlanError(
            f"plan.parameter_home must be absent under ZeRO-{zero_stage}, which keeps parameters "
            "whole on the device, but got 'host': plan again with `tune plan`, or train with "
            "zero_optimization.stage 3"
        )


class EbbtideLoop(TrainingLoop):
    """ebbtide's iteration: interprets the recipe of each subgroup's placement."""

    def __init__(self, workload: Workload, plan: Plan, *, fused: bool = True) -> None:
        if plan.subgroup_count != len(workload.subgroups):
            raise PlanError(
                "plan.placement must cover each subgroup of the workload once, but got "
                f"{plan.subgroup_count} placements for {len(workload.subgroups)} subgroups: plan "
                "again with `tune plan` for this model and sub_group_size"
            )
        if plan.overlap_forward and workload.zero_stage < 3:
            raise PlanError(
                f"plan.overlap_forward must be false under ZeRO-{workload.zero_stage}, whose steps "
                "wait for their updates, but got true: plan again with `tune plan`"
            )
        check_homes(plan, workload.zero_stage)
        super().__init__(workload)
        self.plan = plan
        self.placements, self.homes = plan.placements, plan.parameter_homes
        ways = tuple(zip(self.placements, self.homes, strict=True))
        self.recipes = [recipe_of(*way, fused=fused) for way in ways]
        self.fetched = fetched_elements(workload, self.homes)
        self.order = plan.issue_order
        self.bytes = Bytes.of(workload)
        self.slots = slot_limits(plan.staging_slots, Counter(ways))
        self.gradient_home: dict[int, int] = {}  # subgroup -> op
        self.missing: list[int] = []  # layers whose gradient a subgroup still lacks
        self.taken: dict[Slot, int] = dict.fromkeys(Slot, 0)  # in all iterations so far
        self.given_back: dict[Slot, list[int]] = {slot: [] for slot in Slot}  # the ops that did
        self.early: dict[int, int] = {}  # subgroup -> the op that brought its state before the norm
        self.ends: list[int] = []  # of the latest step: each subgroup's last op

    def schedule(self, iterations: int) -> Schedule:
        """What was appended so far, with the memory that is in use throughout."""
        held = footprint(self.workload, self.plan)
        return Schedule(
            ops=tuple(self.out.ops),
            iterations=iterations,
            ranks_per_node=self.workload.ranks_per_node,
            strategy="ebbtide",
            device_base_bytes=held["device"],
            host_base_bytes=held["host"],
        )

    def before_pass(self, layer: int, waits: list[int], *, backward: bool = False) -> list[int]:
        """Parameters that live in host memory come in while the pass before this one runs. They
        wait for their own updates; those of the layer's other parameters the pass waits for.
        """
        size = self.fetched[layer] * self.bytes.wire
        if size:
            new, homes = self.parameters_new, self.homes
            others = {new[s] for s, _ in self.shares[layer] if homes[s] == "device" and s in new}
            fetch = self.out.add(
                OpKind.PARAMETER_FETCH, Lane.H2D_FETCH, size, "h2d_bytes_per_s",
                [*(op for op in waits if op not in others), *self.passes[-2:-1]],
                dram_bytes=size, layer=layer,
            )  # fmt: skip
            waits = [fetch, *(op for op in waits if op in others)]
        return super().before_pass(layer, waits, backward=backward)

    def backward(self, micro_batch: int) -> None:
        self.missing = [len(layers) for layers in self.layers_of]
        self.early = {}
        super().backward(micro_batch)

    def gradients(self, layer: int, micro_batch: int, after: int) -> None:
        """A subgroup's gradient goes home when all its layers are through."""
        for subgroup, _ in reversed(self.shares[layer]):
            self.missing[subgroup] -= 1
            if self.missing[subgroup] == 0:
                self._gradient_home(subgroup, micro_batch, after)
        if layer == len(self.workload.layers) - 1 and micro_batch == self.boundary:
            self._prefetch()

    def _gradient_home(self, subgroup: int, micro_batch: int, after: int) -> None:
        if self.recipes[subgroup].gradient == "host":
            if micro_batch > 0:
                so_far = self.gradient_home.get(subgroup)  # none in ZeRO-1's first step
                waits = [after] if so_far is None else [after, so_far]
                after = self._add(GRADIENT_FETCH, subgroup, waits)
            after = self._add(GRADIENT_HOME, subgroup, [after])
        self.gradient_home[subgroup] = after

    def _prefetch(self) -> None:
        """The first visits come in once the last layer's backward is done: with its gradient the
        runtime sees the last micro-batch begin.
        """
        for subgroup in self.order:
            step = self.recipes[subgroup].steps[0]
            if step.early and len(self.early) < self.plan.prefetch:
                self.early[subgroup] = self._add(step, subgroup, [self.backward_done])

    def step(self) -> None:
        """Norm barrier, then all queues at once, each in the plan's order."""
        norm = self.out.add(OpKind.NORM, Lane.COMPUTE, 0.0, after=self.gradients_done)
        new: dict[int, int] = {}
        self.ends = []
        for subgroup in self.order:
            new[subgroup] = self._update(subgroup, norm)
        if self.plan.overlap_forward:
            self.parameters_new, waits = new, [norm]
        else:
            waits = [norm, *new.values(), *self.ends]
        self.step_ends(waits)

    def _update(self, subgroup: int, norm: int) -> int:
        """Appends one subgroup's steps; returns the op after which its parameters are new."""
        new = previous = -1
        for step in self.recipes[subgroup].steps:
            if step.early and subgroup in self.early:
                previous = self.early[subgroup]
                continue
            waits = [norm] if Wait.NORM in step.waits else []
            if Wait.GRADIENT in step.waits:
                waits.append(self.gradient_home[subgroup])
            if Wait.PREVIOUS in step.waits:
                waits.append(previous)
            if Wait.GATE in step.waits:
                waits += self.may_overwrite(subgroup)
            previous = self._add(step, subgroup, waits)
            new = previous if step.publishes else new
        self.ends.append(previous)
        return new

    def _add(self, step: Step, subgroup: int, waits: list[int]) -> int:
        """One op; it takes its buffer from the op that gave it back longest ago."""
        size = self.sizes[subgroup]
        if step.takes is not None:
            use = self.taken[step.takes] - self.slots[step.takes]
            self.taken[step.takes] += 1
            waits = [*waits, self.given_back[step.takes][use]] if use >= 0 else waits
        op = self.out.add(
            step.kind, step.lane, size * step.work(self.bytes), step.rate, waits,
            dram_bytes=size * step.dram(self.bytes),
            cores=(self.plan.threads or ALL_CORES) if step.threads else 0.0,
            device_share=step.device_share, subgroup=subgroup,
        )  # fmt: skip
        if step.gives_back is not None:
            self.given_back[step.gives_back].append(op)
        return op

    def may_overwrite(self, subgroup: int) -> list[int]:  # noqa: ARG002
        """The ops that must have ended before a subgroup's state changes where it lives: a
        checkpoint's, see `simulator.schedules.checkpointed`.
        """
        return []
