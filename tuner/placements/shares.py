"""A coordinate descent for the best plan with evenly spread placements.

Such a plan is described by a few numbers, such as the fraction of the parameters with each placement and the number of
staging buffers. The descent makes one change to these numbers at a time, first by large steps and then by smaller ones,
for as long as the predicted iteration gets shorter. Simulated annealing, which changes the placements of single
subgroups, then starts from the best plans.

The simple plans that a search tries first are made of such shares too.
"""

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations_with_replacement, permutations, product

from ebbtide.simulator.plan import ParameterLocation, Placement
from ebbtide.simulator.update.recipes import RECIPES
from ebbtide.simulator.update.steps import HOST_SLOTS, PARAMETER_SLOTS
from ebbtide.simulator.update.way import EARLY, EARLY_PLACEMENTS, PARAMETERS_ON_HOST
from ebbtide.tuner.placements.candidate import HOST, PLACEMENTS, STAGED, STORED, Candidate, able_early, turned, waiting
from ebbtide.tuner.placements.division import Division, roomiest
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
    grid = product(_grid(len(search.workload.subgroups), MOST_POINTS, search.choices), (2, 4))
    best_s = min(best_s, *(search.try_(search.evenly(numbers, slots)) for numbers, slots in grid))
    if math.isinf(best_s) and both <= search.limits.total_bytes:
        away = search.away(search.locations) / search.workload.params
        division = roomiest(search.workload, search.machine, search.limits, away=away)
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


def _roomiest_s(search: Search, division: Division, fixed: Mapping[int, Placement]) -> float:
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


# First steps of the descents, as fractions of the parameters: from the search's own plans, from plans for larger
# subgroups, and with parameters in host memory. It is not known beforehand which one leads to the best plan.
FIRST_STEPS, NEAR_STEPS, FREED_STEPS = (0.25,), (0.12, 0.03), (0.25, 0.06)
COARSE = 0.06
FEW, MANY = 60, 100  # most changes in a descent
SHARES = (0.25, 0.5, 1.0)  # shares of the subgroups that could move their parameters to host memory
FREED = SHARES[:2]  # if all parameters could stay on the GPU
# Factors on the time with all parameters on the GPU that a plan must beat, while training runs and before.
WORTH, WORTH_FREEING = 0.99, 0.998
MOST_SLOTS = 16  # buffers in host memory for stored subgroups
LAST_STEP = 0.5  # smallest step, in subgroups
FEWER_LOCATIONS = 0.2
MOST_SPREAD = 256  # most cached mixtures. Many changes leave the mixture as it is


def spread(sizes: Sequence[int], shares: Mapping[Placement, float], *, mixed: bool = False) -> list[Placement]:
    """Return a placement for each subgroup, so that each placement has its share of the elements."""
    # Subgroups that stay on the GPU come first, unless all are to be ``mixed``.
    there = tuple((p, shares[p]) for p in PLACEMENTS if shares.get(p, 0.0) > 0.0)
    return [*_spread(tuple(sizes), there, mixed)]


@lru_cache(MOST_SPREAD)
def _spread(sizes: tuple[int, ...], some: tuple[tuple[Placement, float], ...], mixed: bool) -> tuple[Placement, ...]:
    shares, total, placements = dict(some), sum(sizes), list[Placement]()
    there = [*shares]
    stay = [p for p in there if RECIPES[p].state == "device" and not mixed]
    moving = [p for p in there if p not in stay]
    left = {p: shares[p] * total for p in there}
    whole = sum(shares[p] for p in moving) or 1.0
    due = dict.fromkeys(moving, 0.0)
    for size in sizes:
        staying = next((p for p in stay if left[p] >= size / 2 or not moving), None)
        if staying is not None:
            left[staying] -= size
            placements.append(staying)
            continue
        for p in moving:
            due[p] += size * shares[p] / whole
        chosen = max(moving, key=due.__getitem__)
        due[chosen] -= size
        placements.append(chosen)
    return tuple(placements)


def spaced(count: int, away: int) -> tuple[ParameterLocation, ...]:
    """Return a location for each subgroup, ``away`` of them evenly spaced in host memory. Empty: all on the GPU."""
    if not away:
        return ()
    turns = [i * away // count for i in range(count + 1)]
    return tuple("host" if turns[i + 1] > turns[i] else "device" for i in range(count))


@dataclass(frozen=True)
class Shares:
    """A description of a plan by a few numbers, mainly the fraction of the parameters with each placement. The plan
    spreads its placements evenly over the model.

    Attributes:
        of: Fraction of the parameters for each placement, without the large subgroups.
        large: Placement of each subgroup that is far larger than the others.
        early: For each placement, the fraction of its subgroups with early updates. The last subgroups with this
            placement are chosen.
        slots: Number of staging buffers.
        host_slots: Number of buffers in host memory for subgroups with optimizer state on a drive.
        locations: Location of each subgroup's 16-bit parameters. If empty, all are on the GPU.
        mixed: True if subgroups that stay on the GPU are spread over the model like the others, and do not come first.
    """

    of: Mapping[Placement, float]
    large: Mapping[int, Placement]
    early: Mapping[Placement, float]
    slots: int
    host_slots: int
    locations: tuple[ParameterLocation, ...]
    mixed: bool = False

    @classmethod
    def from_plan(cls, search: Search, c: Candidate) -> "Shares":
        sizes = search.workload.subgroups
        large = {s: c.placements[s] for s in search.workload.large_subgroups[:MOST_OUTLIERS]}
        locations: list[ParameterLocation] = ["host" if code & PARAMETERS_ON_HOST else "device" for code in c.ways]
        whole = max(1, search.workload.params - sum(sizes[s] for s in large))
        of, early = {}, {}
        for placement in sorted({*c.placements}):
            own = [s for s, p in enumerate(c.placements) if p == placement]
            of[placement] = sum(sizes[s] for s in own if s not in large) / whole
            early[placement] = sum(bool(c.ways[s] & EARLY) for s in own) / len(own)
        return cls(of, large, early, c.staging_slots, c.host_slots, tuple(locations))

    @classmethod
    def from_bound(cls, search: Search, locations: tuple[ParameterLocation, ...] | None) -> "Shares":
        """Return the shares of the ideal plan, which reaches the lower bound. ``locations`` None: any.

        The ideal plan may divide subgroups, so every real plan may be slower.
        """
        params = search.workload.params
        of = {p: n / params for p, n in search.bound_with(locations).params.items()}
        large = {s: max(of, key=of.__getitem__) for s in search.workload.large_subgroups[:MOST_OUTLIERS]}
        return cls(of, large, {}, 2, HOST_SLOTS, search.locations)

    def plan(self, search: Search) -> Candidate:
        sizes = [n for s, n in enumerate(search.workload.subgroups) if s not in self.large]
        placements = spread(sizes, self.of, mixed=self.mixed)
        for subgroup, placement in sorted(self.large.items()):
            placements.insert(subgroup, placement)
        slots = max(1, min(self.slots, sum(p in STAGED for p in placements)))
        made = replace(Candidate.of(placements, slots, slots, self.locations), host_slots=self.host_slots)
        if not any(self.early.values()):
            return made
        made = waiting(search.ordered(made))
        for placement in EARLY_PLACEMENTS:
            able = able_early(made, placement)
            many = round(len(able) * self.early.get(placement, 0.0))
            while many:
                tried = search.ordered(turned(made, able[len(able) - many :].tolist(), EARLY))
                if search.holds(tried):
                    made = tried
                    break
                many = many * 3 // 4
        return made

    def seconds(self, search: Search) -> float:
        """Return the predicted seconds per iteration of the plan that this object describes, or ``inf`` if the
        plan does not fit into memory.
        """
        described = (
            *(self.of.get(p, 0.0) for p in PLACEMENTS),
            *(self.early.get(p, 0.0) for p in EARLY_PLACEMENTS),
            *sorted(self.large.items()),
            self.slots,
            self.host_slots,
            self.locations,
            self.mixed,
        )
        if described not in search.spread_plans:  # several descents reach the same plans
            search.spread_plans[described] = self.plan(search)
        return search.score(search.spread_plans[described]).iteration_s

    def near(self, step: float, search: Search) -> Iterator["Shares"]:
        """Yield descriptions of plans that are similar to the plan that this object describes.

        A similar plan has one change: in the placements, the early updates, the number of buffers or the parameter
        locations. A change of placements may come with another number of buffers.

        Args:
            step: Size of a change, such as the fraction of the parameters that get another placement.
            search: Plan search that says which placements and memory may be used.
        """
        moves = [*self._moved(step, search)]
        yield from moves
        if self.of.get("resident", 0.0) > 0.0:
            yield replace(self, mixed=not self.mixed)
        if search.early:
            for placement in EARLY_PLACEMENTS:
                now = self.early.get(placement, 0.0)
                if self.of.get(placement, 0.0) > 0.0:
                    for other in {max(0.0, now - 2 * step), min(1.0, now + 2 * step)} - {now}:
                        yield replace(self, early={**self.early, placement: other})
        if any(self.of.get(p) for p in STAGED):
            yield from (replace(self, slots=n) for n in (self.slots - 1, self.slots + 1) if n)
            freeing = [n for n in moves if n.of.get("resident", 0) < self.of.get("resident", 0)]
            yield from (replace(n, slots=self.slots + 1) for n in freeing)

        if search.moves_parameters and step > FEWER_LOCATIONS:  # each choice of locations needs a new recording
            count = len(search.workload.subgroups)
            now = self.locations.count("host")
            for away in {max(0, now - round(step * count)), min(count, now + round(step * count))} - {now}:
                yield replace(self, locations=spaced(count, away))
        if not STORED.isdisjoint(p for p, share in self.of.items() if share):
            yield from (
                replace(n, host_slots=2 * self.host_slots) for n in (self, *moves) if self.host_slots < MOST_SLOTS
            )
            yield replace(self, host_slots=max(1, self.host_slots // 2))
        yield from self._large_moved(search)

    def _large_moved(self, search: Search) -> Iterator["Shares"]:
        if len(self.large) > 1:
            yield from (replace(self, large=dict.fromkeys(self.large, p)) for p in search.choices)
        sizes = search.workload.subgroups
        rest = max(1, search.workload.params - sum(sizes[s] for s in self.large))
        for subgroup, placement in self.large.items():
            for other in search.choices:
                if other == placement:
                    continue
                elsewhere = replace(self, large={**self.large, subgroup: other})
                yield elsewhere
                there = self.of.get(other, 0.0)
                back = min(sizes[subgroup] / rest, there)
                if back:
                    of = {**self.of, other: there - back, placement: self.of.get(placement, 0.0) + back}
                    yield replace(elsewhere, of=of)

    def _moved(self, step: float, search: Search) -> Iterator["Shares"]:
        for one, other in permutations(search.choices, 2):
            moved = min(step, self.of.get(one, 0))
            if moved:
                yield replace(self, of={**self.of, one: self.of[one] - moved, other: self.of.get(other, 0) + moved})


def descend(search: Search, most: int, *, near: bool = False) -> None:
    """Improve evenly spread plans by one change at a time, for as long as the predicted iteration gets shorter.

    The starts are the best plan so far, the best plan without early updates, and the ideal plan, which reaches the
    lower bound of the iteration time. A few changes are tried from each. Only the best resulting plan is improved
    further, by smaller and smaller changes.

    Args:
        most: Largest number of changes to try from one start.
        near: True if the best plan comes from a search with larger subgroups. The first changes are then smaller.
    """
    if not search.fits or len(search.choices) == 1:
        return
    starts = [search.best()]
    if not near:
        starts.append(min((c for c in search.scores if not c.count(EARLY)), key=lambda c: search.scores[c].iteration_s))
    shares = [
        *(Shares.from_plan(search, c) for c in dict.fromkeys(starts)),
        Shares.from_bound(search, search.locations),
    ]
    search.spread = _best_of(search, shares, NEAR_STEPS if near else FIRST_STEPS, most)


def free_parameters(search: Search, most: int, *, again: bool = False) -> None:
    """Allow a plan search to move 16-bit parameters to host memory, if this makes its best plan at least 0.2% faster.

    Only plans with evenly spread placements are compared. The function needs ZeRO-3, and a GPU with its own memory.

    Args:
        search: Plan search after `descend` has improved its plans.
        most: Largest number of changes to try, starting from each plan.
        again: True to look for better locations of the parameters even if the search already moves parameters. Any gain
            is then enough.
    """
    now: Shares | None = search.spread
    moved = search.moves_parameters
    if now is None or (moved and not again) or not search.can_move_parameters:
        return
    before_s, count = now.seconds(search), len(search.workload.subgroups)
    worth_s = before_s if moved else WORTH_FREEING * before_s
    if search.floor_s() >= worth_s:
        return
    starts = [
        replace(now, locations=spaced(count, max(1, round(share * count)))) for share in (SHARES if again else FREED)
    ]
    starts += [Shares.from_bound(search, None)] if moved else []
    after = _best_of(search, starts, FREED_STEPS, most)
    if after.seconds(search) < worth_s:
        search.moves_parameters = True
        search.spread, search.locations = after, after.locations


def best_worth_moving(search: Search) -> Candidate:
    """Return the fastest plan of a plan search, with 16-bit parameters in host memory only if that makes the plan at
    least 1% faster than every plan that keeps all of them on the GPU.
    """
    best = search.best()
    if not best.count(PARAMETERS_ON_HOST) or search.best_s < WORTH * search.whole_s:
        return best
    whole = (c for c in search.scores if not c.count(PARAMETERS_ON_HOST))
    return min(whole, key=lambda c: search.scores[c].iteration_s)


def _best_of(search: Search, starts: Sequence[Shares], steps: Sequence[float], most: int) -> Shares:
    least = LAST_STEP / len(search.workload.subgroups)
    ends = [_descended(search, start, step, least, min(most, FEW)) for start in starts for step in steps]
    best = min(ends, key=lambda shares: shares.seconds(search))
    return _descended(search, best, COARSE, least, min(most, MANY))


def _descended(search: Search, now: Shares, step: float, least: float, most: int) -> Shares:
    now_s, tried, first = now.seconds(search), 0, 0
    while step >= least:
        others = [*now.near(step, search)]
        for number in range(first, first + len(others)):
            if tried == most:
                return now
            other = others[number % len(others)]
            tried += 1
            seconds = other.seconds(search)
            if seconds < now_s:
                # Next, try a change of the same kind.
                now, now_s, first = other, seconds, number % len(others)
                break
        else:
            step, first = step / 2, 0
    return now
