"""An exact search for the fastest plan of a job with few subgroups of optimizer state.

Every useful assignment of placements to subgroups is tried.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations_with_replacement

from ebbtide.simulator.analysis.bounds import problem
from ebbtide.simulator.plan import Placement
from ebbtide.simulator.update.steps import Slot
from ebbtide.simulator.update.way import SUMMED
from ebbtide.tuner.placements.candidate import CHOICES, STAGED, Candidate, turned
from ebbtide.tuner.placements.search import Search

MOST_SUBGROUPS = 10
NEAR = 1e-5  # tolerance of the solver


@dataclass(frozen=True)
class Optimum:
    """The best plan of an exact search, and statistics of that search.

    Attributes:
        iteration_s: Its seconds per iteration. No choice of placements, staging buffers (GPU memory for a staged
            subgroup), prefetched subgroups and threads is faster.
        pruned: Number of combinations of placement counts and buffers that the lower bound ruled out.
    """

    candidate: Candidate
    iteration_s: float
    simulated: int
    pruned: int


def optimum(search: Search) -> Optimum:
    """Return the fastest plan for few subgroups of optimizer state by branch and bound.

    A combination gives the number of subgroups with each placement. Combinations with a lower bound above the best
    time so far are skipped. For the others, every assignment of these placements to the subgroups is simulated. At
    first, the best time is that of the fastest plan that the tuner's search ``search`` has found.

    The result is exact over placements, staging buffers, prefetch, on-device gradient accumulation and the measured
    numbers of threads. All simulated plans overlap updates with the next forward, and use the update orders of
    `ebbtide.tuner.placements.search`.

    Raises:
        ValueError: There are more than MOST_SUBGROUPS subgroups, or no plan fits into memory.
    """
    count = len(search.workload.subgroups)
    if count > MOST_SUBGROUPS:
        raise ValueError(
            f"exhaustive search for the best plan is limited to {MOST_SUBGROUPS} subgroups, but got {count} subgroups. "
            "Instead, compare a plan's iteration time with its lower bound, Plan.prediction.lower_bound_s"
        )
    best = search.best()
    best_s = search.score(best).iteration_s
    before, pruned = len(search.scores), 0
    for numbers, slots in _cases(count):
        if best_s <= floor_s(search, numbers, slots):
            pruned += 1
            continue
        for order in orders(numbers):
            for candidate in _variants(search, best, order, slots):
                seconds = search.score(candidate).iteration_s
                if seconds < best_s:
                    best, best_s = candidate, seconds
    if math.isinf(best_s):
        raise ValueError(
            f"no plan fits into {search.limits.device_bytes} bytes of GPU memory and {search.limits.host_bytes} bytes "
            "of host memory per rank: raise one of these limits"
        )
    return Optimum(best, best_s, len(search.scores) - before, pruned)


def floor_s(search: Search, numbers: Mapping[Placement, int], slots: int) -> float:
    """Return a lower bound of an iteration's seconds under every plan with a given number of subgroups per placement.

    All 16-bit parameters are on the GPU, and no update is early. The result is infinite if nothing fits.

    Args:
        slots: Number of staging buffers (GPU memory for one staged subgroup each).
    """
    p = problem(search.workload, search.machine, search.limits, early=False)
    sizes, total = sorted(search.workload.subgroups), search.workload.params
    for placement, number in numbers.items():
        there, elsewhere = (
            [n for n, way in enumerate(p.ways) if way.placement == placement and way.parameters == location]
            for location in ("device", "host")
        )
        least, most = sum(sizes[:number]), sum(sizes[len(sizes) - number :])
        p.rows.at_most(most / total, (p.x[:, there].ravel(), 1.0), least=least / total)
        p.rows.equal(0.0, (p.x[:, elsewhere].ravel(), 1.0))
    if Slot.STAGING in p.slots:
        p.rows.at_most(slots * sizes[-1] / total, (p.slots[Slot.STAGING], 1.0))
    solved = p.rows.lowest(*p.mean(1.0))
    return math.inf if solved is None else (p.rest_s + solved[0]) * (1 - NEAR)


def _cases(count: int) -> Iterator[tuple[dict[Placement, int], int]]:
    for cuts in combinations_with_replacement(range(count + 1), len(CHOICES) - 1):
        ends = [0, *cuts, count]
        numbers = {p: ends[i + 1] - ends[i] for i, p in enumerate(CHOICES)}
        staged = sum(numbers[p] for p in STAGED)
        yield from ((numbers, slots) for slots in (range(1, staged + 1) if staged else (0,)))


def orders(numbers: Mapping[Placement, int]) -> Iterator[tuple[Placement, ...]]:
    """Yield every assignment of placements to subgroups that has the given number of subgroups per placement."""
    left = dict(numbers)
    chosen: list[Placement] = []

    def rest() -> Iterator[tuple[Placement, ...]]:
        if not any(left.values()):
            yield tuple(chosen)
            return
        for placement in left:
            if left[placement]:
                left[placement] -= 1
                chosen.append(placement)
                yield from rest()
                chosen.pop()
                left[placement] += 1

    return rest()


def _variants(search: Search, base: Candidate, order: tuple[Placement, ...], slots: int) -> Iterator[Candidate]:
    for threads in (0, *sorted(search.machine.host_adam_by_threads)):
        for prefetch in range(slots, -1, -1):
            made = Candidate.of(
                order, max(1, slots), prefetch, threads=threads, overlap_forward=True, host_slots=base.host_slots
            )
            candidate = search.ordered(made)
            sums = [subgroup for subgroup, code in enumerate(candidate.ways) if code & SUMMED]
            yield from (turned(candidate, sums[n:], SUMMED) for n in range(len(sums), -1, -1))
