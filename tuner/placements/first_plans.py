"""The simple plans that a plan search tries first."""

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations_with_replacement, product

from ebbtide.simulator.plan import ParameterLocation, Placement
from ebbtide.simulator.update.steps import PARAMETER_SLOTS
from ebbtide.tuner.candidates.candidate import Candidate
from ebbtide.tuner.candidates.moves import HOST, STORED
from ebbtide.tuner.placements.fit import Fit, roomiest
from ebbtide.tuner.placements.search import Search

MOST_OUTLIERS = 4  # most of the large subgroups that are tried with every placement
# Most points of a grid of numbers of subgroups. Without the grid, plans of models with a hundred subgroups are as fast
# (-1.0 to 1.0%), but plans of a few subgroups are up to 1.7% slower (tests/tuner/golden.py).
MOST_POINTS = 28
ROUNDED = (-2, -1, 0, 1, 2)  # numbers of subgroups around the one that a fraction gives
FEWEST_WITH_LITTLE_EFFORT = 10  # points of a grid in a quick search
SPILLED_POINTS = 91  # numbers of subgroups in memory that are tried if the others are on a drive
FEW_HOST_SLOTS, FEW_SLOTS = (1, 2, 3), 2


def try_first(search: Search, locations: tuple[ParameterLocation, ...] | None = None) -> float:
    """Try simple plans, and return the seconds per iteration of the fastest one, or ``inf`` if none fits.

    A simple plan updates all subgroups on the CPU, or gives each placement a fraction of the subgroups, evenly spread.
    If none of these plans fits, the search computes the fractions that leave the most free bytes in the fullest memory,
    and tries plans with similar fractions. A few subgroups may be far larger than the others, such as that of an
    embedding. In the plans with similar fractions, these large subgroups are tried with every placement.

    Args:
        locations: Location of each subgroup's 16-bit parameters. If None, the locations of the last call are used.
    """
    search.locations = search.locations if locations is None else locations
    count = len(search.workload.subgroups)
    least = search.peaks(search.evenly({HOST: count}))
    best_s = search.try_(search.evenly({HOST: count}))
    if len(search.choices) == 1:
        return best_s
    if least.device_peak_bytes > search.limits.device_bytes:  # no other plan takes less GPU memory
        return best_s
    # Other placements take at least as many bytes of state. Only the buffers of parameters can be saved.
    slots = PARAMETER_SLOTS * max(search.workload.subgroups) * search.workload.wire_bytes
    both = least.device_peak_bytes + least.host_peak_bytes - slots
    best_s = min(best_s, _grid_s(search, MOST_POINTS, (2, 4)))
    if math.isinf(best_s) and both <= search.limits.total_bytes:
        division = _division(search)
        best_s = min(_roomiest_s(search, division, fixed) for fixed in _held_apart(search))
    if not STORED.isdisjoint(search.choices):
        best_s = min(best_s, _least_stored(search))
    return best_s


def _least_stored(search: Search) -> float:
    count, best_s = len(search.workload.subgroups), math.inf
    stored = next(p for p in search.choices if p in STORED)
    others = [p for p in search.choices if p not in STORED]
    for numbers, slots in product(
        _grid(count, search.share_of(SPILLED_POINTS, FEWEST_WITH_LITTLE_EFFORT), others), FEW_HOST_SLOTS
    ):

        def spilled(n: int, numbers: Mapping[Placement, int] = numbers, slots: int = slots) -> Candidate:
            some = {**numbers, HOST: numbers[HOST] - n, stored: n}
            return replace(search.evenly(some, FEW_SLOTS), host_slots=slots)

        fewest = bisect_left(range(numbers[HOST] + 1), True, key=lambda n: search.holds(spilled(n)))
        if fewest <= numbers[HOST]:
            best_s = min(best_s, search.try_(spilled(fewest)))
    return best_s


def _grid_s(search: Search, points: int, slots: Sequence[int]) -> float:
    numbers = _grid(len(search.workload.subgroups), points, search.choices)
    return min(search.try_(search.evenly(n, number)) for n, number in product(numbers, slots))


def _roomiest_s(search: Search, division: Fit, fixed: Mapping[int, Placement]) -> float:
    sizes, choices = search.workload.subgroups, search.choices
    count = len(sizes) - len(fixed)
    mean = (search.workload.params - sum(sizes[i] for i in fixed)) / max(1, count)
    best_s = math.inf
    left = [
        division.of(p) * search.workload.params - sum(sizes[i] for i, there in fixed.items() if there == p)
        for p in choices[1:]
    ]
    for changes in product(ROUNDED, repeat=len(left)):
        numbers = [max(0, round(n / mean) + change) for n, change in zip(left, changes, strict=True)]
        if sum(numbers) > count:
            continue
        made = search.evenly(dict(zip(choices, (count - sum(numbers), *numbers), strict=True)), 1, fixed)
        best_s = min(best_s, search.try_(made))
    return best_s


def _division(search: Search) -> Fit:
    away = search.away(search.locations) / search.workload.params
    return roomiest(search.workload, search.machine, search.limits, away=away)


def _held_apart(search: Search) -> Iterator[dict[int, Placement]]:
    large = search.workload.large_subgroups[:MOST_OUTLIERS]
    for chosen in product(search.choices, repeat=len(large)):
        yield dict(zip(large, chosen, strict=True))


def _grid(count: int, most: int, choices: Sequence[Placement]) -> Iterator[dict[Placement, int]]:
    kinds = len(choices)
    steps = max(n for n in range(1, most) if math.comb(n + kinds - 1, n) <= most)
    borders = sorted({round(i * count / steps) for i in range(steps + 1)})
    for cuts in combinations_with_replacement(borders, kinds - 1):
        ends = [0, *cuts, count]
        yield {p: ends[i + 1] - ends[i] for i, p in enumerate(choices)}
