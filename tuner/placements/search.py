"""The search over placements, slots, prefetch, threads and overlap."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np

from simulator.analysis.bound import Bound, fluid_bound, raised, whole_counts
from simulator.analysis.counted_bound import CountBounds
from simulator.analysis.many_plans import PlanSweep
from simulator.engines.recipe_arrays import PLACEMENT_CODES
from simulator.limits import Limits
from simulator.machine import Machine
from simulator.plan import Placement, Plan
from simulator.schedules.strategies import spread
from simulator.update.order import FORWARD, UpdateOrder, issue_order
from simulator.workload import Workload
from tuner.placements.update_orders import UpdateOrders

OUTLIER, MOST_OUTLIERS = 2, 4  # times the median; that many are tried here and there
GRID = 16  # steps of the coarse grid per direction
CLIMB_EVALUATIONS = 1500
TRIALS = 40
SETTLED = (6, 12)  # iterations: the period is taken from the later ones


@dataclass(frozen=True)
class Candidate:
    """One point of the search: what `PlanSweep.evaluate` takes.

    Attributes:
        order: None: the one that `UpdateOrders` guesses for the placements.
    """

    placements: tuple[Placement, ...]
    staging_slots: int = 2
    prefetch: int = 0
    threads: int = 0
    overlap_forward: bool = True
    order: UpdateOrder | None = None

    def plan(self, workload: Workload, **fields: Any) -> Plan:
        """The plan that it stands for, with more of a plan's ``fields``."""
        visits = "device" in self.placements
        made = {
            "workload_fingerprint": workload.fingerprint,
            "subgroup_size": workload.subgroup_size or max(workload.subgroups),
            "subgroups": workload.subgroups, "placement": Plan.runs(self.placements),
            "order": self.order or FORWARD, "staging_slots": self.staging_slots if visits else 0,
            "prefetch": self.prefetch if visits else 0, "threads": self.threads,
            "overlap_forward": self.overlap_forward,
        }  # fmt: skip
        return Plan.model_validate({**made, **fields})

    @cached_property
    def codes(self) -> np.ndarray:
        return np.array([PLACEMENT_CODES[p] for p in self.placements], dtype=np.int8)

    @cached_property
    def issue(self) -> np.ndarray | None:
        if self.order is None or self.order == FORWARD:
            return None
        return np.array(issue_order(self.placements, self.order), dtype=np.int64)


@dataclass(frozen=True)
class Score:
    """What the simulator says of a candidate; ``inf`` where it does not fit."""

    iteration_s: float
    device_peak_bytes: int
    host_peak_bytes: int


class Search:
    """Holds the sweep and remembers every score; deterministic under its seed."""

    def __init__(
        self,
        workload: Workload,
        machine: Machine,
        limits: Limits,
        seed: int = 0,
        fixed: Mapping[str, Any] | None = None,
    ) -> None:
        """``fixed``: fields of every candidate that are not searched; below ZeRO-3 the overlap."""
        self.workload, self.machine, self.limits = workload, machine, limits
        self.random = random.Random(seed)
        self.seed = seed
        self.fixed = dict(fixed or {})
        if workload.zero_stage < 3:
            self.fixed["overlap_forward"] = False
        self.scores: dict[Candidate, Score] = {}
        self._sweep = PlanSweep(workload, machine)
        self._longer = [PlanSweep(workload, machine, iterations=n) for n in SETTLED]
        self._orders = UpdateOrders(workload, machine)
        self._best_s = math.inf

    def score(self, candidate: Candidate) -> Score:
        """Simulated once, remembered after that."""
        candidate = self.ordered(candidate)
        if candidate not in self.scores:
            result = self._simulate(candidate)
            if result.iteration_s < self._best_s:
                result = replace(result, iteration_s=self._settled_s(candidate, result.iteration_s))
                self._best_s = min(self._best_s, result.iteration_s)
            self.scores[candidate] = result
        return self.scores[candidate]

    def ordered(self, candidate: Candidate) -> Candidate:
        """The same with an order of its updates, and with what is fixed."""
        if candidate.order is None:
            candidate = replace(candidate, order=self._orders.of(candidate.placements))
        return replace(candidate, **self.fixed) if self.fixed else candidate

    def seconds_anyhow(self, candidate: Candidate) -> float:
        """What a candidate takes, whether it fits or not."""
        candidate = self.ordered(candidate)
        return self._settled_s(candidate, seconds_of(self._sweep, candidate))

    def seconds(self, codes: np.ndarray, *options: Any) -> float:
        """What `PlanSweep.evaluate` gives for these arguments, not remembered; ``inf`` where it
        does not fit.
        """
        return self._held(self._sweep.evaluate(codes, *options)).iteration_s

    def _settled_s(self, c: Candidate, seconds: float) -> float:
        """The period of later iterations, where it is longer.

        A D2H lane that has more to do than an iteration lasts falls behind by and by: the first
        iterations do not show it.
        """
        few, many = SETTLED
        sums = [
            seconds_of(sweep, c) * (n - 2) for sweep, n in zip(self._longer, SETTLED, strict=True)
        ]
        later = (sums[1] - sums[0]) / (many - few)
        return later if later > seconds * (1 + 1e-6) else seconds

    def _simulate(self, c: Candidate) -> Score:
        return self._held(evaluated(self._sweep, c))

    def _held(self, row: np.ndarray) -> Score:
        from simulator.engines import kernel

        seconds = float(row[kernel.ITERATION_S])
        device, host = int(row[kernel.DEVICE_PEAK]), int(row[kernel.HOST_PEAK])
        return Score(seconds if self.limits.hold(device, host) else math.inf, device, host)

    def best(self) -> Candidate:
        """The best candidate so far; ties go to the one that takes less device memory."""
        return min(
            self.scores,
            key=lambda c: (round(self.scores[c].iteration_s, 9), self.scores[c].device_peak_bytes),
        )

    # -- stages ------------------------------------------------------------------------------

    def constructive(self) -> None:
        """Evenly spread shares on a coarse grid, then around what the bound's split says."""
        count = len(self.workload.subgroups)
        steps = sorted({round(i * count / GRID) for i in range(GRID + 1)})
        for residents in steps:
            for visits in steps:
                if residents + visits <= count:
                    for slots in (2, 4):
                        self.score(even(count, residents, visits, slots))
        if all(math.isinf(score.iteration_s) for score in self.scores.values()):
            return  # nothing fits, and the bound has no solution either
        ideal = self.fluid
        per_subgroup = self.workload.params / count
        around = (
            (round(ideal.resident_params / per_subgroup) + r,
             round(ideal.device_params / per_subgroup) + d)
            for r in (-2, -1, 0, 1) for d in (-2, -1, 0, 1, 2)
        )  # fmt: skip
        for residents, visits in around:
            if residents >= 0 and visits >= 0 and residents + visits <= count:
                for slots in (2, 3, 4):
                    self.score(even(count, residents, visits, slots))

    def outliers(self) -> None:
        """Subgroups far larger than the others, such as an embedding's, here or there: no swap with
        a single other one fits into memory.
        """
        sizes = self.workload.subgroups
        typical = sorted(sizes)[len(sizes) // 2]
        large = [i for i, n in enumerate(sizes) if n > OUTLIER * typical][:MOST_OUTLIERS]
        others = [i for i in range(len(sizes)) if i not in large]
        for chosen in product((True, False), repeat=len(large)) if large else ():
            stay = {i for i, resident in zip(large, chosen, strict=True) if resident}
            for residents in range(len(others), -1, -1):
                held = stay | set(others[:residents])
                placements = ["resident" if i in held else "host" for i in range(len(sizes))]
                tried = Candidate(tuple(placements), 1)  # type: ignore[arg-type]
                if not math.isinf(self.score(tried).iteration_s):
                    break

    @cached_property
    def bound(self) -> Bound:
        """Within the memory that plans may take."""
        return raised(self.fluid, self.counts)

    @cached_property
    def counts(self) -> CountBounds | None:
        """What whole numbers of subgroups allow; None where they are not counted out."""
        return whole_counts(self.workload, self.machine, self.limits.device_bytes)

    @cached_property
    def fluid(self) -> Bound:
        """The bound without those, there in milliseconds."""
        return fluid_bound(self.workload, self.machine, self.limits.device_bytes)

    def climb(self, evaluations: int = CLIMB_EVALUATIONS) -> None:
        """Local search: change one subgroup or swap two; keep what is not worse."""
        current = self.best()
        for candidate in self._neighbours(evaluations):
            tried = candidate(current)
            if self.score(tried).iteration_s <= self.score(current).iteration_s:
                current = tried

    def _neighbours(self, evaluations: int) -> Iterator[_Move]:
        for _ in range(evaluations):
            yield _Move(self.random.random(), self.random.random(), self.random.random())

    def tune(self, trials: int = TRIALS, storage: str | None = None) -> None:
        """Optuna over slots, prefetch, threads and overlap for the best placements."""
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        base = self.best()
        try:
            study = optuna.create_study(
                sampler=optuna.samplers.TPESampler(seed=self.seed),
                storage=storage,
                study_name=f"ebbtide-{self.workload.fingerprint}-{self.machine.fingerprint}",
                load_if_exists=True,
            )
        except Exception as error:
            if storage is None:
                raise
            raise ValueError(
                "study_storage (--study-storage) must be a storage URL that optuna can open, such "
                f"as sqlite:///study.db, but got {storage!r}: {error}"
            ) from None
        visits = base.placements.count("device")
        threads = [0, *sorted(self.machine.host_adam_by_threads)]

        def objective(trial: optuna.Trial) -> float:
            slots = trial.suggest_int("staging_slots", 1, max(1, min(8, visits)))
            candidate = replace(
                base,
                staging_slots=slots,
                prefetch=min(slots, visits, trial.suggest_int("prefetch", 0, 8)),
                threads=trial.suggest_categorical("threads", threads),
            )
            if "overlap_forward" not in self.fixed:
                overlap = trial.suggest_categorical("overlap_forward", [True, False])
                candidate = replace(candidate, overlap_forward=overlap)
            return min(1e9, self.score(candidate).iteration_s)

        study.optimize(objective, n_trials=trials)


@dataclass(frozen=True)
class _Move:
    """A neighbour of a candidate, given by three numbers in [0, 1)."""

    kind: float
    first: float
    second: float

    def __call__(self, c: Candidate) -> Candidate:
        placements = list(c.placements)
        i, j = int(self.first * len(placements)), int(self.second * len(placements))
        if self.kind < 0.5:
            placements[i], placements[j] = placements[j], placements[i]
        else:
            choices: list[Placement] = ["host", "device", "resident"]
            placements[i] = choices[int(self.second * 3)]
        return replace(c, placements=tuple(placements), order=None)


def even(count: int, residents: int, visits: int, slots: int) -> Candidate:
    """Residents first, the visits spread evenly over the rest."""
    placements: list[Placement] = ["resident"] * residents
    placements += spread(visits, count - residents)
    slots = max(1, min(slots, visits)) if visits else 1
    return Candidate(tuple(placements), slots, min(slots, visits))


def quick_iteration_s(
    workload: Workload, machine: Machine, limits: Limits, seed: int, evaluations: int
) -> float:
    """What a short search finds; ``inf`` where nothing fits."""
    search = Search(workload, machine, limits, seed)
    search.score(even(len(workload.subgroups), 0, 0, 1))
    search.constructive()
    if any(not math.isinf(score.iteration_s) for score in search.scores.values()):
        search.climb(evaluations)
    return search.score(search.best()).iteration_s


def seconds_of(sweep: PlanSweep, c: Candidate) -> float:
    """Mean iteration of a candidate, in seconds."""
    from simulator.engines import kernel

    return float(evaluated(sweep, c)[kernel.ITERATION_S])


def evaluated(sweep: PlanSweep, c: Candidate) -> np.ndarray:
    """The row of a candidate."""
    return sweep.evaluate(
        c.codes, c.staging_slots, c.prefetch, c.threads, c.overlap_forward, c.issue
    )
