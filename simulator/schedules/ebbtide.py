"""The schedules of training under a plan: the ops of each training iteration, for a workload.

`PlannedLoop` has the ops of forward, backward, gradient reductions and waits for updates. `EbbtideLoop` adds the ops of
subgroups' gradients and updates, and so builds a plan's schedule. `record` puts markers in their places: the ops
between the markers do not depend on a plan, so that the compiled simulator inserts each plan's ops at the markers and
never runs the training loop again.
"""

from abc import abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import count
from typing import NamedTuple

from ebbtide.simulator.plan import Plan, PlanError
from ebbtide.simulator.rules import checked
from ebbtide.simulator.schedule import Lane, Memory, Op, OpKind, Schedule
from ebbtide.simulator.schedules.buckets import Leavings, bucket_of, in_order
from ebbtide.simulator.schedules.footprint import fetched_elements, fetched_for, footprint_by_kind
from ebbtide.simulator.schedules.loop import ALL_CORES, TrainingLoop, check_passes
from ebbtide.simulator.update.holding import GRADIENTS_UNDER_WAY_BYTES
from ebbtide.simulator.update.issue import Issue
from ebbtide.simulator.update.order import arrival_order
from ebbtide.simulator.update.recipes import slot_limits
from ebbtide.simulator.update.steps import Bytes, Step, Wait
from ebbtide.simulator.workload import Workload, exchanged_pieces


class GradientPart(NamedTuple):
    """The part of a subgroup's gradient that belongs to one layer.

    Gradients that go to host memory are copied in such parts.

    Attributes:
        number: Position among all parts of a workload.
        last: True for the part that completes the subgroup's gradient, because it is the last one to leave DeepSpeed's
            bucket.
    """

    number: int
    subgroup: int
    elements: int
    last: bool


def parts_of(workload: Workload, leave: Leavings) -> tuple[tuple[GradientPart, ...], ...]:
    """Return the parts of subgroups' gradients in each layer, in the order of their transfer to the host.

    This is the order in which backward computes them, or that of the layer's parameters (`Leaving.ascending`).
    """
    ascending = {left.layer for some in leave for left in some if left.ascending}
    held = [some if n in ascending else some[::-1] for n, some in enumerate(workload.shares())]
    last = {subgroup: layer for layer in in_order(leave) for subgroup, _ in held[layer]}
    numbers = count()
    return tuple(
        tuple(GradientPart(next(numbers), subgroup, elements, layer == last[subgroup]) for subgroup, elements in some)
        for layer, some in enumerate(held)
    )


class PlannedLoop(TrainingLoop):
    """A simulated training loop under a plan, to which subclasses add the ops that depend on the plan's placements.

    Attributes:
        locations: Memory that holds each subgroup's 16-bit parameters.
        overlaps: True if a step returns while updates are still running.
        ends: Last op of each subgroup's update in the latest step.
    """

    def __init__(self, workload: Workload, locations: Sequence[Memory], *, overlaps: bool) -> None:
        super().__init__(workload.fetched if "host" in locations else workload.planned)
        self.locations, self.overlaps = locations, overlaps
        self.fetched = fetched_elements(workload, locations)
        self.parts = parts_of(workload, self.leavings)
        leave = in_order(self.leavings)
        self.first_to_leave = next(n for n in leave if self.shares[n]) if self.bucket else leave[0]
        self.ends: list[int] = []

    @property
    def bucket(self) -> int:
        return bucket_of(self.workload)

    @abstractmethod
    def gradient_reduced(self, part: GradientPart, micro_step: int, after: int) -> None:
        """Append the ops for a part of a subgroup's gradient. The op ``after`` has reduced it over the ranks."""

    @abstractmethod
    def prefetch(self) -> None:
        """Start copying state from host memory for updates on the GPU in this step.

        The copies begin when the first gradients of the last micro-batch leave DeepSpeed's bucket. The runtime cannot
        begin earlier, because only the arrival of a gradient tells it that this backward has begun.
        """

    @abstractmethod
    def updates(self, norm: int) -> tuple[dict[int, int], list[int]]:
        """Append the ops of updates that are issued once the gradient norm is known.

        Returns:
            The op after which a subgroup's updated parameters are ready, by subgroup, and the last op of each update.
        """

    def before_pass(self, layer: int, waits: list[int], *, backward: bool = False) -> list[int]:
        """Append to the schedule the copy of a layer's parameters from host memory to the GPU before a pass.

        A pass is a forward or backward. The copy runs during the previous layer's pass, and after the updates of the
        copied parameters. Parameters that are still on the GPU from an earlier pass are not copied again. The pass also
        waits until the layer's parameters in GPU memory are updated.

        Returns:
            The ops that the pass waits for.
        """
        elements, of = self.fetched[layer], self.workload.layers[layer]
        size = fetched_for(of, elements, self.micro_step, backward=backward)
        size *= self.workload.wire_bytes
        if size:
            new, locations = self.parameters_new, self.locations
            others = {new[s] for s, _ in self.shares[layer] if locations[s] == "device" and s in new}
            fetch = self.out.add(
                OpKind.PARAMETER_FETCH,
                Lane.H2D_FETCH,
                size,
                "h2d_bytes_per_s",
                [*(op for op in waits if op not in others), *self.passes[-2:-1]],
                dram_bytes=size,
                layer=layer,
            )
            waits = [fetch, *(op for op in waits if op in others)]
        updated = self.overlaps and not backward and self.micro_step == 0 and self.shares[layer]
        if self.workload.module_issue_s and (size or updated):
            waits = [self._issued(layer, waits)]
        return super().before_pass(layer, waits, backward=backward)

    def _issued(self, layer: int, waits: list[int]) -> int:
        return self.out.add(OpKind.ISSUE, Lane.ISSUE, self.workload.module_issue_s, after=waits, layer=layer)

    def gradients(self, layer: int, micro_step: int, after: int) -> None:
        if layer == self.first_to_leave and micro_step == self.boundary:
            self.prefetch()
        for part in self.parts[layer]:
            self.gradient_reduced(part, micro_step, after)

    def step(self) -> None:
        """Append to the schedule the gradient norm, and then all CPU and GPU updates in the plan's order.

        If the step waits for its updates, the ranks exchange each piece of the parameters once its updates have ended.
        """
        waits = [*self.gradients_done, *self.issued_behind()]
        norm = self.out.add(OpKind.NORM, Lane.COMPUTE, self.workload.step_issue_s, after=waits)
        new, self.ends = self.updates(norm)
        if self.overlaps:
            self.parameters_new = new
            self.step_ends([norm])
        else:
            pieces = exchanged_pieces(self.sizes)
            shares = [(size / sum(self.sizes), [norm, *(new[s] for s in held)]) for _, size, held in pieces]
            self.step_ends([norm, *new.values(), *self.ends], shares)


RECORDED = 3  # micro-batches that are recorded: the first one, one that may stand for several, and the last one


class What(IntEnum):
    """The kind of an entry in a recorded training iteration: an op, or a marker.

    A marker stands at a place where the ops of a plan must be inserted.
    """

    OP = 0
    GRADIENT = 1  # marks that a part of a subgroup's gradient is reduced, after the op that the marker waits for
    PREFETCH = 2
    UPDATES = 3


@dataclass(frozen=True, slots=True)
class TapeEntry:
    """An entry of a recorded training iteration: an op, or a marker that stands for ops which depend on the plan.

    Attributes:
        op: Op of the entry. None for markers.
        added_to: True if gradients of earlier micro-batches are already in host memory.
        boundary: True in the last micro-batch.
        refs: What this entry waits for, as numbers r. If this entry is number i of n entries, and the plan has m
            subgroups, r means:

            - r < i: entry r of the same iteration.
            - i <= r < n: entry r of the previous iteration.
            - n <= r < n + m: the op after which subgroup r - n has new parameters.
            - n + m <= r: the last op of the update of subgroup r - n - m.
    """

    what: What
    op: Op | None
    refs: tuple[int, ...]
    part: GradientPart | None = None
    added_to: bool = False
    boundary: bool = False


@dataclass(frozen=True)
class Tape:
    """A recording of a training iteration. One recorded micro-batch may represent several equal ones.

    Attributes:
        first, last: The entries ``places[first:last]`` are those of the micro-batch that represents several.
    """

    places: Sequence[TapeEntry]
    first: int = 0
    last: int = 0
    times: int = 1


def record(workload: Workload, locations: Sequence[Memory], *, overlaps: bool) -> Tape:
    """Record one training iteration as a list of ops, with markers in place of the ops that depend on a plan.

    Only the first and the last micro-batch of a step differ from the others, so at most `RECORDED` are recorded. The
    loop runs twice: the second iteration shows which ops its ops wait for, in this iteration and in the previous one.

    Raises:
        ValueError: The workload has more forward and backward passes of layers than `TrainingLoop.run` can simulate.
    """
    micro = workload.gradient_accumulation_steps
    check_passes(workload, 2)
    few = workload if micro <= RECORDED else workload.model_copy(update={"gradient_accumulation_steps": RECORDED})
    loop = _OpRecorder(few, locations, overlaps=overlaps)
    loop.run(2)
    return Tape(loop.places(), *loop.repeated(), 1 + micro - few.gradient_accumulation_steps)


class _OpRecorder(PlannedLoop):
    """A simulated training loop that records its ops, so that the schedule of any plan can be built from them.

    The recording has a marker wherever ops depend on the plan.
    """

    def __init__(self, workload: Workload, locations: Sequence[Memory], *, overlaps: bool) -> None:
        super().__init__(workload, locations, overlaps=overlaps)
        self.marks: dict[int, TapeEntry] = {}  # markers without their refs
        self.stand_ins: dict[int, int] = {}  # op -> its number after those of the places
        self.begun: list[int] = []  # the number of the first op of each micro-batch

    def forward(self, micro_step: int) -> None:
        self.begun.append(len(self.out.ops))
        super().forward(micro_step)

    def repeated(self) -> tuple[int, int]:
        last = self.boundary
        return self.begun[max(0, last - 1)], self.begun[last]

    def gradient_reduced(self, part: GradientPart, micro_step: int, after: int) -> None:
        added_to, boundary = micro_step > 0, micro_step == self.boundary
        self._mark(TapeEntry(What.GRADIENT, None, (), part, added_to, boundary), after)

    def prefetch(self) -> None:
        self._mark(TapeEntry(What.PREFETCH, None, ()), self.backward_done)

    def updates(self, norm: int) -> tuple[dict[int, int], list[int]]:
        self._mark(TapeEntry(What.UPDATES, None, ()), norm)
        count = len(self.sizes)
        new, ends = ([self._stand_in(first + s) for s in range(count)] for first in (0, count))
        return dict(enumerate(new)), ends

    def _mark(self, mark: TapeEntry, after: int) -> None:
        self.marks[self.out.add(OpKind.NORM, Lane.COMPUTE, 0.0, after=[after])] = mark

    def _stand_in(self, number: int) -> int:
        op = self.out.add(OpKind.NORM, Lane.COMPUTE, 0.0)
        self.stand_ins[op] = number
        return op

    def places(self) -> list[TapeEntry]:
        ops, count = self.out.ops, len(self.out.ops) // 2
        assert [op.kind for op in ops[:count]] == [op.kind for op in ops[count:]]
        own = [i for i in range(count) if i not in self.stand_ins]
        numbers = {i: number for number, i in enumerate(own)}
        numbers |= {i: len(own) + number for i, number in self.stand_ins.items() if i < count}
        # The numbers by which other ops refer to an op, by the op's id.
        refs_of = [numbers[i] for i in range(count)] * 2
        result = []
        for number, i in enumerate(own):
            op = ops[count + i]
            refs = tuple([refs_of[before] for before in op.after])
            # The engine that replays the recording keeps only the latest op of each place.
            assert all(ref >= number for ref, before in zip(refs, op.after, strict=True) if before < count)
            mark = self.marks.get(count + i)
            result.append(TapeEntry(What.OP, op, refs) if mark is None else replace(mark, refs=refs))
        return result


@checked
def build_schedule(workload: Workload, plan: Plan, iterations: int = 3) -> Schedule:
    """Return the schedule of ops that ebbtide's runtime executes under a plan, for a number of training iterations.

    Three iterations are enough to see the steady state, since the first has no earlier updates to wait for. The
    time of an iteration is the time between the ends of the second and the third backward.

    Raises:
        PlanError: The plan has another number of subgroups than the workload.
    """
    workload = workload.cut_as(plan)
    loop = EbbtideLoop(workload, plan)
    loop.run(iterations)
    return loop.schedule(iterations)


def check_plan(plan: Plan, workload: Workload) -> None:
    """Check that a workload can be trained under a plan.

    Raises:
        PlanError: The plan has another number of subgroups than the workload, or an option that the workload's ZeRO
            stage does not have.
    """
    if plan.subgroup_count != len(workload.subgroups):
        raise PlanError(
            f"plan.ways must set the placement of all {len(workload.subgroups)} subgroups of the workload, but "
            f"sets the placement of {plan.subgroup_count} subgroups. Plan again with `tune plan` for this model "
            "and sub_group_size",
            key="plan.ways",
        )
    if plan.overlap_forward and not workload.overlaps_forward:
        raise PlanError(
            f"plan.overlap_forward must be false under ZeRO-{workload.zero_stage} with several ranks, whose steps "
            "wait for their updates, but got true: plan again with `tune plan`",
            key="plan.overlap_forward",
        )
    check_locations(plan, workload.zero_stage)


def check_locations(plan: Plan, zero_stage: int) -> None:
    """Check that a plan's parameter locations and optimizer state on drives are possible at a ZeRO stage.

    Raises:
        PlanError: The stage is below 3, and the plan has parameters in host memory or optimizer state on drives. Below
            ZeRO-3 each rank has all parameters, and DeepSpeed keeps the optimizer state in one flat partition.
    """
    if zero_stage == 3:
        return
    only_zero3 = (
        ("host" in plan.parameter_locations, "puts 16-bit parameters into host memory"),
        (plan.stores, "puts optimizer state on a drive (placement 'stored')"),
    )
    what = next((words for there, words in only_zero3 if there), None)
    if what is not None:
        raise PlanError(
            f"plan.ways {what}, which needs ZeRO-3, but training uses ZeRO-{zero_stage}. Plan again with `tune plan`, "
            "or train with zero_optimization.stage 3",
            key="plan.ways",
        )


class EbbtideLoop(PlannedLoop):
    """The simulated training loop of ebbtide under a plan. A subgroup's placement decides how it is updated."""

    def __init__(self, workload: Workload, plan: Plan) -> None:
        check_plan(plan, workload)
        super().__init__(workload, plan.parameter_locations, overlaps=plan.overlap_forward)
        self.plan = plan
        once = workload.adds_on_device
        self.recipes = [way._replace(sum_on_device=once or way.sum_on_device).recipe for way in plan.ways]
        self.bytes = Bytes.of(workload)
        slots = slot_limits(plan.staging_slots, self.recipes, plan.host_slots)
        arrival = arrival_order(self.layers_of)
        self.issue = Issue(self.recipes, plan.issue_order, arrival, slots, plan.prefetch, self._add, self._arrived)
        self.on_host: dict[int, int] = {}  # subgroup -> the op that copied its gradient to the host
        self.sums: dict[int, int] = {}  # number of a part -> the op that copied its gradient to the host
        # Copies of gradients to the host that have not ended, with their bytes.
        self.under_way: deque[tuple[int, float]] = deque()
        self.waited_for = -1  # the latest of these copies that training waits for before it issues more work

    def schedule(self, iterations: int) -> Schedule:
        """Return a schedule of the ops appended so far.

        The schedule also states the bytes of memory, such as for parameters, that are in use throughout an iteration.
        """
        return Schedule(
            ops=tuple(self.out.ops),
            iterations=iterations,
            ranks_per_node=self.workload.ranks_per_node,
            strategy="ebbtide",
            held=footprint_by_kind(self.workload, self.plan),
        )

    def gradient_reduced(self, part: GradientPart, micro_step: int, after: int) -> None:
        left_out, subgroup = Wait.SUM if micro_step == 0 else Wait(0), part.subgroup
        if micro_step != self.boundary:
            left_out |= Wait.LAST
        for step in self.recipes[subgroup].gradient_steps:
            if step.waits & left_out:
                continue
            # In ZeRO-1's first step there is no earlier sum.
            sums = [self.sums[part.number]] if Wait.SUM in step.waits and part.number in self.sums else []
            after = self._add(step, subgroup, [after, *sums], part.elements)
            if step.kind == OpKind.GRADIENT_D2H:
                self._make_room(after)
        self.on_host[subgroup] = self.sums[part.number] = after
        if part.last and micro_step == self.boundary:
            self.issue.gradient(subgroup)

    def _make_room(self, op: int) -> None:
        # The training thread of the schedule waits for the oldest copy, then for the next one, and so on. It stops when
        # the remaining copies have at most `GRADIENTS_UNDER_WAY_BYTES` plus half the bytes of the oldest remaining
        # copy. It does not wait for the new copy.
        self.under_way.append((op, self.out.ops[op].work))
        left = sum(size for _, size in self.under_way)
        while len(self.under_way) > 1:
            oldest, size = self.under_way[0]
            if left - size / 2 <= GRADIENTS_UNDER_WAY_BYTES:
                break
            self.under_way.popleft()
            self.waited_for, left = oldest, left - size

    def issued_behind(self) -> list[int]:
        waits = [self.waited_for] if self.waited_for >= 0 else []
        self.waited_for = -1
        return waits

    def run(self, iterations: int) -> None:
        self.issue.ahead()
        super().run(iterations)

    def prefetch(self) -> None:
        self.issue.backward(self.backward_done)

    def updates(self, norm: int) -> tuple[dict[int, int], list[int]]:
        done = self.issue.norm(norm)
        self.issue.ahead(norm)
        return done

    def _arrived(self, subgroup: int) -> list[int]:
        return [self.on_host[subgroup]]

    def _add(self, step: Step, subgroup: int, waits: list[int], elements: int | None = None) -> int:
        size = self.sizes[subgroup] if elements is None else elements
        return self.out.add(
            step.kind,
            step.lane,
            size * step.work(self.bytes),
            step.rate,
            waits,
            dram_bytes=size * step.dram(self.bytes),
            cores=(self.plan.threads or ALL_CORES) if step.threads else 0.0,
            device_share=step.device_share,
            subgroup=subgroup,
        )
