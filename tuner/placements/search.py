"""The state of a search for the best training plan: the plans tried so far, and their scores.

`Room` computes the memory that a plan takes without a simulation, and reduces the staging buffers and on-device
gradient sums of a plan that does not fit.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, compress
from typing import Any

import numpy as np
from ebbtide.simulator.analysis.bounds import Bound, Bounds, serial
from ebbtide.simulator.analysis.many_plans import Counted, PlanSweep, early_updates_worth, late_s, times_of
from ebbtide.simulator.engines.jit import compiled
from ebbtide.simulator.engines.kernel import Floats, Ints
from ebbtide.simulator.engines.reference import capacities
from ebbtide.simulator.limits import Limits
from ebbtide.simulator.machine import Machine
from ebbtide.simulator.plan import ParameterLocation
from ebbtide.simulator.schedule import Memory
from ebbtide.simulator.schedules.buckets import bucket_of, leavings
from ebbtide.simulator.schedules.footprint import fetched_elements, moved_out, slots_within
from ebbtide.simulator.update.order import FORWARD, UpdateOrder, compact
from ebbtide.simulator.update.recipes import RECIPES
from ebbtide.simulator.update.steps import HOST_SLOTS, Bytes, Placement, Queue
from ebbtide.simulator.update.way import EARLY, EARLY_PLACEMENTS, PARAMETERS_ON_HOST, PLACEMENT_CODES, SUMMED
from ebbtide.simulator.workload import Workload
from ebbtide.tuner.placements.candidate import (
    CAN_SUM,
    STORED,
    Candidate,
    Codes,
    Freedom,
    Row,
    able_early,
    choices,
    evaluated,
    evenly,
    options_of,
    seconds_of,
    turned,
    waiting,
)
from numpy.typing import NDArray

_HOSTED = frozenset(placement for placement, recipe in RECIPES.items() if recipe.queue == Queue.HOST)


class UpdateOrders:
    """A chooser of the order of a training step's updates of subgroups, for one workload on one machine.

    A CPU update can start when the subgroup's gradient is in host memory. The updated parameters are needed when the
    next forward reaches their layer. Gradients arrive from the last layer to the first, but forward needs the first
    layers first. If all gradients have arrived when the gradient norm is known, the order of forward is best. Otherwise
    several orders are compared on a simple model of the CPU, the copies and the next forward:

    - By urgency: the next update is for the subgroup that forward needs soonest, among the subgroups with a gradient
      that has arrived (Schrage's rule for release times and tails).
    - In two parts: the subgroups of the last layers are updated in the order of forward, and all other subgroups in the
      order of arrival. Either part may be first. Several divisions into two parts are tried.
    """

    def __init__(self, workload: Workload, machine: Machine) -> None:
        amounts, room = Bytes.of(workload), capacities(machine, workload.ranks_per_node)
        threads = (*machine.host_adam_by_threads, machine.cpu_cores)
        rate = max(machine.host_adam_rate(n) for n in threads)
        rate = min(rate, room["dram"] / amounts.host_traffic)
        self.update_s = [n / rate for n in workload.subgroups]
        self.copied_s = [n * amounts.gradient / room["d2h"] for n in workload.subgroups]
        self.copy_s = [n * amounts.wire / room["h2d"] for n in workload.subgroups]
        workload = serial(workload)
        self.micro_batches = workload.gradient_accumulation_steps
        self._passes(workload)
        self._gradient_times = np.array(self.complete_s), np.array(self.copied_s)
        self._times = tuple(np.array(times) for times in (self.update_s, self.copy_s, self.behind_s))
        self._known: dict[tuple[int, ...], UpdateOrder] = {}

    def _passes(self, w: Workload) -> None:
        left = [0.0, *accumulate(layer.backward_s for layer in w.layers)]
        self.backward_s, self.forward_s = left[-1], w.forward_s / self.micro_batches
        within = w.layers_of_subgroups()
        first = [layers[0] if layers else 0 for layers in within]
        leave = leavings(w, bucket_of(w))
        behind = {one.layer: layer for layer, some in enumerate(leave) for one in some}
        sent = [min((behind[layer] for layer in layers), default=0) for layers in within]
        self.complete_s = [self.backward_s - left[layer] for layer in sent]
        before = [0.0, *accumulate(layer.forward_s for layer in w.layers)]
        self.behind_s = [self.forward_s - before[layer] for layer in first]

    def of(self, placements: Sequence[Placement]) -> UpdateOrder:
        """Return the order of the subgroups' updates: CPU updates by `best`, GPU updates as forward needs them.

        CPU updates are as forward needs them too if all gradients arrive before the gradient norm is known.
        """
        hosted = tuple(compress(range(len(placements)), map(_HOSTED.__contains__, placements)))
        if hosted not in self._known:
            self._known[hosted] = self._of(hosted)
        return self._known[hosted]

    def _of(self, hosted: Sequence[int]) -> UpdateOrder:
        arrived = self.arrivals(hosted)
        if not arrived or max(arrived.values()) <= 0.0:
            return FORWARD
        return UpdateOrder(host=compact(self.best(arrived)))

    def best(self, arrived: dict[int, float]) -> list[int]:
        """Return the order of CPU updates with the earliest estimated end of the next forward."""
        arrived_s = np.zeros(len(self.update_s))
        arrived_s[[*arrived]] = [*arrived.values()]
        return min(self.candidates(arrived), key=lambda sequence: self.end_s(sequence, arrived_s))

    def end_s(self, sequence: Sequence[int], arrived_s: Floats) -> float:
        """Return the seconds from the gradient norm to the end of the next forward, for an order of CPU updates."""
        return float(_end_s(np.array(sequence, np.int64), arrived_s, *self._times))

    def candidates(self, arrived: dict[int, float]) -> Iterator[list[int]]:
        """Yield the orders of CPU updates that are worth comparing, given the seconds at which each
        subgroup's gradient is in host memory.
        """
        yield self.by_urgency(arrived)
        ascending = sorted(arrived)
        count = len(ascending)
        location = sum(at_s <= 0.0 for at_s in arrived.values())
        for held in sorted({0, location // 2, location, *(count * i // 8 for i in range(1, 8))}):
            cut = count - held
            early, late = ascending[:cut][::-1], ascending[cut:]
            yield [*early, *late]
            yield [*late, *early]

    def arrivals(self, hosted: Sequence[int]) -> dict[int, float]:
        """Return a dict from subgroup to the seconds at which its gradient is in host memory, relative to
        the moment at which the gradient norm is known.
        """
        coming = hosted[::-1]
        pass_s = self.forward_s + self.backward_s
        arrived_s = _arrivals_s(np.array(coming, np.int64), self.micro_batches, pass_s, *self._gradient_times)
        norm_s = self.micro_batches * pass_s - self.forward_s
        return dict(zip(coming, (arrived_s - norm_s).tolist(), strict=True))

    def by_urgency(self, arrived: dict[int, float]) -> list[int]:
        """Return an order of CPU updates. When an update ends, the next one is for the subgroup that the next forward
        needs soonest, among the subgroups with their gradient in host memory at that time.

        If no remaining subgroup has its gradient there yet, the next update waits for the next gradient that arrives.
        """
        coming = sorted(arrived, key=lambda s: arrived[s], reverse=True)  # popped from the end, so the next one is last
        there: list[int] = []
        sequence: list[int] = []
        now_s = 0.0
        while coming or there:
            if not there:
                now_s = max(now_s, arrived[coming[-1]])
            while coming and arrived[coming[-1]] <= now_s:
                heapq.heappush(there, coming.pop())
            sequence.append(heapq.heappop(there))
            now_s += self.update_s[sequence[-1]]
        return sequence


@compiled
def _arrivals_s(coming: Ints, micro_batches: int, pass_s: float, complete_s: Floats, copied_s: Floats) -> Floats:
    arrived_s = np.zeros(coming.size)
    free_s = 0.0
    for micro_step in range(micro_batches):
        begin_s = micro_step * pass_s
        for i in range(coming.size):
            free_s = max(free_s, begin_s + complete_s[coming[i]]) + copied_s[coming[i]]
            arrived_s[i] = free_s
    return arrived_s


@compiled
def _end_s(sequence: Ints, arrived_s: Floats, update_s: Floats, copy_s: Floats, behind_s: Floats) -> float:
    host_s = copied_s = before_s = end_s = 0.0
    for s in sequence:
        # An update begins when the previous update has ended, its gradient is on the host, and the slot that it writes
        # to is free.
        host_s = max(host_s, before_s, arrived_s[s]) + update_s[s]
        before_s = copied_s
        copied_s = max(copied_s, host_s) + copy_s[s]
        end_s = max(end_s, copied_s + behind_s[s])
    return end_s


class Room:
    """The memory limits of a plan search, with the bytes that its plans take.

    Attributes:
        sums: True if the plans may sum the gradients of several micro-batches on the GPU.
    """

    def __init__(self, workload: Workload, machine: Machine, limits: Limits, sweep: PlanSweep, *, sums: bool) -> None:
        self.workload, self.machine, self.limits, self.sums = workload, machine, limits, sums
        self._sweep = sweep
        self._gone: dict[bytes, int] = {}  # bytes, keyed by parameter locations
        self._active_bytes = workload.activation_bytes

    def fitted(self, codes: Codes, slots: int, host_slots: int = HOST_SLOTS) -> tuple[Codes, int]:
        """Reduce a plan's staging buffers and on-device gradient sums to what GPU memory can hold.

        If memory is short, first the staging buffers are reduced, then on-device gradient sums of later subgroups.

        Returns:
            The reduced ``codes`` and ``slots``.
        """
        crossing = codes & ~SUMMED
        taken = self.taken(crossing, slots, host_slots)[0]
        if taken > self.limits.device_bytes:
            slots = self._slots(crossing, slots, host_slots)
            taken = self.taken(crossing, slots, host_slots)[0]
        stay = np.flatnonzero(codes & SUMMED) if self.sums else ()
        if not len(stay):
            return crossing, slots
        held, sizes = self._sweep.held, self._sweep.sizes
        sent = sizes[CAN_SUM[crossing & ~EARLY]].sum()
        many = held.most_sums(sizes[stay].tolist(), self.limits.device_bytes - taken, sent)
        crossing[stay[:many]] += SUMMED
        return crossing, slots

    def _slots(self, codes: Codes, wanted: int, host_slots: int) -> int:
        counted = self._sweep.counted(codes)
        users = min(wanted, counted.staged)
        if not users or self.workload.zero_stage < 3 or self.machine.unified_memory:
            return wanted
        left = self.limits.device_bytes - counted.held(0, host_slots)["device"] - self._device_bytes(codes, counted)
        slots = slots_within(left, users, counted.staging_bytes)
        return slots if slots < users else wanted

    def holds(self, c: Candidate) -> bool:
        """Return True if the memory limits can hold a plan. Nothing is simulated."""
        return self.limits.hold(*self.taken(c.codes, c.staging_slots, c.host_slots))

    def taken(self, codes: Codes, slots: int, host_slots: int) -> tuple[int, int, int]:
        """Return the peak bytes of GPU memory, host memory and storage under a plan, without a simulation."""
        counted = self._sweep.counted(codes)
        held = counted.held(slots, host_slots)
        return held["device"] + self._device_bytes(codes, counted), held["host"], held["storage"]

    def _device_bytes(self, codes: Codes, counted: Counted) -> int:
        key = (codes >= PARAMETERS_ON_HOST).tobytes() if counted.away else b""
        if key not in self._gone:
            w = self.workload
            locations: list[Memory] = ["host" if code >= PARAMETERS_ON_HOST else "device" for code in codes]
            self._gone[key] = moved_out(w, fetched_elements(w, locations)) * w.wire_bytes if counted.away else 0
        return max(0, self.workload.device_base_bytes - self._gone[key]) + self._active_bytes


MOST_REMEMBERED = 4096  # most cached rows of results
# Time of simulating a plan that does not depend on its length, in simulated ops (measured: 0.2 ms with 1,000 ops in an
# iteration, 0.6 ms with 8,500).
OPS_OF_A_PLAN = 3000
LONG, WARM_UP = 12, 5  # iterations of a longer simulation, and how many of them are not measured
_STORED_CODES = [PLACEMENT_CODES[placement] for placement in STORED]


@dataclass(frozen=True)
class Score:
    """The simulated seconds per iteration (``inf`` if the plan does not fit into memory) and the memory
    peaks of a plan that a search has tried.
    """

    iteration_s: float
    device_peak_bytes: int
    host_peak_bytes: int
    storage_bytes: int = 0


class Search:
    """A search for the fastest plan of one workload on one machine. The search is deterministic for a given seed.

    The score of each plan that was tried is kept.

    Attributes:
        effort: Fraction of a full search's evaluations, in (0, 1].
        early: True if early updates are possible. Times are then means over steps, of which the fraction
            `Workload.expected_clip_rate` clips gradients.
        moves_parameters: True if 16-bit parameters may move between GPU and host memory.
        locations: Location of each subgroup's parameters in the plans that the search begins with.
            If empty, all are on the GPU.
    """

    def __init__(
        self,
        workload: Workload,
        machine: Machine,
        limits: Limits,
        seed: int = 0,
        fixed: Mapping[str, Any] | None = None,
        storable: Collection[int] | None = None,
        *,
        effort: float = 1.0,
        bounds: Bounds | None = None,
        like: Search | None = None,
    ) -> None:
        """Prepare a search for the fastest plan of a workload on a machine.

        Args:
            fixed: Values of fields that are equal in all plans and are not searched.
            storable: Subgroups with state that may be on a drive. If None, all may, if a drive is given.
            bounds: Lower bounds by searches with other subgroup sizes. They hold for all sizes, and this search adds
                its own.
            like: Search for the same workload and machine within other limits. The two share their simulated plans.
        """
        self.effort = effort
        self.workload, self.machine, self.limits = workload, machine, limits
        stores = limits.storage_bytes is not None and workload.zero_stage == 3
        self.choices = choices(machine, storage=stores)
        kept = None if storable is None else set(range(len(workload.subgroups))) - {*storable}
        self._kept_in_memory = sorted(kept or ())
        self.seed, self.moves_parameters = seed, False
        self.locations: tuple[ParameterLocation, ...] = ()
        self.early = may_update_early(workload, machine)
        self.spread: Any = None  # `Shares` of the fastest evenly spread plan
        self.spread_plans: dict[Any, Candidate] = {}  # keyed by the description of the plan in `Shares`
        self.fixed = dict(fixed or {})
        if not workload.overlaps_forward:
            self.fixed["overlap_forward"] = False
        self.scores: dict[Candidate, Score] = {}
        self._best: tuple[tuple[float, int], Candidate] | None = None  # the best plan with its rank
        self._ordered: dict[Candidate, Candidate] = {}
        self.sweep: PlanSweep = PlanSweep(workload, machine) if like is None else like.sweep
        self.room = Room(workload, machine, limits, self.sweep, sums=self.sums)
        self._longer = self.sweep.longer(LONG, WARM_UP)
        self._orders: UpdateOrders = UpdateOrders(workload, machine) if like is None else like._orders
        # Rows of the plans that were simulated most recently.
        self._rows: dict[tuple[Any, ...], Row] = {} if like is None else like._rows
        self._late: dict[tuple[Any, ...], float] = {}  # delays by dropped early updates
        self._bounds = Bounds() if bounds is None else bounds
        # Times of the best plan, of the best plan without early updates, and of the best plan with all parameters on
        # the GPU.
        self.best_s = self.plain_s = self.whole_s = math.inf

    @property
    def free(self) -> Freedom:
        """Return the kinds of changes that this plan search may make to a plan."""
        threads = () if "threads" in self.fixed else (0, *sorted(self.machine.host_adam_by_threads))
        return Freedom(self.choices, self.early, self.sums, self.moves_parameters, threads)

    def share_of(self, evaluations: int, least: int = 1) -> int:
        """Return the number of plans to simulate at this search's effort, given the number for a full search."""
        return max(min(least, evaluations), round(self.effort * evaluations))

    @property
    def most_ops(self) -> int:
        """Return the largest number of simulated operations that an iteration can have under any plan of the search."""
        return self.sweep.most_ops

    def affordable(self, ops: int) -> int:
        """Return the number of plans that can be simulated in about the time that ``ops`` simulated ops take."""
        return ops // (self.most_ops + OPS_OF_A_PLAN)

    @property
    def sums(self) -> bool:
        """Return True if the plans of this search may sum the gradients of several micro-batches on the GPU."""
        return self.sweep.held.sums and not self.machine.unified_memory

    @property
    def can_move_parameters(self) -> bool:
        """Return True if 16-bit parameters may be in host memory: under ZeRO-3, with separate GPU and host memory."""
        return self.workload.zero_stage == 3 and not self.machine.unified_memory

    # -- scores ------------------------------------------------------------------------------

    def score(self, candidate: Candidate) -> Score:
        """Return the score of a plan. A plan that was scored before is not simulated again.

        If the plan has early updates and fits, the same plan without early updates is scored too. Its score is stored,
        but not returned.
        """
        candidate = self.ordered(candidate)
        if candidate not in self.scores:
            result = self._simulate(candidate)
            if result.iteration_s < self.best_s:
                result = replace(result, iteration_s=self._settled_s(candidate, result.iteration_s))
            self.scores[candidate] = result
            rank = round(result.iteration_s, 9), result.device_peak_bytes
            if self._best is None or rank < self._best[0]:
                self._best = rank, candidate
            self.best_s = min(self.best_s, result.iteration_s)
            if not candidate.count(PARAMETERS_ON_HOST):
                self.whole_s = min(self.whole_s, result.iteration_s)
            if not candidate.count(EARLY):
                self.plain_s = min(self.plain_s, result.iteration_s)
            elif not math.isinf(result.iteration_s):
                self.score(waiting(candidate))
        return self.scores[candidate]

    def ordered(self, candidate: Candidate) -> Candidate:
        """Return a copy of a candidate plan that is complete: with an update order, and with the fields that this
        search does not vary (`fixed`).

        If GPU memory cannot hold all of the candidate's staging buffers and on-device gradient sums, the copy has fewer
        of them.
        """
        if candidate not in self._ordered:
            completed = self._completed(candidate)
            codes, slots = self.room.fitted(completed.codes, completed.staging_slots, completed.host_slots)
            prefetch = min(completed.prefetch, slots)
            completed = replace(completed, ways=codes.tobytes(), staging_slots=slots, prefetch=prefetch)
            self._ordered[candidate] = self._ordered[completed] = completed
        return self._ordered[candidate]

    def _completed(self, candidate: Candidate) -> Candidate:
        changed = dict(self.fixed)
        if candidate.order is None:
            changed["order"] = self._orders.of(candidate.placements)
        return replace(candidate, **changed) if changed else candidate

    def seconds(
        self,
        codes: Codes,
        slots: int,
        prefetch: int,
        threads: int,
        overlap: bool,
        issue: NDArray[np.int64] | None,
        host_slots: int = HOST_SLOTS,
        most_s: float = math.inf,
    ) -> float:
        """Return the predicted seconds per iteration of a plan, or ``inf`` if the plan does not fit into memory.

        Args:
            threads: Number of CPU threads for updates, or 0 for the default.
            issue: Order in which the subgroups' updates are issued. If None, the order of forward.
            most_s: Seconds from which the exact time does not matter. A step that does not clip is simulated first. If
                it takes longer than ``most_s``, its time is returned, and the slower steps that clip are not simulated.
        """
        codes, slots = self.room.fitted(codes, slots, host_slots)
        if not (self._may_store(codes) and self.limits.hold(*self.room.taken(codes, slots, host_slots))):
            return math.inf
        options = (slots, min(prefetch, slots), threads, overlap, issue, host_slots)
        return self._mean_s(codes, self._row(codes, options), options, most_s)

    def seconds_anyhow(self, candidate: Candidate) -> float:
        """Return the predicted seconds per iteration of a plan, even if the plan does not fit into memory."""
        c = self._completed(candidate)
        c = c if self.sums else replace(c, ways=(c.codes & ~SUMMED).tobytes())
        return self._settled_s(c, self._mean_s(c.codes, evaluated(self.sweep, c), options_of(c)))

    def _mean_s(self, codes: Codes, row: Row, options: tuple[Any, ...], most_s: float = math.inf) -> float:
        # A step that clips must undo and redo the plan's early updates.
        from ebbtide.simulator.engines import summary

        right_s, counted = float(row[summary.ITERATION_S]), self.sweep.counted(codes)
        if right_s > most_s or not counted.early:
            return right_s
        _, prefetch, threads, *_ = options
        waits = self._row(codes & ~EARLY, options)
        key = tuple(counted.largest_early.items()), threads, prefetch
        if key not in self._late:
            largest = {placement: [elements] for placement, elements in counted.largest_early.items()}
            self._late[key] = late_s(self.workload, self.machine, largest, threads, prefetch)
        times = times_of(
            (right_s, float(row[summary.BACKWARD_S])),
            (float(waits[summary.ITERATION_S]), float(waits[summary.BACKWARD_S])),
            self._late[key],
        )
        return times.mean_s(self.workload.expected_clip_rate)

    def _row(self, codes: Codes, options: tuple[Any, ...]) -> Row:
        *numbers, issue, host_slots = options
        key = (codes.tobytes(), *numbers, b"" if issue is None else issue.tobytes(), host_slots)
        if key not in self._rows:
            if len(self._rows) == MOST_REMEMBERED:
                self._rows.pop(next(iter(self._rows)))
            self._rows[key] = self.sweep.evaluate(codes, *options)
        return self._rows[key]

    def peaks(self, candidate: Candidate) -> Score:
        """Return the simulated time and memory peaks of a plan, without adding them to the scores of this search."""
        return self._simulate(self.ordered(candidate))

    def _settled_s(self, c: Candidate, seconds: float) -> float:
        later = seconds_of(self._longer, c)
        return later if later > seconds * (1 + 1e-6) else seconds

    def _simulate(self, c: Candidate) -> Score:
        from ebbtide.simulator.engines import summary

        taken = self.room.taken(c.codes, c.staging_slots, c.host_slots)
        if not (self.limits.hold(*taken) and self._may_store(c.codes)):
            return Score(math.inf, *taken)
        row = self._row(c.codes, options_of(c))
        peaks = [int(row[column]) for column in (summary.DEVICE_PEAK, summary.HOST_PEAK, summary.STORED)]
        return Score(self._mean_s(c.codes, row, options_of(c)), *peaks)

    def _may_store(self, codes: Codes) -> bool:
        kept = self._kept_in_memory
        return not (kept and np.isin(codes[kept] % SUMMED, _STORED_CODES).any())

    def holds(self, c: Candidate) -> bool:
        """Return True if the memory limits of this search can hold a plan. Nothing is simulated."""
        return self.room.holds(c)

    @property
    def fits(self) -> bool:
        """Return True if at least one plan that this search has scored fits into memory."""
        return not math.isinf(self.best_s)

    def best(self) -> Candidate:
        """Return the fastest plan that this search has scored."""
        if self._best is None:
            raise ValueError("no plan was scored yet")
        return self._best[1]

    # -- with early updates -------------------------------------------------------------------

    def try_(self, c: Candidate) -> float:
        """Simulate a plan, and also a copy with early updates if allowed. Return the seconds per iteration
        of the faster one.
        """
        seconds = self.score(c).iteration_s
        if self.early and not math.isinf(seconds):
            seconds = min(seconds, self.score(self.with_early(c)).iteration_s)
        return seconds

    def with_early(self, c: Candidate, placements: Sequence[Placement] = EARLY_PLACEMENTS) -> Candidate:
        """Return a copy of a plan with as many early updates as memory and time allow.

        The last subgroups are updated early, since backward computes their gradients first.
        """
        c = waiting(self.ordered(c))
        for placement in placements:
            able = able_early(c, placement)
            sizes = self.sweep.sizes[able[::-1]].astype(int).tolist()
            left = self.limits.host_bytes - self.room.taken(c.codes, c.staging_slots, c.host_slots)[1]
            many = early_updates_worth(self.workload, self.machine, self.sweep.held, sizes, left, placement)
            made = self.ordered(turned(c, able[len(able) - many :].tolist(), EARLY))
            if many and self.holds(made):  # the buffers for their new parameters fit too
                c = made
        return c

    def evenly(
        self, numbers: Mapping[Placement, int], slots: int = 1, fixed: Mapping[int, Placement] | None = None
    ) -> Candidate:
        """Build a plan with a given number of subgroups per placement, spread evenly over the model."""
        return evenly(numbers, slots, fixed, self.locations)

    # -- bounds ------------------------------------------------------------------------------

    @property
    def bound(self) -> Bound:
        """Return a lower bound of the iteration time under any plan within the memory limits of this search."""
        return self.bound_with(None)

    def bound_with(self, locations: tuple[ParameterLocation, ...] | None) -> Bound:
        """Return a lower bound with as many parameters in host memory as ``locations`` has. None: any number."""
        away = None if locations is None else self.away(locations)
        return self._bounds.of(self.workload, self.machine, self.limits, away)

    def floor_s(self) -> float:
        """Return a lower bound in seconds of the iteration time, for any locations of the 16-bit parameters."""
        return self._bounds.seconds(self.workload, self.machine, self.limits, None)

    def may_take_less(self, locations: tuple[ParameterLocation, ...], seconds: float) -> bool:
        """Return True unless by the lower bound every plan with these locations takes ``seconds`` or more."""
        away = self.away(locations)
        return self._bounds.may_take_less(self.workload, self.machine, self.limits, away, seconds)

    def away(self, locations: tuple[ParameterLocation, ...]) -> int:
        """Return the number of elements with their 16-bit parameters in host memory."""
        pairs = zip(self.workload.subgroups, locations, strict=False)
        return sum(size for size, location in pairs if location == "host")


def may_update_early(workload: Workload, machine: Machine) -> bool:
    """Return True if early updates can save time. Under ZeRO-1, gradients are reduced after the whole backward."""
    return workload.zero_stage > 1 and not machine.unified_memory and workload.expected_clip_rate < 1
