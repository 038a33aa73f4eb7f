"""The state of a search for the best training plan: the plans tried so far, their scores, and the simple
plans that are tried first.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, combinations_with_replacement, product
from typing import Any, Self

import numpy as np
from ebbtide.simulator.analysis.bound import Bound, lower_bound
from ebbtide.simulator.analysis.expected import early_updates_worth, late_s, times_of
from ebbtide.simulator.analysis.many_plans import PlanSweep
from ebbtide.simulator.limits import Limits
from ebbtide.simulator.machine import Machine
from ebbtide.simulator.plan import ParameterLocation, Placement, Plan
from ebbtide.simulator.update.footprint import fetched_elements, moved_out, slots_within
from ebbtide.simulator.update.order import FORWARD, UpdateOrder, issue_order
from ebbtide.simulator.update.recipes import HOST_SLOTS, PARAMETER_SLOTS, RECIPES, Slot
from ebbtide.simulator.update.tiers import Memory
from ebbtide.simulator.update.way import (
    EARLY,
    EARLY_PLACEMENTS,
    LOCATION_CODES,
    PARAMETERS_ON_HOST,
    PLACEMENT_CODES,
    SUMMED,
    of_codes,
)
from ebbtide.simulator.workload import Workload
from ebbtide.tuner.placements.fit import Fit, roomiest
from ebbtide.tuner.placements.moves import (
    ALLOWED,
    CAN_BE_EARLY,
    CAN_SUM,
    HOST,
    PLACEMENTS,
    STAGED,
    STORED,
    Codes,
    Freedom,
    choices,
    placements_of,
)
from ebbtide.tuner.placements.update_orders import UpdateOrders
from numpy.typing import NDArray

MOST_OUTLIERS = 4  # of the large subgroups; they are tried here and there
MOST_POINTS = 28  # of a grid of numbers
ROUNDED = (-2, -1, 0, 1, 2)  # subgroups around a division of fractions
FEWEST_WITH_LITTLE_EFFORT = 10  # points of a grid
SPILLED_POINTS = 91  # numbers of what is not on storage
FEW_HOST_SLOTS, FEW_SLOTS = (1, 2, 3), 2
MOST_REMEMBERED = 512  # rows of plans
SETTLED = (6, 12)  # iterations: the period is taken from the later ones
Row = NDArray[np.float64]  # of the simulator's results for a plan
Bounds = dict[tuple[Limits, int | None], Bound]  # by elements with parameters on the host
_WITHOUT_EARLY = bytes(code & ~EARLY for code in range(2**8))
_STORED_CODES = [PLACEMENT_CODES[placement] for placement in STORED]


@dataclass(frozen=True)
class Candidate:
    """A plan in the form that a plan search scores: only the fields of a plan file that the search varies.

    Attributes:
        ways: Code of each subgroup's placement, parameter location and flags (`Way.code`), one byte each. One flag
            requests that the subgroup's gradient sum stays on the GPU. If GPU memory cannot hold the gradient sums of
            all subgroups with this flag, only the subgroups with the lowest numbers keep the flag.
        staging_slots: Number of staging buffers (GPU memory for one staged subgroup each). Fewer are used if memory
            cannot hold them together with the activations.
        prefetch: Number of subgroups that are copied to the GPU ahead of time.
        threads: Number of CPU threads for updates, or 0 for the default.
        overlap_forward: True if updates may overlap the next forward.
        order: Order of the subgroups' updates. If None, the order that `UpdateOrders` proposes.
        host_slots: Number of buffers in host memory for subgroups that are stored on a drive.
    """

    ways: bytes
    staging_slots: int = 2
    prefetch: int = 0
    threads: int = 0
    overlap_forward: bool = True
    order: UpdateOrder | None = None
    host_slots: int = HOST_SLOTS

    @classmethod
    def of(
        cls,
        placements: Sequence[Placement],
        staging_slots: int = 2,
        prefetch: int = 0,
        locations: Sequence[ParameterLocation] = (),
        **fields: Any,
    ) -> Self:
        """Build a plan, in the form that a plan search scores, from the placement of each subgroup.

        The plan has no early updates (before the gradient norm is known), and on-device gradient
        accumulation wherever possible.
        """
        located = locations or ["device"] * len(placements)
        codes = [PLACEMENT_CODES[p] + LOCATION_CODES[h] + SUMMED for p, h in zip(placements, located, strict=True)]
        return cls(bytes(ALLOWED[code] for code in codes), staging_slots, prefetch, **fields)

    @classmethod
    def of_plan(cls, plan: Plan) -> Self:
        return cls(
            bytes(way.code for way in plan.ways),
            max(1, plan.staging_slots),
            plan.prefetch,
            plan.threads,
            plan.overlap_forward,
            plan.order,
            plan.host_slots,
        )

    def plan(self, workload: Workload, **fields: Any) -> Plan:
        """Convert this plan of a plan search into a `Plan`, the contents of a plan file. ``fields`` are
        further fields of the file.
        """
        staged = not STAGED.isdisjoint(self.placements)
        made = {
            "workload_fingerprint": workload.fingerprint,
            "trained_as": workload.trained_as,
            "subgroup_size": workload.subgroup_size or max(workload.subgroups),
            "deepspeed_subgroup_size": workload.deepspeed_subgroup_size,
            "subgroups": workload.subgroups,
            "ways": of_codes(self.ways),
            "order": self.order or FORWARD,
            "staging_slots": self.staging_slots if staged else 0,
            "prefetch": self.prefetch if staged else 0,
            "threads": self.threads,
            "overlap_forward": self.overlap_forward,
            "host_slots": self.host_slots,
        }
        return Plan.model_validate({**made, **fields})

    def with_codes(self, codes: Codes) -> Self:
        """Return a copy of this plan with another code for each subgroup.

        A code is a number that holds the placement, the parameter location and the flags of a subgroup
        of optimizer state.
        """
        return replace(self, ways=codes.tobytes())

    def with_placements(self, placements: Sequence[Placement]) -> Self:
        """Return a copy of this plan with other placements, one per subgroup.

        If a subgroup's new placement does not allow an early update or on-device gradient accumulation, the subgroup
        loses that option. An early update starts before the gradient norm is known.
        """
        pairs = zip(self.ways, placements, strict=True)
        codes = (code - code % SUMMED + PLACEMENT_CODES[placement] for code, placement in pairs)
        return replace(self, ways=bytes(ALLOWED[code] for code in codes))

    def count(self, bit: int) -> int:
        """Return the number of subgroups in this plan that have a given flag, such as early update."""
        return sum(bool(code & bit) for code in self.ways)

    @cached_property
    def codes(self) -> Codes:
        return np.array([*self.ways], dtype=np.int8)

    @cached_property
    def placements(self) -> tuple[Placement, ...]:
        return placements_of(self.ways)

    @cached_property
    def issue(self) -> NDArray[np.int64] | None:
        if self.order is None or self.order == FORWARD:
            return None
        return np.array(issue_order(self.placements, self.order), dtype=np.int64)


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
    """A search for the fastest plan of one workload on one machine. The search is deterministic for a given
    seed.

    The score (simulated time and memory) of each plan that was tried is kept.

    Attributes:
        effort: Fraction of a full search's evaluations, in (0, 1].
        early: True if updates may start before the gradient norm is known. Times are then means over
            steps, of which the fraction `Workload.expected_clip_rate` clips gradients.
        moves_parameters: True if 16-bit parameters may move between GPU and host memory.
        locations: Location of each subgroup's parameters in the plans that the search begins with.
            If empty, all are on the GPU.
    """

    effort = 1.0

    def __init__(
        self,
        workload: Workload,
        machine: Machine,
        limits: Limits,
        seed: int = 0,
        fixed: Mapping[str, Any] | None = None,
        locations: tuple[ParameterLocation, ...] = (),
        storable: Collection[int] | None = None,
        *,
        effort: float | None = None,
        bounds: Bounds | None = None,
    ) -> None:
        """Prepare a search for the fastest plan of a workload on a machine.

        Args:
            workload: Training job of one rank.
            machine: Machine that trains.
            limits: Memory and storage that plans may use.
            seed: Seed of the search.
            fixed: Values of fields that are equal in all plans and are not searched.
            locations: Location of each subgroup's 16-bit parameters in the first plans. If empty, the GPU.
            storable: Subgroups with state that may be on a drive. If None, all may, if a drive is given.
            effort: Fraction of a full search's evaluations. If None, 1.
            bounds: Lower bounds of the iteration time, computed by searches for the same job with other subgroup
                sizes. They hold for all subgroup sizes, so this search reuses them and adds its own.

        Raises:
            ValueError: ``effort`` is not in (0, 1].
        """
        if effort is not None:
            if not 0 < effort <= 1:
                raise ValueError(f"effort must be above 0 and at most 1, but got {effort}. 1 is the full search")
            self.effort = effort
        self.workload, self.machine, self.limits = workload, machine, limits
        stores = limits.storage_bytes is not None and workload.zero_stage == 3
        self.choices = choices(machine, storage=stores)
        kept = None if storable is None else set(range(len(workload.subgroups))) - {*storable}
        self._kept_in_memory = sorted(kept or ())
        self.seed, self.locations, self.moves_parameters = seed, locations, False
        self.early = may_update_early(workload, machine)
        self.spread: Any = None  # `Shares` of the fastest evenly spread plan
        self.fixed = dict(fixed or {})
        if workload.zero_stage < 3:
            self.fixed["overlap_forward"] = False
        self.scores: dict[Candidate, Score] = {}
        self._ordered: dict[Candidate, Candidate] = {}
        self._sweep = PlanSweep(workload, machine)
        self._longer = [self._sweep.longer(n) for n in SETTLED]
        self._orders = UpdateOrders(workload, machine)
        self._gone: dict[bytes, int] = {}  # bytes, by parameter locations
        self._rows: dict[tuple[Any, ...], Row] = {}  # of the plans that were simulated last
        self._active_bytes = workload.activation_bytes
        self._bounds: Bounds = {} if bounds is None else bounds
        # Of the best, of the best that waits for the norm, and of the best with parameters on the device.
        self.best_s = self.plain_s = self.whole_s = math.inf

    @property
    def free(self) -> Freedom:
        """Return the kinds of changes that this plan search may make to a plan."""
        threads = () if "threads" in self.fixed else (0, *sorted(self.machine.host_adam_by_threads))
        return Freedom(self.choices, self.early, self.sums, self.moves_parameters, threads)

    def share_of(self, evaluations: int, least: int = 1) -> int:
        """Return the number of plans to simulate at this search's effort, given the number for a full
        search.
        """
        return max(min(least, evaluations), round(self.effort * evaluations))

    @property
    def most_ops(self) -> int:
        """Return the largest number of simulated operations that one iteration can have under any plan of
        this search.
        """
        return self._sweep.most_ops

    @property
    def sums(self) -> bool:
        """Return True if the plans of this search may sum the gradients of several micro-batches on the
        GPU.
        """
        return self._sweep.held.sums and not self.machine.unified_memory

    @property
    def can_move_parameters(self) -> bool:
        """Return True if 16-bit parameters may be kept in host memory: under ZeRO-3, with separate GPU and
        host memory.
        """
        return self.workload.zero_stage == 3 and not self.machine.unified_memory

    # -- scores ------------------------------------------------------------------------------

    def score(self, candidate: Candidate) -> Score:
        """Return the score (simulated time and memory) of a plan. A plan that was scored before is not simulated again.

        If the plan has early updates (before the gradient norm is known) and fits, the same plan without early
        updates is scored too. Its score is stored, but not returned.
        """
        candidate = self.ordered(candidate)
        if candidate not in self.scores:
            result = self._simulate(candidate)
            if result.iteration_s < self.best_s:
                result = replace(result, iteration_s=self._settled_s(candidate, result.iteration_s))
            self.scores[candidate] = result
            self.best_s = min(self.best_s, result.iteration_s)
            if not candidate.count(PARAMETERS_ON_HOST):
                self.whole_s = min(self.whole_s, result.iteration_s)
            if not candidate.count(EARLY):
                self.plain_s = min(self.plain_s, result.iteration_s)
            elif not math.isinf(result.iteration_s):
                self.score(waiting(candidate))
        return self.scores[candidate]

    def ordered(self, candidate: Candidate) -> Candidate:
        """Return a plan completed with an update order and with the fields that this search keeps fixed.

        Staging buffers and on-device gradient sums are reduced to the number that GPU memory can hold.
        """
        if candidate not in self._ordered:
            completed = self._completed(candidate)
            codes, slots = self.fitted(completed.codes, completed.staging_slots, completed.host_slots)
            prefetch = min(completed.prefetch, slots)
            completed = replace(completed, ways=codes.tobytes(), staging_slots=slots, prefetch=prefetch)
            self._ordered[candidate] = self._ordered[completed] = completed
        return self._ordered[candidate]

    def _completed(self, candidate: Candidate) -> Candidate:
        changed = dict(self.fixed)
        if candidate.order is None:
            changed["order"] = self._orders.of(candidate.placements)
        return replace(candidate, **changed) if changed else candidate

    def fitted(self, codes: Codes, slots: int, host_slots: int = HOST_SLOTS) -> tuple[Codes, int]:
        """Reduce a plan's staging buffers and on-device gradient sums to what GPU memory can hold.

        If memory is short, first the staging buffers are reduced, then on-device gradient sums of later subgroups.

        Args:
            codes: For each subgroup, the code of its placement, parameter location and flags (`Way.code`).
            slots: Number of staging buffers. Each is GPU memory for one subgroup's optimizer state.

        Returns:
            The reduced ``codes`` and ``slots``.
        """
        crossing = codes & ~SUMMED
        taken = self._taken(crossing, slots, host_slots)[0]
        if taken > self.limits.device_bytes:
            slots = self._slots(crossing, slots, host_slots)
            taken = self._taken(crossing, slots, host_slots)[0]
        stay = np.flatnonzero(codes & SUMMED)
        if not (self.sums and stay.size):
            return crossing, slots
        held, sizes = self._sweep.held, self._sweep.sizes
        sent = sizes[CAN_SUM[crossing & ~EARLY]].sum()
        left = self.limits.device_bytes - taken + held.sending_bytes(sent, 0)
        many = sum(held.sending_bytes(sent, n) <= left for n in accumulate(sizes[stay].tolist()))
        crossing[stay[:many]] += SUMMED
        return crossing, slots

    def _slots(self, codes: Codes, wanted: int, host_slots: int) -> int:
        sweep = self._sweep
        both = sweep.amounts(codes)
        users = sweep.slots(both, wanted)[Slot.STAGING]
        if not users or self.workload.zero_stage < 3 or self.machine.unified_memory:
            return wanted
        taken = sweep.held_bytes(both[0], 0, host_slots, both[1], 0.0)["device"]
        left = self.limits.device_bytes - taken - self._device_bytes(codes)
        slots = slots_within(left, users, sweep.each_bytes(Slot.STAGING, both))
        return slots if slots < users else wanted

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

        The result is not stored in the search's scores.

        Args:
            codes: Code of each subgroup's placement, parameter location and flags.
            slots: Number of staging buffers (GPU memory for one staged subgroup each).
            prefetch: Number of subgroups that are copied to the GPU ahead of time.
            threads: Number of CPU threads for updates, or 0 for the default.
            overlap: True if updates may overlap the next forward.
            issue: Order in which the subgroups' updates are issued. If None, the order of forward.
            host_slots: Number of buffers in host memory for stored subgroups.
            most_s: Seconds from which the exact time does not matter. A step that does not clip is simulated first.
                If it takes longer than ``most_s``, its time is returned, and the slower steps that clip are not
                simulated.
        """
        codes, slots = self.fitted(codes, slots, host_slots)
        if not (self._may_store(codes) and self.limits.hold(*self._taken(codes, slots, host_slots))):
            return math.inf
        options = (slots, min(prefetch, slots), threads, overlap, issue, host_slots)
        return self._mean_s(codes, self._sweep.evaluate(codes, *options), options, most_s)

    def seconds_anyhow(self, candidate: Candidate) -> float:
        """Return the predicted seconds per iteration of a plan, even if the plan does not fit into memory."""
        c = self._completed(candidate)
        c = c if self.sums else c.with_codes(c.codes & ~SUMMED)
        return self._settled_s(c, self._mean_s(c.codes, evaluated(self._sweep, c), options_of(c)))

    def _mean_s(self, codes: Codes, row: Row, options: tuple[Any, ...], most_s: float = math.inf) -> float:
        """Return a plan's mean seconds per iteration, weighted by the expected fraction of steps that clip
        gradients.

        A step that clips must undo and redo the plan's early updates.

        Args:
            codes: Code of each subgroup's placement, parameter location and flags.
            row: Simulator's results for a step that does not clip.
            options: Further arguments of the simulation.
            most_s: If a step that does not clip takes longer, its time is returned.
        """
        from ebbtide.simulator.engines import kernel

        right_s = float(row[kernel.ITERATION_S])
        early = (codes & EARLY) > 0
        if right_s > most_s or not early.any():
            return right_s
        _, prefetch, threads, *_ = options
        waits = self._row(codes & ~EARLY, options)
        sizes = self._sweep.sizes
        of_placement = {p: sizes[early & (codes % SUMMED == PLACEMENT_CODES[p])].tolist() for p in EARLY_PLACEMENTS}
        late = late_s(self.workload, self.machine, of_placement, threads, prefetch)
        times = times_of(
            (right_s, float(row[kernel.BACKWARD_S])),
            (float(waits[kernel.ITERATION_S]), float(waits[kernel.BACKWARD_S])),
            late,
        )
        return times.mean_s(self.workload.expected_clip_rate)

    def _row(self, codes: Codes, options: tuple[Any, ...]) -> Row:
        """Return the simulator's results for a plan. The results of the last plans are remembered, as a plan
        with early updates is always compared with the same plan without them.
        """
        *numbers, issue, host_slots = options
        key = (codes.tobytes(), *numbers, b"" if issue is None else issue.tobytes(), host_slots)
        if key not in self._rows:
            if len(self._rows) == MOST_REMEMBERED:
                self._rows.pop(next(iter(self._rows)))
            self._rows[key] = self._sweep.evaluate(codes, *options)
        return self._rows[key]

    def peaks(self, candidate: Candidate) -> Score:
        """Return the simulated time and memory peaks of a plan, without adding them to the scores of this
        search.
        """
        return self._simulate(self.ordered(candidate))

    def _settled_s(self, c: Candidate, seconds: float) -> float:
        """Return a plan's seconds per iteration after many iterations, or ``seconds`` if ``seconds`` is longer.

        If copies to host memory take longer than an iteration, their delay grows from iteration to iteration. A
        simulation of the first few iterations does not show this growth.

        Args:
            seconds: Seconds per iteration in a simulation of the first few iterations.
        """
        few, many = SETTLED
        sums = [seconds_of(sweep, c) * (n - 2) for sweep, n in zip(self._longer, SETTLED, strict=True)]
        later = (sums[1] - sums[0]) / (many - few)
        return later if later > seconds * (1 + 1e-6) else seconds

    def _simulate(self, c: Candidate) -> Score:
        from ebbtide.simulator.engines import kernel

        taken = self._taken(c.codes, c.staging_slots, c.host_slots)
        if not (self.limits.hold(*taken) and self._may_store(c.codes)):
            return Score(math.inf, *taken)
        row = self._row(c.codes, options_of(c))
        peaks = [int(row[column]) for column in (kernel.DEVICE_PEAK, kernel.HOST_PEAK, kernel.STORED)]
        return Score(self._mean_s(c.codes, row, options_of(c)), *peaks)

    def _may_store(self, codes: Codes) -> bool:
        kept = self._kept_in_memory
        return not (kept and np.isin(codes[kept] % SUMMED, _STORED_CODES).any())

    def holds(self, c: Candidate) -> bool:
        """Return True if the memory limits of this search can hold a plan. Nothing is simulated."""
        return self.limits.hold(*self._taken(c.codes, c.staging_slots, c.host_slots))

    def _taken(self, codes: Codes, slots: int, host_slots: int) -> tuple[int, int, int]:
        """Return a tuple with the peaks in bytes of GPU memory, host memory and storage under a plan,
        computed without a simulation.

        The peak of GPU memory is at the end of forward, when GPU memory holds all activations.
        """
        amounts, early = self._sweep.amounts(codes)
        held = self._sweep.held_bytes(amounts, slots, host_slots, early, self._sweep.summed_elements(codes))
        return held["device"] + self._device_bytes(codes), held["host"], held["storage"]

    def _device_bytes(self, codes: Codes) -> int:
        away = codes >= PARAMETERS_ON_HOST
        key = away.tobytes()
        if key not in self._gone:
            w = self.workload
            locations: list[Memory] = ["host" if gone else "device" for gone in away]
            self._gone[key] = moved_out(w, fetched_elements(w, locations)) * w.wire_bytes if away.any() else 0
        return max(0, self.workload.device_base_bytes - self._gone[key]) + self._active_bytes

    @property
    def fits(self) -> bool:
        """Return True if at least one plan that this search has scored fits into memory."""
        return not math.isinf(self.best_s)

    def best(self) -> Candidate:
        """Return the fastest plan that this search has scored. Among equally fast plans, return the one
        with the least GPU memory.
        """
        return min(self.scores, key=lambda c: (round(self.scores[c].iteration_s, 9), self.scores[c].device_peak_bytes))

    # -- first plans -----------------------------------------------------------------------

    def try_(self, c: Candidate) -> float:
        """Simulate a plan, and also a copy with early updates if allowed. Return the seconds per iteration
        of the faster one.

        An early update starts before the gradient norm is known.
        """
        seconds = self.score(c).iteration_s
        if self.early and not math.isinf(seconds):
            seconds = min(seconds, self.score(self.with_early(c)).iteration_s)
        return seconds

    def with_early(self, c: Candidate, placements: Sequence[Placement] = EARLY_PLACEMENTS) -> Candidate:
        """Return a copy of a plan with as many early updates (before the gradient norm is known) as memory
        and time allow.

        The last subgroups are updated early, since backward computes their gradients first.
        """
        c = waiting(self.ordered(c))
        for placement in placements:
            able = self.able(c, placement)
            sizes = self._sweep.sizes[able[::-1]].astype(int).tolist()
            left = self.limits.host_bytes - self._taken(c.codes, c.staging_slots, c.host_slots)[1]
            many = early_updates_worth(self.workload, self.machine, self._sweep.held, sizes, left, placement)
            made = self.ordered(turned(c, able[len(able) - many :].tolist(), EARLY))
            if many and self.holds(made):  # slots with room for new parameters fit too
                c = made
        return c

    @staticmethod
    def able(c: Candidate, placement: Placement) -> NDArray[np.int64]:
        """Return the numbers of the subgroups with a given placement that can be updated before the
        gradient norm is known.
        """
        plain = c.codes & ~(EARLY | SUMMED)
        return np.flatnonzero(CAN_BE_EARLY[plain] & (plain % SUMMED == PLACEMENT_CODES[placement]))

    def try_first(self, locations: tuple[ParameterLocation, ...] | None = None) -> float:
        """Try simple plans, and return the seconds per iteration of the fastest one, or ``inf`` if none fits.

        A simple plan updates all subgroups on the CPU, or gives each placement a fraction of the subgroups, evenly
        spread. If none of these plans fits, the search computes the fractions that leave the most free bytes in the
        fullest memory, and tries plans with similar fractions. A few subgroups may be far larger than the others,
        such as that of an embedding. In the plans with similar fractions, these large subgroups are tried with every
        placement.

        Args:
            locations: Location of each subgroup's 16-bit parameters. If None, the locations of the last call are
                used.
        """
        self.locations = self.locations if locations is None else locations
        count = len(self.workload.subgroups)
        least = self.peaks(self.evenly({HOST: count}))
        best_s = self.try_(self.evenly({HOST: count}))
        if len(self.choices) == 1:
            return best_s
        if least.device_peak_bytes > self.limits.device_bytes:  # nothing takes less of it
            return best_s
        # Elsewhere state takes as many bytes, or more; only the parameters' slots may go.
        slots = PARAMETER_SLOTS * max(self.workload.subgroups) * self.workload.wire_bytes
        both = least.device_peak_bytes + least.host_peak_bytes - slots
        best_s = min(best_s, self._grid_s(MOST_POINTS, (2, 4)))
        if math.isinf(best_s) and both <= self.limits.total_bytes:
            best_s = min(self._roomiest_s(fixed) for fixed in self._held_apart())
        if not STORED.isdisjoint(self.choices):
            best_s = min(best_s, self._least_stored())
        return best_s

    def evenly(
        self, numbers: Mapping[Placement, int], slots: int = 1, fixed: Mapping[int, Placement] | None = None
    ) -> Candidate:
        """Build a plan with a given number of subgroups per placement, spread evenly over the model, and
        with this search's parameter locations.
        """
        return evenly(numbers, slots, fixed, self.locations)

    def _least_stored(self) -> float:
        """Try plans that keep as few subgroups as possible on a drive. Return the seconds per iteration of
        the fastest one.

        The other subgroups are divided among the other placements in many ways.
        """
        count, best_s = len(self.workload.subgroups), math.inf
        stored = next(p for p in self.choices if p in STORED)
        others = [p for p in self.choices if p not in STORED]
        for numbers, slots in product(
            _grid(count, self.share_of(SPILLED_POINTS, FEWEST_WITH_LITTLE_EFFORT), others), FEW_HOST_SLOTS
        ):

            def spilled(n: int, numbers: Mapping[Placement, int] = numbers, slots: int = slots) -> Candidate:
                some = {**numbers, HOST: numbers[HOST] - n, stored: n}
                return replace(self.evenly(some, FEW_SLOTS), host_slots=slots)

            low, high = 0, numbers[HOST] + 1
            while low < high:
                middle = (low + high) // 2
                low, high = (low, middle) if self.holds(spilled(middle)) else (middle + 1, high)
            if low <= numbers[HOST]:
                best_s = min(best_s, self.try_(spilled(low)))
        return best_s

    def _grid_s(self, points: int, slots: Sequence[int]) -> float:
        """Try plans with different numbers of subgroups per placement, and return the seconds per iteration of the
        fastest plan.

        In each plan, the subgroups of each placement are spread evenly over the model.

        Args:
            points: Largest number of combinations to try. A combination is a number of subgroups for each placement.
            slots: Numbers of staging buffers (GPU memory for one staged subgroup each) to try with each combination.
        """
        numbers = _grid(len(self.workload.subgroups), points, self.choices)
        return min(self.try_(self.evenly(n, number)) for n, number in product(numbers, slots))

    def _roomiest_s(self, fixed: Mapping[int, Placement]) -> float:
        sizes, choices = self.workload.subgroups, self.choices
        count = len(sizes) - len(fixed)
        mean = (self.workload.params - sum(sizes[i] for i in fixed)) / max(1, count)
        best_s = math.inf
        division = self._division
        left = [
            division.of(p) * self.workload.params - sum(sizes[i] for i, there in fixed.items() if there == p)
            for p in choices[1:]
        ]
        for changes in product(ROUNDED, repeat=len(left)):
            numbers = [max(0, round(n / mean) + change) for n, change in zip(left, changes, strict=True)]
            if sum(numbers) > count:
                continue
            made = self.evenly(dict(zip(choices, (count - sum(numbers), *numbers), strict=True)), 1, fixed)
            best_s = min(best_s, self.try_(made))
        return best_s

    @property
    def _division(self) -> Fit:
        """Return the division of the model's parameters among placements that leaves the most free bytes in the fullest
        memory: the GPU's, the host's or a drive.

        The number of 16-bit parameters in host memory is the one that this search assumes for its simple plans
        (`locations`).
        """
        away = sum(
            n for n, location in zip(self.workload.subgroups, self.locations, strict=False) if location == "host"
        )
        return roomiest(self.workload, self.machine, self.limits, away=away / self.workload.params)

    def _held_apart(self) -> Iterator[dict[int, Placement]]:
        large = self.workload.large_subgroups[:MOST_OUTLIERS]
        for chosen in product(self.choices, repeat=len(large)):
            yield dict(zip(large, chosen, strict=True))

    # -- bounds ------------------------------------------------------------------------------

    @property
    def bound(self) -> Bound:
        """Return a lower bound of the iteration time under any plan within the memory limits of this
        search.
        """
        return self.bound_with(None)

    def bound_with(self, locations: tuple[ParameterLocation, ...] | None) -> Bound:
        """Return a lower bound of the iteration time under any plan with a given number of 16-bit parameters in host
        memory.

        Args:
            locations: Location of each subgroup's 16-bit parameters, which gives the number of parameters in host
                memory. If empty, the number is 0. If None, the bound holds for any number.

        Raises:
            ValueError: The job does not fit into memory with any plan.
        """
        away = None if locations is None else 0
        if locations:
            pairs = zip(self.workload.subgroups, locations, strict=True)
            away = sum(size for size, location in pairs if location == "host")
        key = self.limits, away
        if key not in self._bounds:
            self._bounds[key] = lower_bound(self.workload, self.machine, self.limits, away=away)
        return self._bounds[key]

    def floor_s(self, locations: tuple[ParameterLocation, ...] | None) -> float:
        """Return a lower bound in seconds of the iteration time, given the location of each subgroup's
        16-bit parameters, or for any locations if None. ``inf`` if the job does not fit into memory.
        """
        try:
            return self.bound_with(locations).iteration_s
        except ValueError:
            return math.inf


def may_update_early(workload: Workload, machine: Machine) -> bool:
    """Return True if the plans of a training job may start updates before the gradient norm is known (early updates).

    This needs ZeRO-3, and separate GPU and host memory. The result is False if every step clips gradients, because
    early updates then never save time.
    """
    return workload.zero_stage == 3 and not machine.unified_memory and workload.expected_clip_rate < 1


def turned(c: Candidate, subgroups: Iterable[int], bit: int) -> Candidate:
    """Return a copy of a plan with one flag, such as early update, inverted for the given subgroups."""
    ways = bytearray(c.ways)
    for subgroup in subgroups:
        ways[subgroup] ^= bit
    return replace(c, ways=bytes(ways))


def waiting(c: Candidate) -> Candidate:
    """Return a copy of a plan without early updates, so that every update waits for the gradient norm."""
    return replace(c, ways=c.ways.translate(_WITHOUT_EARLY))


def _grid(count: int, most: int, choices: Sequence[Placement]) -> Iterator[dict[Placement, int]]:
    kinds = len(choices)
    steps = max(n for n in range(1, most) if math.comb(n + kinds - 1, n) <= most)
    borders = sorted({round(i * count / steps) for i in range(steps + 1)})
    for cuts in combinations_with_replacement(borders, kinds - 1):
        ends = [0, *cuts, count]
        yield {p: ends[i + 1] - ends[i] for i, p in enumerate(choices)}


def evenly(
    numbers: Mapping[Placement, int],
    slots: int = 1,
    fixed: Mapping[int, Placement] | None = None,
    locations: Sequence[ParameterLocation] = (),
) -> Candidate:
    """Build a plan that spreads the given number of subgroups per placement evenly over the model.

    Subgroups that stay on the GPU come first. The other placements are interleaved.

    Args:
        numbers: Number of subgroups by placement.
        slots: Number of staging buffers (GPU memory for one staged subgroup each).
        fixed: Placements of further subgroups at given positions.
        locations: Location of each subgroup's 16-bit parameters. If empty, all are on the GPU.
    """
    there = [p for p in PLACEMENTS if numbers.get(p)]
    stay = [p for p in there if RECIPES[p].state == "device" for _ in range(numbers[p])]
    moving = [p for p in there if RECIPES[p].state != "device"]
    # The k-th of n stands at (k + 1) / n; of equals the first of RECIPES.
    mixed = sorted(((k + 1) / numbers[p], rank, p) for rank, p in enumerate(moving) for k in range(numbers[p]))
    placements = [*stay, *(p for _, _, p in mixed)]
    for subgroup, placement in sorted((fixed or {}).items()):
        placements.insert(subgroup, placement)
    staged = sum(p in STAGED for p in placements)
    slots = max(1, min(slots, staged))
    return Candidate.of(placements, slots, min(slots, staged), locations)


def seconds_of(sweep: PlanSweep, c: Candidate) -> float:
    """Return the predicted seconds of an iteration under a plan, assuming that no early update must be
    undone.
    """
    from ebbtide.simulator.engines import kernel

    return float(evaluated(sweep, c)[kernel.ITERATION_S])


def options_of(c: Candidate) -> tuple[Any, ...]:
    """Return the arguments of `PlanSweep.evaluate` that describe a plan, except for the codes of the
    subgroups.
    """
    return c.staging_slots, c.prefetch, c.threads, c.overlap_forward, c.issue, c.host_slots


def evaluated(sweep: PlanSweep, c: Candidate) -> Row:
    """Return the row of results (times and memory peaks) that the simulator gives for a plan."""
    return sweep.evaluate(c.codes, *options_of(c))
