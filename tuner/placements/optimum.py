"""An exact search for the fastest plan of a job with few subgroups of optimizer state.

Every useful assignment of placements to subgroups is tried.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations_with_replacement

from ebbtide.simulator.analysis.bound import NumberedBounds
from ebbtide.simulator.plan import Placement
from ebbtide.simulator.update.way import SUMMED
from ebbtide.tuner.placements.moves import CHOICES, STAGED
from ebbtide.tuner.placements.search import Candidate, Search, turned

MOST_SUBGROUPS = 10


@dataclass(frozen=True)
class Optimum:
    """The best plan of an exact search, and statistics of that search.

    Attributes:
        candidate: Best plan, as the search represents it.
        iteration_s: Its seconds per iteration. No choice of placements, staging buffers (GPU memory for a staged
            subgroup), prefetched subgroups and threads is faster.
        simulated: Number of plans that were simulated.
        pruned: Number of combinations of placement counts and buffers that the lower bound ruled out.
    """

    candidate: Candidate
    iteration_s: float
    simulated: int
    pruned: int


def optimum(search: Search) -> Optimum:
    """Return the fastest plan for few subgroups of optimizer state by branch and bound.

    A combination gives the number of subgroups for each placement. Combinations with a lower bound above the
    best time are skipped. For the others, every assignment to the subgroups is tried. The result is exact over
    placements, staging buffers, prefetch, on-device gradient accumulation and the measured numbers of threads.
    It assumes that updates overlap the next forward, and the update orders of
    `ebbtide.tuner.placements.update_orders`. More combinations are skipped if the search has already run.

    Raises:
        ValueError: There are more than MOST_SUBGROUPS subgroups, or no plan fits into memory.
    """
    count = len(search.workload.subgroups)
    if count > MOST_SUBGROUPS:
        raise ValueError(
            f"the exact optimum is searched for at most {MOST_SUBGROUPS} subgroups, but got "
            f"{count}: compare with the bound instead (Plan.prediction.lower_bound_s)"
        )
    best = search.best()
    best_s = search.score(best).iteration_s
    bounds = NumberedBounds(search.workload, search.machine, search.limits.device_bytes)
    before, pruned = len(search.scores), 0
    for numbers, slots in _cases(count):
        if best_s <= bounds.iteration_s(numbers, slots):
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
