"""The builder of schedules for training under a plan: the ops of each training iteration, for a workload."""

from collections import deque

from ebbtide.simulator.plan import Plan, PlanError
from ebbtide.simulator.rules import checked
from ebbtide.simulator.schedule import OpKind, Schedule
from ebbtide.simulator.schedules.footprint import footprint_by_kind
from ebbtide.simulator.schedules.loop import ALL_CORES
from ebbtide.simulator.schedules.planned_loop import Part, PlannedLoop
from ebbtide.simulator.update.holding import GRADIENTS_UNDER_WAY_BYTES
from ebbtide.simulator.update.issue import Issue
from ebbtide.simulator.update.order import arrival_order
from ebbtide.simulator.update.recipes import slot_limits
from ebbtide.simulator.update.steps import Bytes, Step, Wait
from ebbtide.simulator.workload import Workload


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

    def gradient_reduced(self, part: Part, micro_step: int, after: int) -> None:
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
