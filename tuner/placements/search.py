"""The state of the search: candidates, their scores, and the first guesses."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import combinations_with_replacement, product
from typing import Any

import numpy as np
from ebbtide.simulator.analysis.bound import NODES_OF_PLANNING, Bound, fluid_bound, tightened
from ebbtide.simulator.analysis.bounds.window import NAMED
from ebbtide.simulator.analysis.expected import early_updates_worth, late_s, times_of
from ebbtide.simulator.analysis.many_plans import PlanSweep
from ebbtide.simulator.limits import Limits
from ebbtide.simulator.machine import Machine
from ebbtide.simulator.plan import ParameterLocation, Placement, Plan
from ebbtide.simulator.update.footprint import fetched_elements, moved_out, slots_within
from ebbtide.simulator.update.order import FORWARD, UpdateOrder, issue_order
from ebbtide.simulator.update.recipes import HOST_SLOTS, PARAMETER_SLOTS, RECIPES, Slot
from ebbtide.simulator.update.way import EARLY, LOCATION_CODES, SUMMED, of_codes, plain_ways
from ebbtide.simulator.workload import Workload
from ebbtide.tuner.placements.fit import Fit, roomiest
from ebbtide.tuner.placements.moves import HOST, PLACEMENTS, STAGED, STORED, choices
from ebbtide.tuner.placements.update_orders import UpdateOrders
from numpy.typing import NDArray

MOST_CHOICES = 7000  # of few subgroups' placements
MOST_OUTLIERS = 4  # of the large subgroups; they are tried here and there
MOST_POINTS, FEWEST_POINTS = 160, 28  # of a grid of numbers
ROUNDED = (-2, -1, 0, 1, 2)  # subgroups around a division of fractions
MANY_KINDS = 3  # of placements beside the first: fewer numbers of each are tried
FEWEST_WITH_LITTLE_EFFORT = 10  # points of a grid
SPILLED_POINTS = 91  # numbers of what is not on storage
FEW_HOST_SLOTS, FEW_SLOTS = (1, 2, 3), 2
MOST_AROUND = 3  # choices for the largest, around the bound's split
# The number of early updates of a placement.
SPECULATES: Mapping[Placement, str] = {"host": "speculate", "device": "speculate_visits"}
_STORED_CODES = [PLACEMENTS.index(placement) for placement in STORED]
# By code: a search asks for each of its candidates, and `np.isin` takes ten times as long.
_CAN_BE_EARLY: dict[Placement, NDArray[np.bool_]] = {
    placement: np.isin(range(2**7), [w.code for w in plain_ways() if w.placement == placement and w.can_be_early])
    for placement in SPECULATES
}
_EARLY = np.isin(range(2**7), [w.code for w in plain_ways() if w.can_be_early])
_SUMMABLE = np.isin(range(2**7), [w.code for w in plain_ways() if w.can_sum_on_device])
OPEN = 0.01  # of a plan above the bound: less is told as a whole percent at the most
SETTLED = (6, 12)  # iterations: the period is taken from the later ones


@dataclass(frozen=True)
class Candidate:
    """One point of the search: what `PlanSweep.evaluate` takes.

    Attributes:
        staging_slots: fewer, where memory does not hold them beside activations.
        order: None: the one that `UpdateOrders` guesses for the placements.
        homes: of the subgroups' parameters; empty: all on the device.
        speculate, speculate_visits: None: as many as there is memory and time
            for, where the search speculates.
        device_sums: None: as many as the device has memory left for.
        early: True for each subgroup that is updated before the norm, if its placement allows that.
            Empty: as ``speculate``, ``speculate_among`` and ``speculate_visits`` say.
    """

    placements: tuple[Placement, ...]
    staging_slots: int = 2
    prefetch: int = 0
    threads: int = 0
    overlap_forward: bool = True
    order: UpdateOrder | None = None
    locations: tuple[ParameterLocation, ...] = ()
    host_slots: int = HOST_SLOTS
    speculate: int | None = None
    speculate_visits: int | None = None
    speculate_among: int = 0
    early: tuple[bool, ...] = ()
    device_sums: int | None = None

    def plan(self, workload: Workload, **fields: Any) -> Plan:
        """Return the plan that it stands for, with more of a plan's ``fields``."""
        staged = not STAGED.isdisjoint(self.placements)
        made = {
            "workload_fingerprint": workload.fingerprint,
            "trained_as": workload.trained_as,
            "subgroup_size": workload.subgroup_size or max(workload.subgroups),
            "deepspeed_subgroup_size": workload.deepspeed_subgroup_size,
            "subgroups": workload.subgroups,
            "ways": of_codes(self.codes),
            "order": self.order or FORWARD,
            "staging_slots": self.staging_slots if staged else 0,
            "prefetch": self.prefetch if staged else 0,
            "threads": self.threads,
            "overlap_forward": self.overlap_forward,
            "host_slots": self.host_slots,
        }
        return Plan.model_validate({**made, **fields})

    @cached_property
    def codes(self) -> np.ndarray:
        codes = _codes(self.placements, self.locations)
        early = with_bits(codes, self.early) if self.early else with_early_updates(codes, *self.early_updates)
        return with_sums(early, self.device_sums or 0)

    @property
    def early_updates(self) -> tuple[int, ...]:
        """As `with_early_updates` takes them."""
        return self.speculate or 0, self.speculate_among, self.speculate_visits or 0

    @cached_property
    def issue(self) -> np.ndarray | None:
        if self.order is None or self.order == FORWARD:
            return None
        return np.array(issue_order(self.placements, self.order), dtype=np.int64)


@dataclass(frozen=True)
class Score:
    """The simulator's figures of a candidate. ``inf``: it does not fit."""

    iteration_s: float
    device_peak_bytes: int
    host_peak_bytes: int
    storage_bytes: int = 0


class Search:
    """Holds the sweep and remembers every score; deterministic under its seed.

    Attributes:
        effort: share of the evaluations that a search in earnest makes; 0 < effort <= 1.
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
        speculates: bool = False,
        effort: float | None = None,
    ) -> None:
        """``fixed``: fields of every candidate that are not searched; below ZeRO-3 the overlap.

        ``locations``: of the parameters under every candidate; empty: all on the device.
        ``storable``: the subgroups whose state may be stored; None: any, where storage is given.
        ``speculates``: updates may begin before the norm; times are then means over steps of which
        `Workload.expected_clip_rate` clip.
        ``effort``: share of the evaluations; None: all of them.

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
        self.storable = storable
        kept = None if storable is None else set(range(len(workload.subgroups))) - {*storable}
        self._kept_in_memory = sorted(kept or ())
        self.seed, self.speculates = seed, speculates
        self.fixed = dict(fixed or {})
        if workload.zero_stage < 3:
            self.fixed["overlap_forward"] = False
        self.locations = locations
        if locations:
            self.fixed["locations"] = locations
        self.scores: dict[Candidate, Score] = {}
        self._ordered: dict[Candidate, Candidate] = {}
        self._sweep = PlanSweep(workload, machine)
        self._longer = [PlanSweep(workload, machine, iterations=n) for n in SETTLED]
        self._orders = UpdateOrders(workload, machine)
        self._gone: dict[tuple[ParameterLocation, ...], int] = {}  # bytes, by homes
        self.best_s = self.whole_s = math.inf  # with parameters as they are; all on the device

    def share_of(self, evaluations: int, least: int = 1) -> int:
        """Return how many of these evaluations the search makes under its effort."""
        return max(min(least, evaluations), round(self.effort * evaluations))

    @property
    def most_ops(self) -> int:
        """Return the most ops of an iteration under any plan."""
        return self._sweep.most_ops

    def score(self, candidate: Candidate) -> Score:
        """Simulated once, remembered after that."""
        candidate = self.ordered(candidate)
        if candidate not in self.scores:
            result = self._simulate(candidate)
            if result.iteration_s < self.best_s:
                result = replace(result, iteration_s=self._settled_s(candidate, result.iteration_s))
                self.best_s = min(self.best_s, result.iteration_s)
            self.scores[candidate] = result
        return self.scores[candidate]

    def ordered(self, candidate: Candidate) -> Candidate:
        """Return the same with an order of its updates, and with what is fixed."""
        if candidate not in self._ordered:
            self._ordered[candidate] = self._completed(candidate)
        return self._ordered[candidate]

    def _completed(self, candidate: Candidate, *, fits: bool = True) -> Candidate:
        unset = [name for name in SPECULATES.values() if getattr(candidate, name) is None]
        changed: dict[str, Any] = {} if self.speculates else dict.fromkeys(unset, 0)
        if candidate.order is None:
            changed["order"] = self._orders.of(candidate.placements)
        if changed or self.fixed:
            candidate = replace(candidate, **{**changed, **self.fixed})
        for placement, name in SPECULATES.items():
            number = getattr(candidate, name)
            if number is None:
                number = self._most_early_updates(candidate, placement)
            if number != getattr(candidate, name):
                changed = {name: number}
                candidate = replace(candidate, **changed)
        candidate = self._fitted(candidate) if fits else candidate
        if candidate.device_sums is None:
            slots = candidate.staging_slots, candidate.host_slots
            candidate = replace(candidate, device_sums=self._most_sums(candidate.codes, slots))
        return candidate

    def _fitted(self, c: Candidate) -> Candidate:
        """Return the candidate with no more slots than memory holds."""
        slots = self._slots(c.codes, c.staging_slots, c.host_slots)
        return c if slots == c.staging_slots else replace(c, staging_slots=slots, prefetch=min(c.prefetch, slots))

    def _slots(self, codes: NDArray[np.int8], wanted: int, host_slots: int) -> int:
        """Return how many of the wanted staging slots memory holds beside activations."""
        sweep = self._sweep
        both = sweep.amounts(codes)
        users = sweep.slots(both, wanted)[Slot.STAGING]
        if not users or self.workload.zero_stage < 3 or self.machine.unified_memory:
            return wanted
        summed = sweep.summed_elements(codes)
        taken = sweep.held_bytes(both[0], 0, host_slots, both[1], summed)["device"]
        left = self.limits.device_bytes - taken - self._device_bytes(self.locations)
        slots = slots_within(left, users, sweep.each_bytes(Slot.STAGING, both))
        return slots if slots < users else wanted

    def seconds_anyhow(self, candidate: Candidate) -> float:
        """Return a candidate's seconds, whether or not it fits."""
        candidate = self._completed(candidate, fits=False)
        row = evaluated(self._sweep, candidate)
        return self._settled_s(candidate, self._mean_s(row, candidate))

    def seconds(
        self,
        codes: NDArray[np.int8],
        slots: int,
        prefetch: int,
        threads: int,
        overlap: bool,
        issue: NDArray[np.int64] | None,
        host_slots: int = HOST_SLOTS,
        early_updates: Sequence[int] = (0,),
    ) -> float:
        """What `PlanSweep.evaluate` gives for these arguments, not remembered, with as many sums on
        the device as fit; ``inf`` where it does not fit.

        Args:
            guesses: as `with_early_updates` takes them.
        """
        if not self._may_store(codes):
            return math.inf
        codes = codes + location_codes(self.locations)
        early = self._early(codes, early_updates)
        slots = self._slots(early, slots, host_slots)
        codes = with_sums(codes, self._most_sums(early, (slots, host_slots)))
        prefetch = min(prefetch, slots)
        options = (slots, prefetch, threads, overlap, issue, host_slots)
        early = self._early(codes, early_updates)
        row = self._sweep.evaluate(early, *options)
        seconds = self._held(row).iteration_s
        if (early == codes).all() or math.isinf(seconds):
            return seconds
        plain = self._sweep.evaluate(codes, *options)
        return self._mean_of(row, early, plain, threads, prefetch)

    def _early(self, codes: NDArray[np.int8], early_updates: Sequence[int]) -> NDArray[np.int8]:
        fixed = self.fixed.get("early")
        return (
            with_bits(codes & ~SUMMED, fixed) + (codes & SUMMED) if fixed else with_early_updates(codes, *early_updates)
        )

    def _most_early_updates(self, c: Candidate, placement: Placement) -> int:
        """How many subgroups of a placement, from the last one on, there is memory and time for."""
        if placement not in c.placements:
            return 0
        amounts, early = self._sweep.amounts(c.codes)
        taken = self._sweep.held_bytes(amounts, c.staging_slots, c.host_slots, early)["host"]
        sizes = self._sweep.sizes[_able(c.codes, placement)][::-1].astype(int).tolist()
        left = self.limits.host_bytes - taken
        most = early_updates_worth(self.workload, self.machine, self._sweep.held, sizes, left, placement)
        if placement in STAGED and most:  # slots with room for new parameters fit too
            some = self._fitted(replace(c, speculate_visits=1))
            device_bytes, *_ = self._taken(some, c.locations)
            return most if device_bytes <= self.limits.device_bytes else 0
        return most

    def _most_sums(self, codes: NDArray[np.int8], slots: tuple[int, int]) -> int:
        """How many sums of micro-batches the device has memory left for."""
        if not self.sums:
            return 0
        sizes = self._sweep.sizes[_sends(codes)].astype(int).tolist()
        if "device_sums" in self.fixed:
            return min(len(sizes), int(self.fixed["device_sums"]))
        amounts, early = self._sweep.amounts(codes)
        taken = self._sweep.held_bytes(amounts, *slots, early)["device"]
        taken += self._device_bytes(self.locations)
        return self._sweep.held.most_sums(sizes, self.limits.device_bytes - taken)

    @property
    def sums(self) -> bool:
        """Return whether sums of micro-batches may stay on the device."""
        return self._sweep.held.sums and not self.machine.unified_memory

    def _mean_s(self, row: np.ndarray, c: Candidate) -> float:
        """Return a candidate's mean seconds over steps that clip and steps that do not."""
        from ebbtide.simulator.engines import kernel

        if not (c.codes & EARLY).any():
            return float(row[kernel.ITERATION_S])
        none: dict[str, Any] = {**dict.fromkeys(SPECULATES.values(), 0), "early": ()}
        plain = evaluated(self._sweep, replace(c, **none))
        return self._mean_of(row, c.codes, plain, c.threads, c.prefetch)

    def _mean_of(
        self, row: np.ndarray, codes: NDArray[np.int8], plain: np.ndarray, threads: int, prefetch: int
    ) -> float:
        from ebbtide.simulator.engines import kernel

        early = (codes // EARLY) % 2 == 1
        if not early.any():
            return float(row[kernel.ITERATION_S])
        a, b = kernel.ITERATION_S, kernel.BACKWARD_S
        sizes = {
            placement: self._sweep.sizes[early & _able(codes & ~EARLY, placement)].tolist() for placement in SPECULATES
        }
        late = late_s(self.workload, self.machine, sizes, threads, prefetch)
        right, waiting = ((float(r[a]), float(r[b])) for r in (row, plain))
        return times_of(right, waiting, late).mean_s(self.workload.expected_clip_rate)

    def peaks(self, candidate: Candidate, locations: tuple[ParameterLocation, ...]) -> Score:
        """Return the peaks of a candidate with other parameter locations, without remembering them."""
        return self._simulate(replace(self.ordered(candidate), locations=locations))

    def _settled_s(self, c: Candidate, seconds: float) -> float:
        """Return the period of later iterations, where it is longer.

        A D2H lane that has more to do than an iteration lasts falls behind by and by: the first
        iterations do not show it.
        """
        few, many = SETTLED
        sums = [seconds_of(sweep, c) * (n - 2) for sweep, n in zip(self._longer, SETTLED, strict=True)]
        later = (sums[1] - sums[0]) / (many - few)
        return later if later > seconds * (1 + 1e-6) else seconds

    def _simulate(self, c: Candidate) -> Score:
        """Simulate a candidate if it fits. The peaks are known without a simulation."""
        taken = self._taken(c, c.locations)
        if not self.limits.hold(*taken):
            return Score(math.inf, *taken)
        row = evaluated(self._sweep, c)
        score = self._held(row)
        if not math.isinf(score.iteration_s):
            score = replace(score, iteration_s=self._mean_s(row, c))
        placed = np.array([PLACEMENTS.index(p) for p in c.placements])
        return score if self._may_store(placed) else replace(score, iteration_s=math.inf)

    def _may_store(self, codes: NDArray[Any]) -> bool:
        """Return whether every stored subgroup may be stored."""
        kept = self._kept_in_memory
        return not (kept and np.isin(codes[kept], _STORED_CODES).any())

    def _held(self, row: np.ndarray) -> Score:
        from ebbtide.simulator.engines import kernel

        seconds = float(row[kernel.ITERATION_S])
        columns = (kernel.DEVICE_PEAK, kernel.HOST_PEAK, kernel.STORED)
        peaks = tuple(int(row[column]) for column in columns)
        return Score(seconds if self.limits.hold(*peaks) else math.inf, *peaks)

    @property
    def fits(self) -> bool:
        """Return whether any known candidate fits into memory."""
        return any(not math.isinf(score.iteration_s) for score in self.scores.values())

    def best(self) -> Candidate:
        """Return the best candidate so far; ties go to the one that takes less device memory."""
        return min(self.scores, key=lambda c: (round(self.scores[c].iteration_s, 9), self.scores[c].device_peak_bytes))

    # -- guesses -----------------------------------------------------------------------------

    def try_first(self) -> None:
        """Try first guesses: all on the host, evenly spread shares on a coarse grid, and shares near the bound's.

        Subgroups far larger than the others, such as an embedding's, are tried everywhere: no swap
        with a single other one fits into memory.
        """
        count = len(self.workload.subgroups)
        least = self.score(evenly({HOST: count}))
        if len(self.choices) == 1:
            return
        if least.device_peak_bytes > self.limits.device_bytes:  # nothing takes less of it
            return
        # Elsewhere state takes as many bytes, or more; only the parameters' slots may go.
        slots = PARAMETER_SLOTS * max(self.workload.subgroups) * self.workload.wire_bytes
        both = least.device_peak_bytes + least.host_peak_bytes - slots
        hopeless = both > self.limits.total_bytes
        held = list(self._held_apart())
        points = self.share_of(max(FEWEST_POINTS, MOST_POINTS // len(held)), FEWEST_WITH_LITTLE_EFFORT)
        best = self._grid(held, points, (2, 4))
        if not self.fits and not hopeless:
            best = sorted(held, key=self._roomiest_s)
        if not STORED.isdisjoint(self.choices):
            self._least_stored()
        if not self.fits:
            return  # and the bound has no solution either
        for fixed in best[:MOST_AROUND]:
            for numbers in self._around_the_bound(fixed):
                for slots in (2, 3, 4):
                    self.score(evenly(numbers, slots, fixed))

    def _least_stored(self) -> None:
        """Try the fewest stored subgroups, with any numbers of the other placements."""
        count = len(self.workload.subgroups)
        stored = next(p for p in self.choices if p in STORED)
        others = [p for p in self.choices if p not in STORED]
        for numbers, slots in product(
            _grid(count, self.share_of(SPILLED_POINTS, FEWEST_WITH_LITTLE_EFFORT), others), FEW_HOST_SLOTS
        ):

            def spilled(n: int, numbers: Mapping[Placement, int] = numbers, slots: int = slots) -> Candidate:
                some = {**numbers, HOST: numbers[HOST] - n, stored: n}
                return replace(evenly(some, FEW_SLOTS), host_slots=slots)

            low, high = 0, numbers[HOST] + 1
            while low < high:
                middle = (low + high) // 2
                low, high = (low, middle) if self._holds(spilled(middle)) else (middle + 1, high)
            if low <= numbers[HOST]:
                self.score(spilled(low))

    def _holds(self, c: Candidate) -> bool:
        """Return whether the candidate fits, without a simulation."""
        return self.limits.hold(*self._taken(c, self.locations))

    def _taken(self, c: Candidate, locations: tuple[ParameterLocation, ...]) -> tuple[int, int, int]:
        """Return its peaks: all activations are there at the end of forward."""
        codes = c.codes if locations == c.locations else replace(c, locations=locations).codes
        amounts, early = self._sweep.amounts(codes)
        summed = self._sweep.summed_elements(codes)
        held = self._sweep.held_bytes(amounts, c.staging_slots, c.host_slots, early, summed)
        return held["device"] + self._device_bytes(locations), held["host"], held["storage"]

    def _device_bytes(self, locations: tuple[ParameterLocation, ...]) -> int:
        """Return the device memory of the workload alone, all activations among it."""
        base = max(0, self.workload.device_base_bytes - self._gone_bytes(locations))
        return base + self.workload.activation_bytes

    def _gone_bytes(self, locations: tuple[ParameterLocation, ...]) -> int:
        """Return the bytes of parameters that live elsewhere."""
        if locations not in self._gone:
            w = self.workload
            gone = moved_out(w, fetched_elements(w, locations)) * w.wire_bytes if locations else 0
            self._gone[locations] = gone
        return self._gone[locations]

    def try_all(self) -> None:
        """Try the bound's whole numbers, evenly mixed, and every choice of placements if there are few subgroups."""
        for numbers, slots in self.bound.promising:
            self.score(evenly(numbers, slots))
        count = len(self.workload.subgroups)
        if len(self.choices) ** count > self.share_of(MOST_CHOICES):
            return
        for placements in product(self.choices, repeat=count):
            for slots in range(1, 1 + max(1, min(2, sum(p in STAGED for p in placements)))):
                staged = any(p in STAGED for p in placements)
                self.score(Candidate(placements, slots, slots if staged else 0))

    def _grid(
        self, held: Sequence[dict[int, Placement]], points: int, slots: Sequence[int]
    ) -> list[dict[int, Placement]]:
        """The most promising of what is held apart first."""

        def best_s(fixed: dict[int, Placement]) -> float:
            numbers = _grid(len(self.workload.subgroups) - len(fixed), points, self.choices)
            tried = [evenly(n, number, fixed) for n, number in product(numbers, slots)]
            return min(self.score(c).iteration_s for c in tried)

        return sorted(held, key=best_s)

    def _roomiest_s(self, fixed: Mapping[int, Placement]) -> float:
        """Return the best time among plans of whole subgroups near the division with the most room left."""
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
            made = evenly(dict(zip(choices, (count - sum(numbers), *numbers), strict=True)), 1, fixed)
            best_s = min(best_s, self.score(made).iteration_s)
        return best_s

    @cached_property
    def _division(self) -> Fit:
        """Return the division with the most room left, with as many parameters on the host as this search has."""
        away = sum(
            n for n, location in zip(self.workload.subgroups, self.locations, strict=False) if location == "host"
        )
        return roomiest(self.workload, self.machine, self.limits, away=away / self.workload.params)

    def _held_apart(self) -> Iterator[dict[int, Placement]]:
        """Yield every choice of placements for the few largest subgroups."""
        large = self.workload.large_subgroups[:MOST_OUTLIERS]
        for chosen in product(self.choices, repeat=len(large)):
            yield dict(zip(large, chosen, strict=True))

    def _around_the_bound(self, fixed: Mapping[int, Placement]) -> Iterator[dict[Placement, int]]:
        sizes, left = self.workload.subgroups, dict(self.fluid.params)
        for subgroup, placement in fixed.items():
            left[placement] -= sizes[subgroup]
        count = len(sizes) - len(fixed)
        mean = (self.workload.params - sum(sizes[i] for i in fixed)) / max(1, count)
        others = [round(left[p] / mean) for p in self.choices[1:]]
        near = (-2, -1, 0, 1, 2) if len(others) < MANY_KINDS else (-1, 0, 1)
        for changes in product(near, repeat=len(others)):
            around = [n + c for n, c in zip(others, changes, strict=True)]
            around = [count - sum(around), *around]
            if min(around) >= 0:
                yield dict(zip(self.choices, around, strict=True))

    @cached_property
    def bound(self) -> Bound:
        """Within the memory that plans may take, with fractions of subgroups."""
        return tightened(self.fluid, *self._bounded, most_nodes=0)

    def proven_s(self, iteration_s: float) -> float:
        """Return a lower bound, as close to the plan's time as is worth the work.

        Whole subgroups are required if there are few of them and fractions leave much open.
        """
        fractions_s = self.bound.iteration_s
        few = len(self.workload.subgroups) <= NAMED
        if not few or iteration_s <= (1 + OPEN) * fractions_s:
            return fractions_s
        whole = tightened(self.fluid, *self._bounded, most_nodes=self.share_of(NODES_OF_PLANNING))
        return max(fractions_s, whole.iteration_s)

    @cached_property
    def fluid(self) -> Bound:
        """Return the same for a fluid, there in milliseconds."""
        return fluid_bound(*self._bounded)

    @property
    def _bounded(self) -> tuple[Workload, Machine, int, tuple[ParameterLocation, ...], int, int, bool]:
        some = self.limits
        room = (some.host_bytes, some.storage_bytes or 0)
        return (self.workload, self.machine, some.device_bytes, self.locations, *room, self.speculates)

    @property
    def floor_s(self) -> float:
        """Return a lower bound. ``inf``: not even the workload alone fits."""
        try:
            return self.fluid.iteration_s
        except ValueError:
            return math.inf


def with_early_updates(codes: NDArray[np.int8], speculate: int, among: int = 0, staged: int = 0) -> NDArray[np.int8]:
    """Return codes with some early updates.

    Args:
        speculate: The number of those on the host: the last ones, or evenly spread among the last ``among``.
        visits: The number of visits: the last ones.
    """
    early = codes
    numbers: dict[Placement, tuple[int, int]] = {"host": (speculate, among), "device": (staged, 0)}
    for placement, (count, within) in numbers.items():
        if count:
            able = np.flatnonzero(_able(codes, placement))
            early = early.copy()
            early[able[spread(len(able), count, within)]] += EARLY
    return early


def spread(able: int, count: int, among: int = 0) -> list[int]:
    """Return ``count`` positions of ``able``, evenly among the last ``among``, the very last one first."""
    count = min(able, count)
    among = min(able, max(count, among))
    return [able - 1 - i * among // count for i in range(count)]


def with_bits(codes: NDArray[np.int8], early: Sequence[bool]) -> NDArray[np.int8]:
    """Return the codes with these early updates, as far as the ways allow them."""
    return codes + EARLY * (np.array(early) & _EARLY[codes]).astype(np.int8)


def with_sums(codes: NDArray[np.int8], device_sums: int) -> NDArray[np.int8]:
    """Codes of subgroups of which the first so many sums stay on the device:
    `Plan.summed_on_device`.
    """
    if not device_sums:
        return codes
    stay = np.flatnonzero(_sends(codes))[:device_sums]
    codes = codes.copy()
    codes[stay] += SUMMED
    return codes


def _sends(codes: NDArray[np.int8]) -> NDArray[np.bool_]:
    """Return which subgroups send their gradients to host memory."""
    return _SUMMABLE[codes % SUMMED]


def _able(codes: NDArray[np.int8], placement: Placement) -> NDArray[np.bool_]:
    """Which of a placement's can be updated before the norm."""
    able: NDArray[np.bool_] = _CAN_BE_EARLY[placement][codes & ~SUMMED]
    return able


@lru_cache(2**12)
def _codes(placements: tuple[Placement, ...], locations: tuple[ParameterLocation, ...]) -> NDArray[np.int8]:
    """Of subgroups that wait for the norm; for all candidates that differ in the rest alone."""
    some = [PLACEMENTS.index(p) for p in placements]
    codes = np.array(some, dtype=np.int8) + location_codes(locations)
    codes.flags.writeable = False
    return codes


def location_codes(locations: tuple[ParameterLocation, ...]) -> NDArray[np.int8]:
    """Return the addends of parameter locations to the codes of placements."""
    return np.array([LOCATION_CODES[location] for location in locations] or [0], dtype=np.int8)


def _grid(count: int, most: int, choices: Sequence[Placement]) -> Iterator[dict[Placement, int]]:
    """Numbers of each placement, in steps that give at most so many points."""
    kinds = len(choices)
    steps = max(n for n in range(1, most) if math.comb(n + kinds - 1, n) <= most)
    borders = sorted({round(i * count / steps) for i in range(steps + 1)})
    for cuts in combinations_with_replacement(borders, kinds - 1):
        ends = [0, *cuts, count]
        yield {p: ends[i + 1] - ends[i] for i, p in enumerate(choices)}


def evenly(numbers: Mapping[Placement, int], slots: int = 1, fixed: Mapping[int, Placement] | None = None) -> Candidate:
    """Build a candidate with the given number of subgroups per placement: resident first, others interleaved.

    Args:
        fixed: placements of further subgroups at given positions.
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
    return Candidate(tuple(placements), slots, min(slots, staged))


def seconds_of(sweep: PlanSweep, c: Candidate) -> float:
    """Mean iteration of a candidate, in seconds."""
    from ebbtide.simulator.engines import kernel

    return float(evaluated(sweep, c)[kernel.ITERATION_S])


def evaluated(sweep: PlanSweep, c: Candidate) -> np.ndarray:
    """Return the row of a candidate."""
    return sweep.evaluate(c.codes, c.staging_slots, c.prefetch, c.threads, c.overlap_forward, c.issue, c.host_slots)
