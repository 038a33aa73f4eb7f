"""Fast prediction of the iteration time and memory of many plans for one workload on one machine.

The search for the best plan uses `PlanSweep`, which gives the result of ``simulate_fast(build_schedule(workload, plan),
machine)`` without creating a Python object for each op: the schedule is built and simulated as arrays. The functions
give the mean iteration time of plans with early updates, which are dropped and redone in a step that clips gradients.
"""

import copy
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
from ebbtide.simulator.engines import kernel, summary
from ebbtide.simulator.engines.compiled import SimResult, capacity_vector, machine_vector, result, run
from ebbtide.simulator.engines.kernel import Floats, Ints
from ebbtide.simulator.engines.schedule_arrays import HOST_UPDATES, RATES, SLOTS, Program, RecipeArrays, build, totals
from ebbtide.simulator.machine import Machine
from ebbtide.simulator.plan import Plan, PlanError
from ebbtide.simulator.schedule import KINDS, Held, Kind, Memory, OpKind, freed_of, taken_for
from ebbtide.simulator.schedules.ebbtide import record
from ebbtide.simulator.schedules.footprint import fetched_elements, footprint_by_kind, moved_out
from ebbtide.simulator.update.holding import Amounts, ByKind, Footprint, Holding
from ebbtide.simulator.update.order import arrival_order
from ebbtide.simulator.update.pausing import StepTimes
from ebbtide.simulator.update.recipes import early_limits, recipe_of
from ebbtide.simulator.update.steps import HOST_SLOTS, Bytes, Placement, Slot, unfused
from ebbtide.simulator.update.tiers import TIERS
from ebbtide.simulator.update.way import EARLY_PLACEMENTS, PARAMETERS_ON_HOST, plain_ways
from ebbtide.simulator.workload import STEPS, Workload
from numpy.typing import NDArray


def peaks_by_kind(held: Held, ops: Floats, simulated: SimResult) -> ByKind:
    """Return the bytes in each memory at the moment of its peak, by kind of contents. Kinds without bytes are left out.

    ``ops`` has one row for each op, as in `CompiledSchedule`.
    """
    peaks: ByKind = {m: {k: held.get(m, {}).get(k, 0) for k in KINDS} for m in TIERS}
    columns = {"device": (kernel.DEVICE_ALLOC, kernel.DEVICE_FREE), "host": (kernel.HOST_ALLOC, kernel.HOST_FREE)}
    for memory, (alloc, free) in columns.items():
        for kind, size in zip(KINDS, _at_peak(ops, simulated, alloc, free), strict=True):
            peaks[memory][kind] += size
    return {m: {kind: n for kind, n in kinds.items() if n} for m, kinds in peaks.items()}


def _at_peak(ops: Floats, simulated: SimResult, alloc: int, free: int) -> list[int]:
    starts, ends = (np.flatnonzero(ops[:, column]) for column in (alloc, free))
    lasts = simulated.end_s[ends] > simulated.start_s[ends]
    order = np.lexsort(
        (
            np.concatenate([2 * starts + 1, np.where(lasts, -1, 2 * ends + 2)]),
            np.concatenate([simulated.start_s[starts], simulated.end_s[ends]]),
        )
    )
    sizes = np.concatenate([ops[starts, alloc], -ops[ends, free]])[order]
    kinds = np.concatenate([_kinds(ops[starts], taken_for), _kinds(ops[ends], freed_of)])[order]
    total = np.cumsum(sizes)
    if not total.size or total.max() <= 0:
        return [0] * len(KINDS)
    until = int(total.argmax()) + 1
    return [int(sizes[:until][kinds[:until] == number].sum()) for number in range(len(KINDS))]


def _kinds(ops: Floats, kind_of: Callable[[OpKind], Kind]) -> kernel.Ints:
    table = [KINDS.index(kind_of(kind)) for kind in kernel.KINDS]
    return np.array([table[number] for number in ops[:, kernel.KIND].astype(int)], dtype=np.int64)


MOST_PROGRAMS = 64  # largest number of recordings that are kept, one for each set of parameter locations
MOST_COUNTED = 1024  # largest number of placements with kept counts


def _issued(workload: Workload) -> tuple[float | None, ...]:
    return tuple(getattr(workload, name) for name in ("pipeline_idle_s", "step_gather_s", "module_issue_s", *STEPS))


class _Scratch(threading.local):
    def __init__(self) -> None:
        self._allocate(0, 0)

    def _allocate(self, ops: int, waits: int) -> None:
        self.ops = np.zeros((ops, kernel.OP_COLUMNS))
        self.after_first = np.zeros(ops + 1, dtype=np.int64)
        self.after = np.zeros(waits, dtype=np.int64)
        self.start_s, self.end_s = np.zeros(ops), np.zeros(ops)

    def of(self, ops: int, waits: int) -> "_Scratch":
        if ops > len(self.ops) or waits > len(self.after):
            self._allocate(max(ops, len(self.ops)), max(waits, len(self.after)))
        return self


_SCRATCH = _Scratch()


class Counted:
    """A plan's subgroups, counted by their placements and parameter locations, and the buffers and bytes that follow.

    Plans with equal counts share one object, because most plans of a search differ in the order of their subgroups
    only.

    Attributes:
        both: The counts of subgroups that wait for the gradient norm, and of early updates, as `Holding.slots` takes
            them.
        summed: Number of elements with gradients that are accumulated in GPU memory instead of host memory.
        away: True if 16-bit parameters of a subgroup are in host memory.
        early: True if an update is early.
    """

    def __init__(self, holding: Holding, both: tuple[Amounts, Amounts], summed: float) -> None:
        self._holding, self.both, self.summed, self._ways = holding, both, summed, plain_ways()
        self.early = any(both[1][0])
        self.away = any(
            counts[i] for counts, *_ in both for i, way in enumerate(self._ways) if way.parameters == "host"
        )
        self._held: dict[tuple[int, int], Footprint] = {}
        self._buffers: dict[tuple[int, int, int], list[int]] = {}

    def held(self, staging_slots: int, host_slots: int) -> Footprint:
        """Return the bytes that subgroups and buffers need, as a dict by memory (`Holding.bytes`)."""
        key = staging_slots, host_slots
        if key not in self._held:
            waiting, early = self.both
            self._held[key] = self._holding.bytes(waiting, staging_slots, host_slots, early, self.summed)
        return self._held[key]

    def buffers(self, staging_slots: int, prefetch: int, host_slots: int) -> list[int]:
        """Return the number of buffers of each kind, then how many may be taken in backward, and from the last step on.

        The kinds are in the order of `SLOTS`.
        """
        key = staging_slots, prefetch, host_slots
        if key not in self._buffers:
            slots = self._holding.slots(self.both, staging_slots, host_slots)
            limits = early_limits(prefetch, slots)
            sooner = [limits.get(slot, 0) if slot.ahead is when else 0 for when in (False, True) for slot in SLOTS]
            self._buffers[key] = [*(slots[slot] for slot in SLOTS), *sooner]
        return self._buffers[key]

    @cached_property
    def staged(self) -> int:
        """Return the number of subgroups that use staging buffers."""
        return self._holding.slots(self.both, int(sum(sum(counts) for counts, *_ in self.both)))[Slot.STAGING]

    @cached_property
    def staging_bytes(self) -> int:
        """Return the bytes of one staging buffer."""
        return self._holding.each_bytes(Slot.STAGING, self.both)

    @cached_property
    def stored(self) -> bool:
        """Return True if a subgroup uses a buffer in host memory for state on a drive."""
        pairs = zip(self.both, self._holding.users[Slot.STATE], strict=True)
        return any(counts[user] for (counts, *_), users in pairs for user in users)

    @cached_property
    def largest_early(self) -> dict[Placement, float]:
        """Return the elements of the largest subgroup with an early update, by placement."""
        by_way = self.both[1][2]
        return {
            p: max(n for n, way in zip(by_way, self._ways, strict=True) if way.placement == p) for p in EARLY_PLACEMENTS
        }


class PlanSweep:
    """A fast predictor of the iteration time and memory of many plans, for one workload on one machine.

    Each thread needs its own predictor. If ``fused`` is False, DeepSpeed's CPU passes replace ebbtide's kernel.

    Raises:
        ValueError: The machine lacks a rate that the workload needs.
    """

    def __init__(self, workload: Workload, machine: Machine, iterations: int = 3, *, fused: bool = True) -> None:
        self.workload, self.iterations, self.fused = workload, iterations, fused
        self.warm_up = summary.WARM_UP
        self.sizes = np.array(workload.subgroups, dtype=np.float64)
        self.recipes = RecipeArrays.of(workload, fused=fused)
        self._way_count = len(plain_ways())
        self._run_on(machine)
        self.held = Holding.of_workload(workload)
        self._counted: dict[bytes, Counted] = {}  # by the placements
        self._by_counts: dict[tuple[bytes, float], Counted] = {}
        self._forward_order = np.arange(len(self.sizes))
        self._arrival = np.array(arrival_order(workload.layers_of_subgroups()), dtype=np.int64)
        self._programs: dict[tuple[bytes, bool], tuple[Program, int]] = {}
        self._timed = workload
        self._count_ops()

    def _run_on(self, machine: Machine) -> None:
        self.machine = machine
        self.capacity = capacity_vector(machine, self.workload.ranks_per_node)
        self.machine_facts = machine_vector(machine)
        # NaN for rates that are None.
        self.rates = np.array([machine.known_rate(name) for name in RATES], dtype=np.float64)
        self._by_threads: dict[int, Floats] = {}

    def longer(self, iterations: int, warm_up: int) -> "PlanSweep":
        """Return a predictor for another number of iterations. The first ``warm_up`` do not count in the mean."""
        other = copy.copy(self)
        other.iterations, other.warm_up = iterations, warm_up
        other._count_ops()
        return other

    def on(self, machine: Machine, workload: Workload | None = None) -> "PlanSweep":
        """Return a predictor for a machine with other values of the same rates, with the recorded iterations.

        ``workload`` is the same workload with layer times as estimated for that machine. None: the times stay.
        """
        if workload is not None and _issued(workload) != _issued(self.workload):
            made = PlanSweep(workload, machine, fused=self.fused)
            return made.longer(self.iterations, self.warm_up)
        other = copy.copy(self)
        other._run_on(machine)
        other._timed = workload if workload is not None else self._timed
        return other

    def of_plan(self, plan: Plan) -> "PlanSweep":
        """Return a predictor for the same job with a plan's subgroups: this one, if they are its own."""
        work = self.workload.cut_as(plan)
        return self if work is self.workload else PlanSweep(work, self.machine)

    def _count_ops(self) -> None:
        layers, subgroups = len(self.workload.layers), len(self.sizes)
        micro = self.workload.gradient_accumulation_steps
        longest = max(len(way.recipe.steps) for way in plain_ways())
        gradients = max(len(way.recipe.gradient_steps) for way in plain_ways())
        parts = sum(map(len, self.workload.shares()))  # number of parts of gradients
        passes = micro * (10 * layers + gradients * parts)
        self.most_ops = passes + longest * subgroups + 5
        count = self.most_ops * self.iterations + subgroups  # with the ops that begin early for one more iteration
        # Number of waits: the end of a step and its gathers wait for two ops of each subgroup. A layer's share of each
        # subgroup is waited for once, and so is a gradient's copy to the host by a forward or backward.
        self._room = count, 5 * count + self.iterations * (2 * layers + 7 * subgroups)

    def evaluate(
        self,
        placement: NDArray[np.int8],
        staging_slots: int = 2,
        prefetch: int = 0,
        threads: int = 0,
        overlap_forward: bool = True,
        issue: Ints | None = None,
        host_slots: int = HOST_SLOTS,
    ) -> Floats:
        """Return predicted times and memory peaks of one plan, with the columns of `engines.summary`."""
        return self._simulated(placement, staging_slots, prefetch, threads, overlap_forward, issue, host_slots)[0]

    def _simulated(
        self,
        placement: NDArray[np.int8],
        staging_slots: int,
        prefetch: int,
        threads: int,
        overlap_forward: bool,
        issue: Ints | None,
        host_slots: int,
    ) -> tuple[Floats, "_Scratch", int]:
        counted = self.counted(placement)
        self._check(placement, counted, staging_slots, prefetch, host_slots)
        if overlap_forward and not self.workload.overlaps_forward:
            raise PlanError(
                f"overlap_forward must be false for ZeRO-{self.workload.zero_stage} with several ranks, whose steps "
                "wait for their updates, but got true"
            )
        program, moved_out_bytes = self._program(placement, counted, overlap_forward)
        scratch = _SCRATCH.of(*self._room)
        buffers = counted.buffers(staging_slots, prefetch, host_slots)
        plan = np.array([self.iterations, *buffers], dtype=np.int64)
        count = build(
            program,
            self.recipes.with_threads(threads),
            self.recipes.ways,
            self.sizes,
            placement,
            self._forward_order if issue is None else issue,
            self._arrival,
            plan,
            scratch.ops,
            scratch.after_first,
            scratch.after,
        )
        row = run(
            scratch.ops[:count],
            (scratch.after_first[: count + 1], scratch.after),
            (self._rates_with(threads), self.capacity, self.machine_facts),
            (scratch.start_s[:count], scratch.end_s[:count]),
            self.iterations,
            self.warm_up,
        )
        # This memory is added to the peak of the activations.
        held = counted.held(staging_slots, host_slots)
        base = max(0, self.workload.device_base_bytes - moved_out_bytes)
        row[summary.DEVICE_PEAK] += base + held["device"]
        row[summary.HOST_PEAK] += held["host"]
        row[summary.STORED] = held["storage"]
        return row, scratch, count

    def counted(self, placement: NDArray[np.int8]) -> Counted:
        """Count a plan's subgroups, and their elements, for each combination of placement and parameter location.

        Args:
            placement: For each subgroup, the number (`Way.code`) of its placement, parameter location and flags.
        """
        key = placement.tobytes()
        if key not in self._counted:
            if len(self._counted) == MOST_COUNTED:
                self._counted.pop(next(iter(self._counted)))
            both, summed = totals(placement, self.sizes, self._way_count)
            counts = both.tobytes(), float(summed) if self.held.sums else 0.0
            if counts not in self._by_counts:
                if len(self._by_counts) == MOST_COUNTED:
                    self._by_counts.pop(next(iter(self._by_counts)))
                waiting, early = (tuple(map(tuple, amounts)) for amounts in both.tolist())
                self._by_counts[counts] = Counted(self.held, (waiting, early), counts[1])
            self._counted[key] = self._by_counts[counts]
        return self._counted[key]

    def evaluate_plan(self, plan: Plan) -> Floats:
        """Return the predicted times and memory peaks of a plan, as an array with the columns of `engines.summary`."""
        row = self.evaluate(*_arguments(plan))
        row[summary.HOST_PEAK] += plan.checkpoint.automatic_bytes
        return row

    def result(self, plan: Plan) -> SimResult:
        """Return the predicted times and memory peaks of a plan as an object, without the times of single ops."""
        none = np.zeros(0)
        return result(self.evaluate_plan(plan), none, none)

    def memory(self, plan: Plan) -> ByKind:
        """Return a plan's bytes in each memory when its use is at its peak, by kind of contents."""
        row, scratch, count = self._simulated(*_arguments(plan))
        times = result(row, scratch.start_s[:count], scratch.end_s[:count])
        return peaks_by_kind(footprint_by_kind(self.workload, plan), scratch.ops[:count], times)

    def _program(self, placement: NDArray[np.int8], counted: Counted, overlaps: bool) -> tuple[Program, int]:
        key = (placement >= PARAMETERS_ON_HOST).tobytes() if counted.away else b"", overlaps
        if key not in self._programs:
            locations: list[Memory] = ["host" if code >= PARAMETERS_ON_HOST else "device" for code in placement]
            gone_bytes = moved_out(self.workload, fetched_elements(self.workload, locations))
            gone_bytes *= self.workload.wire_bytes
            tape = record(self.workload, locations, overlaps=overlaps)
            if len(self._programs) == MOST_PROGRAMS:
                self._programs.pop(next(iter(self._programs)))
            program = Program.of(tape)
            for rate in np.unique(program.rows[:, kernel.RATE]).astype(int):
                self.machine.rate(RATES[rate])  # raises an error that names the missing rate
            self._programs[key] = program, gone_bytes
        program, gone_bytes = self._programs[key]
        if self._timed is not self.workload:
            program = program.paced(self._timed.fetched if counted.away else self._timed.planned)
        return program, gone_bytes

    def _check(
        self, placement: NDArray[np.int8], counted: Counted, staging_slots: int, prefetch: int, host_slots: int
    ) -> None:
        if placement.shape != self.sizes.shape:
            raise PlanError(
                "a placement is needed for each subgroup of the workload, but got "
                f"{placement.size} for {self.sizes.size} subgroups"
            )
        if host_slots < 1 and counted.stored:
            raise PlanError(
                f"host_slots must be >= 1 if a subgroup's optimizer state is on a drive, but got {host_slots}"
            )
        if not 0 <= prefetch <= staging_slots or (staging_slots < 1 and counted.staged):
            raise PlanError(
                "0 <= prefetch <= staging_slots must hold, with at least one slot for staged "
                f"subgroups, but got prefetch={prefetch}, staging_slots={staging_slots}"
            )

    def _rates_with(self, threads: int) -> Floats:
        if not 0 < threads < self.machine.cpu_cores:
            return self.rates
        if threads not in self._by_threads:
            slower = self._by_threads[threads] = self.rates.copy()
            slower[HOST_UPDATES] = [self.machine.op_rate(RATES[i], threads) for i in HOST_UPDATES]
        return self._by_threads[threads]


def _arguments(plan: Plan) -> tuple[Any, ...]:
    return (
        np.array([way.code for way in plan.ways], np.int8),
        plan.staging_slots,
        plan.prefetch,
        plan.threads,
        plan.overlap_forward,
        np.array(plan.issue_order, dtype=np.int64),
        plan.host_slots,
    )


def expected(
    workload: Workload, machine: Machine, plan: Plan, simulate: Callable[[Plan], SimResult], *, fused: bool = True
) -> SimResult:
    """Return a plan's simulation, with an iteration time that is a mean over steps that clip and other steps.

    Training pauses early updates that lose time, so the mean is at most slightly longer than the time without them
    (`StepTimes.mean_s`). Without early updates, the result is the unchanged simulation.

    Args:
        fused: False if ``simulate`` runs DeepSpeed's separate CPU passes instead of ebbtide's fused kernel.
    """
    right = simulate(plan)
    times = step_times(workload, machine, plan, simulate, right, fused=fused)
    if times is None:
        return right
    return replace(right, iteration_s=times.mean_s(workload.expected_clip_rate))


def step_times(
    workload: Workload,
    machine: Machine,
    plan: Plan,
    simulate: Callable[[Plan], SimResult],
    right: SimResult | None = None,
    *,
    fused: bool = True,
) -> StepTimes | None:
    """Return the iteration time of a plan in three cases: early updates are kept, there are none, or they are redone.

    The result is None if the plan has no early updates.

    Args:
        right: Simulation of the first case. None: it is simulated here.
        fused: False if DeepSpeed's separate CPU passes are simulated instead of ebbtide's fused kernel.
    """
    if not any(plan.updated_early):
        return None
    right = right or simulate(plan)
    plain = simulate(plan.with_bits(early=False))
    sizes: dict[Placement, list[int]] = {placement: [] for placement in EARLY_PLACEMENTS}
    for size, way in zip(workload.subgroups, plan.ways, strict=True):
        if way.early:
            sizes[way.placement].append(size)
    late = late_s(workload, machine, sizes, plan.threads, plan.prefetch, fused=fused)
    return times_of((right.iteration_s, right.backward_s), (plain.iteration_s, plain.backward_s), late)


def times_of(right: tuple[float, float], plain: tuple[float, float], late_s: float) -> StepTimes:
    """Return the iteration time if early updates are kept, if there are none, and if they are redone."""
    return StepTimes(right[0], plain[0], plain[0] + max(0.0, right[1] - plain[1]) + late_s)


def early_updates_worth(
    workload: Workload, machine: Machine, held: Holding, sizes: Iterable[int], left_bytes: float, placement: Placement
) -> int:
    """Return how many subgroups to update early: as many as save time and fit into memory.

    They save time only if all fit into the last micro-batch's backward. ``sizes`` begin with the last subgroup.
    """
    each = held.early_bytes
    left_s = workload.planned.backward_s / workload.gradient_accumulation_steps
    taken = list(accumulate(sizes))
    longest = early_update_s(workload, machine, 1, placement=placement)
    return sum(n * each <= left_bytes and n * longest <= left_s for n in taken)


def late_s(
    workload: Workload,
    machine: Machine,
    sizes: Mapping[Placement, Sequence[float]],
    threads: int = 0,
    prefetch: int = 0,
    *,
    fused: bool = True,
) -> float:
    """Return an upper limit of the delay, in seconds, that dropped early updates cause to the other updates of a step.

    An early update that is running when the norm becomes known is completed first. Those on the GPU also delay the
    state of up to ``prefetch`` other subgroups, which is copied to the GPU before the norm too.

    Args:
        sizes: For each placement, the elements of the subgroups with early updates.
        threads: Number of threads of an update on the CPU. 0: all cores.
        fused: False if updates on the CPU are DeepSpeed's separate passes.
    """
    late = {
        placement: early_update_s(workload, machine, max(some, default=0), threads, placement, fused=fused)
        for placement, some in sizes.items()
    }
    late["device"] *= 1 + prefetch
    return max(late.values())


def early_update_s(
    workload: Workload,
    machine: Machine,
    elements: float,
    threads: int = 0,
    placement: Placement = "host",
    *,
    fused: bool = True,
) -> float:
    """Return the seconds of the longest op of one subgroup's early update, if the op has the machine for itself."""
    recipe, amounts = recipe_of(placement, "device", updated_early=True), Bytes.of(workload)
    early = [step if fused else unfused(step) for step in recipe.steps[: recipe.before_norm]]
    return elements * max(s.work(amounts) / machine.op_rate(s.rate, threads) for s in early)
