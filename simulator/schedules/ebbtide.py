"""Builds the schedule of ebbtide's iteration from a workload and a plan, by the recipes."""

from collections import deque
from collections.abc import Iterator, Sequence

from ebbtide.simulator.plan import Plan, PlanError
from ebbtide.simulator.schedule import OpKind, Schedule
from ebbtide.simulator.schedules.loop import ALL_CORES
from ebbtide.simulator.schedules.planned_loop import Part, PlannedLoop
from ebbtide.simulator.update.footprint import GRADIENTS_UNDER_WAY_BYTES, footprint_by_kind
from ebbtide.simulator.update.order import arrival_order
from ebbtide.simulator.update.recipes import Bytes, Slot, Step, Wait, early_limits, recipe_of, slot_limits
from ebbtide.simulator.workload import Workload


def build_schedule(
    workload: Workload, plan: Plan, iterations: int = 3, *, fused: bool = True, arrival: Sequence[int] | None = None
) -> Schedule:
    """The schedule that the runtime executes under ``plan``, for some iterations in a row.

    Three iterations are enough to see the steady state: the first one starts with nothing to wait
    for, the period is read between the ends of the second and the third backward.

    Args:
        fused: the host kernel reads wire gradients, scales, updates and writes wire parameters in
            one pass; False shows what stock's separate passes would cost in the same schedule.
        arrival: in which order gradients are complete; None: by the workload's layers.

    Raises:
        PlanError: the plan covers another number of subgroups than the workload has.
    """
    loop = EbbtideLoop(workload, plan, fused=fused, arrival=arrival)
    loop.run(iterations)
    return loop.schedule(iterations)


def check_homes(plan: Plan, zero_stage: int) -> None:
    """Raises PlanError: parameters live on the host where DeepSpeed keeps them whole, or state on
    storage where it keeps all of it in one piece, or in buffers that change places.
    """
    if zero_stage == 3:
        return
    if any(way.early for way in plan.ways):
        raise PlanError(
            f"plan.ways must not be early under ZeRO-{zero_stage}, whose flat partitions keep state where it is, "
            "but some are: plan again with `tune plan`, or train with zero_optimization.stage 3",
            key="plan.ways",
        )
    if "host" in plan.parameter_homes:
        raise PlanError(
            f"plan.ways must not have parameters on the host under ZeRO-{zero_stage}, which keeps them whole on "
            "the device, but some have: plan again with `tune plan`, or train with zero_optimization.stage 3",
            key="plan.ways",
        )
    if plan.stores:
        raise PlanError(
            f"plan.ways must not be 'stored' under ZeRO-{zero_stage}, whose flat partitions "
            "keep host memory for all state, but some are: train with zero_optimization.stage 3",
            key="plan.ways",
        )


class EbbtideLoop(PlannedLoop):
    """ebbtide's iteration: interprets the recipe of each subgroup's placement."""

    def __init__(
        self, workload: Workload, plan: Plan, *, fused: bool = True, arrival: Sequence[int] | None = None
    ) -> None:
        if plan.subgroup_count != len(workload.subgroups):
            raise PlanError(
                "plan.ways must cover each subgroup of the workload once, but got "
                f"{plan.subgroup_count} ways for {len(workload.subgroups)} subgroups: plan "
                "again with `tune plan` for this model and sub_group_size",
                key="plan.ways",
            )
        if plan.overlap_forward and workload.zero_stage < 3:
            raise PlanError(
                f"plan.overlap_forward must be false under ZeRO-{workload.zero_stage}, whose steps "
                "wait for their updates, but got true: plan again with `tune plan`",
                key="plan.overlap_forward",
            )
        check_homes(plan, workload.zero_stage)
        super().__init__(workload, plan.parameter_homes, overlaps=plan.overlap_forward)
        self.plan = plan
        once = workload.adds_on_device
        self.recipes = [
            recipe_of(w.placement, w.parameters, fused=fused, guessed=w.early, summed=w.sum_on_device or once)
            for w in plan.ways
        ]
        self.order = plan.issue_order
        self.bytes = Bytes.of(workload)
        self.slots = slot_limits(plan.staging_slots, self.recipes, plan.host_slots)
        self.arrival = arrival or arrival_order(self.layers_of)
        self.norm = self.begin = -1  # begin: before it no visit comes in
        # Subgroup, and number of a part -> the op that brought its gradient home.
        self.at_home: dict[int, int] = {}
        self.sums: dict[int, int] = {}
        # Of each slot that is free, the op behind which it is: who takes one, takes the first.
        self.free = {slot: deque([-1] * count) for slot, count in self.slots.items()}
        self.under_way: deque[tuple[int, float]] = deque()  # gradients' ways home, with their bytes
        self.waited_for = -1  # the latest of them before which nothing more is issued
        # Subgroup -> how many of its steps began before the norm, and the latest.
        self.early: dict[int, tuple[int, int]] = {}
        self.complete: set[int] = set()  # subgroups whose gradient of this step is at home
        self.coming: deque[int] = deque()  # those to take a slot before the norm, in this order

    def schedule(self, iterations: int) -> Schedule:
        """What was appended so far, with the memory that is in use throughout."""
        return Schedule(
            ops=tuple(self.out.ops),
            iterations=iterations,
            ranks_per_node=self.workload.ranks_per_node,
            strategy="ebbtide",
            held=footprint_by_kind(self.workload, self.plan),
        )

    def gradient_reduced(self, part: Part, micro_step: int, after: int) -> None:
        left_out, subgroup = Wait.SUM if micro_step == 0 else Wait(0), part.subgroup
        if micro_step != self.boundary:
            left_out |= Wait.LAST
        for step in self.recipes[subgroup].gradient_steps:
            if step.waits & left_out:
                continue
            # ZeRO-1's first step has no sum from before.
            sums = [self.sums[part.number]] if Wait.SUM in step.waits and part.number in self.sums else []
            after = self._add(step, subgroup, [after, *sums], part.elements)
            if step.kind == OpKind.GRADIENT_D2H:
                self._make_room(after)
        self.at_home[subgroup] = self.sums[part.number] = after
        if part.last and micro_step == self.boundary:
            self.complete.add(subgroup)
            self._guess(subgroup)
            self._come_in()

    def _guess(self, subgroup: int) -> None:
        """What needs no norm, where the gradient is complete and a slot has been taken."""
        recipe = self.recipes[subgroup]
        begun, previous = self.early.get(subgroup, (0, -1))
        if subgroup not in self.complete or not (begun or recipe.steps[0].takes is None):
            return
        for step in recipe.steps[begun : recipe.before_norm]:
            previous = self._add(step, subgroup, self._waits(step, subgroup, previous))
            begun += 1
            self.early[subgroup] = begun, previous

    def _come_in(self) -> None:
        """The next ones, as far as slots are free: a guess gives its slot back."""
        while self.coming and self._is_free(self.recipes[self.coming[0]].steps[0].takes):
            subgroup = self.coming.popleft()
            self._begin_early(subgroup, self.begin)
            self._guess(subgroup)

    def _is_free(self, slot: Slot | None) -> bool:
        assert slot is not None
        return bool(self.free[slot])

    def _make_room(self, op: int) -> None:
        """Keep what is under way within `GRADIENTS_UNDER_WAY_BYTES`, to the nearest part.

        The runtime sends each part parameter by parameter.
        """
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
        for subgroup in self._first(ahead=True):
            self._begin_early(subgroup, -1)
        super().run(iterations)

    def prefetch(self) -> None:
        """Guesses come in as gradients do, before what waits for the norm in its slot."""
        guessed = (s for s in self.arrival if self.recipes[s].before_norm)
        visits = (s for s in guessed if self.recipes[s].steps[0].early)
        self.coming = deque([*visits, *self._first(ahead=False)])
        self.begin = self.backward_done
        self._come_in()

    def _first(self, *, ahead: bool) -> Iterator[int]:
        """Subgroups that take a slot early and keep it until the norm is known, or begin behind
        it.
        """
        left = early_limits(self.plan.prefetch, self.slots)
        waiting = (s for s in self.order if not self.recipes[s].before_norm)
        for subgroup in waiting:
            recipe = self.recipes[subgroup]
            slot = recipe.steps[0].takes if recipe.steps[0].early else None
            if slot is not None and slot.ahead == ahead and left[slot]:
                left[slot] -= 1
                yield subgroup

    def _begin_early(self, subgroup: int, behind: int) -> None:
        waits = [behind] if behind >= 0 else []
        self.early[subgroup] = 1, self._add(self.recipes[subgroup].steps[0], subgroup, waits)

    def updates(self, norm: int) -> tuple[dict[int, int], list[int]]:
        self.norm = norm
        self.complete.clear()
        self.coming.clear()
        new: dict[int, int] = {}
        ends = []
        for subgroup in self.order:
            begun, previous = self.early.pop(subgroup, (0, -1))
            for step in self.recipes[subgroup].steps[begun:]:
                previous = self._add(step, subgroup, self._waits(step, subgroup, previous))
                if step.publishes:
                    new[subgroup] = previous
            ends.append(previous)
        for subgroup in self._first(ahead=True):
            self._begin_early(subgroup, norm)
        return new, ends

    def _waits(self, step: Step, subgroup: int, previous: int) -> list[int]:
        waits = [self.norm] if Wait.NORM in step.waits else []
        if Wait.GRADIENT in step.waits:
            waits.append(self.at_home[subgroup])
        if Wait.PREVIOUS in step.waits:
            waits.append(previous)
        if Wait.GATE in step.waits:
            waits += self.may_overwrite(subgroup)
        return waits

    def _add(self, step: Step, subgroup: int, waits: list[int], elements: int | None = None) -> int:
        """Append an op, which takes its buffer from the op that gave it back longest ago.

        Args:
            elements: Number of elements that the op works on, or None for the whole subgroup.
        """
        size = self.sizes[subgroup] if elements is None else elements
        if step.takes is not None:
            behind = self.free[step.takes].popleft()
            waits = [*waits, behind] if behind >= 0 else waits
        op = self.out.add(
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
        if step.gives_back is not None:
            self.free[step.gives_back].append(op)
        return op

    def may_overwrite(self, subgroup: int) -> list[int]:  # noqa: ARG002
        """The ops that must have ended before a subgroup's state changes where it lives: a
        checkpoint's, see `ebbtide.simulator.schedules.checkpointed`.
        """
        return []
