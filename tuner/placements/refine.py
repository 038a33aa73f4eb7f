"""From the bound to a plan: numbers of each placement in the order of what they promise.

`simulator.analysis.counted_bound` says how fast any plan with so many host, visiting and resident
subgroups could be. Few numbers promise more than a good plan has; for those, good orders are
guessed and improved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import product
from random import Random

from simulator.analysis.counted_bound import CountBounds
from simulator.analysis.named_bound import MOST_CHOSEN, NamedBounds
from simulator.analysis.window_times import Times
from simulator.plan import Placement
from simulator.update.order import FORWARD, Direction, UpdateOrder
from simulator.update.recipes import RECIPES, Queue
from tuner.placements.arrangements import Arrangements, Counts
from tuner.placements.search import Candidate, Search

MOST_COUNTS = 300
PROMISING = 24  # choices of few subgroups, of so many of each placement
CLOSE = 1.001  # to the bound: a better plan would not be worth the search
FIRST_CLIMB, LAST_CLIMB = 200, 1000
CLIMBERS, SURVIVORS = 8, 3
NEAR = 4  # positions apart
REORDERED, REORDERINGS = 3, 200  # candidates whose updates are reordered, and how often
REORDERED_OF_FEW = 12
BETTER = 1e-6
DIRECTIONS: tuple[Direction, ...] = ("forward", "arrival")


def refine(search: Search) -> None:
    """Scores what the numbers promise; the best so far is never lost.

    Does nothing for more subgroups than `simulator.analysis.counted_bound` counts out.
    """
    bounds = search.counts
    if bounds is None or not len(bounds.host):
        return
    floor_s = search.bound.iteration_s
    guessed = _guess(search, bounds)
    by_score = sorted(guessed, key=lambda c: search.score(c).iteration_s)
    climbers = list(dict.fromkeys([*by_score[: CLIMBERS // 2], *guessed[: CLIMBERS // 2]]))
    rng = Random(search.seed)
    for evaluations, keep in ((FIRST_CLIMB, CLIMBERS), (LAST_CLIMB, SURVIVORS)):
        climbers.sort(key=lambda c: search.score(c).iteration_s)
        climbers = climbers[:keep]
        for place, candidate in enumerate(climbers):
            if search.score(search.best()).iteration_s <= CLOSE * floor_s:
                return
            climbers[place] = climb_order(search, candidate, rng, evaluations)


def _guess(search: Search, bounds: CountBounds) -> list[Candidate]:
    """The best guess for each number that can be better than what is known, best bound first."""
    arrange = _arrangements(search)
    best = search.best()
    best_s = search.score(best).iteration_s
    result: list[Candidate] = []
    columns = (bounds.host, bounds.device, bounds.resident, bounds.slots, bounds.iteration_s)
    for host, device, resident, slots, bound_s in zip(*columns, strict=True):
        if bound_s >= best_s or len(result) == MOST_COUNTS:
            break
        counts = Counts(int(host), int(device), int(resident), int(slots))
        candidates = [
            replace(
                best, placements=order, order=None, staging_slots=max(1, counts.slots),
                prefetch=prefetch,
                overlap_forward=True,
            )
            for order in arrange(counts, float(bound_s))
            for prefetch in sorted({counts.slots, max(0, counts.slots - 1)})
        ]  # fmt: skip
        result.append(min(candidates, key=lambda c: search.score(c).iteration_s))
        best_s = min(best_s, search.score(result[-1]).iteration_s)
    return result


def _arrangements(search: Search) -> Callable[[Counts, float], Iterable[tuple[Placement, ...]]]:
    """Guesses for so many of each placement; of few subgroups those with the lowest bounds too."""
    w, machine = search.workload, search.machine
    arrangements = Arrangements(w, machine)
    passes_s = search.bound.iteration_s - search.bound.update_s
    named = None
    if len(w.subgroups) <= MOST_CHOSEN:
        named = NamedBounds(Times(w.serial, machine), search.limits.device_bytes)

    def arranged(counts: Counts, bound_s: float) -> Iterable[tuple[Placement, ...]]:
        yield from arrangements.of(counts, bound_s - passes_s)
        if named is not None:
            yield from named.most_promising(counts.host, counts.device, counts.slots, PROMISING)

    return arranged


def reorder(
    search: Search, evaluations: int = REORDERINGS, floor_s: float | None = None
) -> None:  # fmt: skip
    """Other orders of the updates for the best candidates so far; ends once the bound is near,
    or what is given in its place.

    Parts of a queue's sequence are moved, turned round or not; only what is better is kept, so that
    an order that has a short form keeps it.
    """
    floor_s = search.bound.iteration_s if floor_s is None else floor_s
    rng = Random(search.seed)
    known = sorted(search.scores, key=lambda c: search.scores[c].iteration_s)
    few = len(search.workload.subgroups) <= MOST_CHOSEN
    for start in known[: REORDERED_OF_FEW if few else REORDERED]:
        current, current_s = start, search.score(start).iteration_s
        named = [UpdateOrder(host=h, device=d) for h, d in product(DIRECTIONS, repeat=2)]
        moves = [queue for queue in Queue if len(_members(start, queue)) > 1] * evaluations
        steps: list[UpdateOrder | Queue | str] = [*named, "residents first", *moves]
        for step in steps:
            if current_s <= CLOSE * floor_s:
                return
            tried = replace(current, order=_changed(current, step, rng))
            tried_s = search.score(tried).iteration_s
            if tried_s < current_s * (1 - BETTER):
                current, current_s = tried, tried_s


def _changed(candidate: Candidate, step: UpdateOrder | Queue | str, rng: Random) -> UpdateOrder:
    if isinstance(step, UpdateOrder):
        return step
    return _moved(candidate, step, rng) if isinstance(step, Queue) else _residents_first(candidate)


def _members(candidate: Candidate, queue: Queue) -> list[int]:
    return [i for i, p in enumerate(candidate.placements) if RECIPES[p].queue == queue]


def _sequences(candidate: Candidate) -> dict[Queue, list[int]]:
    order = candidate.order or FORWARD
    return {queue: order.of(queue, _members(candidate, queue)) for queue in Queue}


def _residents_first(candidate: Candidate) -> UpdateOrder:
    """They wait for nobody; behind a visit that has not come in yet they would."""
    sequences = _sequences(candidate)
    device = sorted(sequences[Queue.DEVICE], key=lambda s: candidate.placements[s] != "resident")
    return UpdateOrder.from_sequences(sequences[Queue.HOST], device)


def _moved(candidate: Candidate, queue: Queue, rng: Random) -> UpdateOrder:
    sequences = _sequences(candidate)
    sequence = sequences[queue]
    _, part = taken_out(sequence, 0.3, rng)
    place = rng.randrange(len(sequence) + 1)
    sequence[place:place] = part[::-1] if rng.random() < 0.5 else part
    return UpdateOrder.from_sequences(sequences[Queue.HOST], sequences[Queue.DEVICE])


def taken_out(sequence: list[int], rate: float, rng: Random) -> tuple[int, list[int]]:
    """Takes a part, not all, out of a sequence of two or more: where it began, and the part.

    Args:
        rate: of the exponential distribution of its length.
    """
    length = min(len(sequence) - 1, int(rng.expovariate(rate)) + 1)
    first = rng.randrange(len(sequence) - length + 1)
    part = sequence[first : first + length]
    del sequence[first : first + length]
    return first, part


def climb_order(search: Search, start: Candidate, rng: Random, evaluations: int) -> Candidate:
    """Local search among the orders of the same placements; keeps what is not worse."""
    current, current_s = start, search.score(start).iteration_s
    for _ in range(evaluations):
        order = list(current.placements)
        first = rng.randrange(len(order))
        if rng.random() < 0.5:
            second = min(len(order) - 1, first + rng.randint(1, NEAR))
            order[first], order[second] = order[second], order[first]
        else:
            order.insert(rng.randrange(len(order)), order.pop(first))
        tried = replace(current, placements=tuple(order), order=None)
        tried_s = search.score(tried).iteration_s
        if tried_s <= current_s:
            current, current_s = tried, tried_s
    return current
