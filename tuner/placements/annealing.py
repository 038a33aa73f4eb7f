"""The way from good guesses to a good plan: other update orders, other options, then annealing.

Placements and orders move together in the annealing (`ebbtide.tuner.placements.moves`): often only worse
plans lie between two good ones.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain, product
from random import Random
from typing import Any

from ebbtide.simulator.update.order import Direction, UpdateOrder
from ebbtide.tuner.placements.moves import AWAITED, PLACEMENTS, STAGED, STORED, Moved
from ebbtide.tuner.placements.search import Candidate, Search

CLOSE = 1.001  # times the bound: a better plan would not be worth the search
BETTER = 1e-6
EVALUATIONS_EACH, MOST_EVALUATIONS = 400, 12_000  # for each subgroup; in all
MOST_OPS = 6_000_000  # evaluations times an iteration's ops, with which grows what one takes
HEAT = 0.08  # of a mean subgroup's update on the host: the first temperature
REORDERED = 3  # candidates
LEAST_STARTS, MOST_STARTS, STARTS_TIMES_SUBGROUPS = 3, 8, 200
MOST_SLOTS = 8
HOST_SLOTS = [1, 2, 3, 4, 6, 8, 12, 16]  # that are tried
DIRECTIONS: tuple[Direction, ...] = ("forward", "arrival")


def anneal(
    search: Search,
    evaluations: int | None = None,
    floor_s: float | None = None,
    progress: Callable[[float], object] = lambda _: None,
) -> None:
    """Add to the search's scores what it comes by; deterministic under the search's seed.

    Half of the time goes to the best of other numbers of each placement, which moves of single
    subgroups seldom reach, and the other half to the best of all, from a lower temperature.

    Args:
        evaluations: None: as many as are worth it for so many subgroups.
        floor_s: near it the search ends; None: the bound.
        progress: called with the share of them that is done.
    """
    floor_s = search.bound.iteration_s if floor_s is None else floor_s
    count = len(search.workload.subgroups)
    if evaluations is None:
        evaluations = search.share_of(min(MOST_EVALUATIONS, EVALUATIONS_EACH * count, MOST_OPS // search.most_ops))
    heat_s = HEAT * search.workload.params / count / search.machine.host_adam_params_per_s.median
    starts = _starts(search, max(LEAST_STARTS, min(MOST_STARTS, STARTS_TIMES_SUBGROUPS // count)))
    each = evaluations // (2 * len(starts))
    for number, start in enumerate(starts):
        walk = _Walk(search, start)
        walk.cool(heat_s, each, floor_s, Random(f"{search.seed} {number}"))
        progress((number + 1) / len(starts) / 2)
    for part in range(2):
        last = _Walk(search, search.ordered(search.best()))
        last.cool(heat_s / 2 ** (part + 1), evaluations // 4, floor_s, Random(search.seed + part))
        progress(0.75 + part / 4)


def _starts(search: Search, most: int) -> list[Candidate]:
    """Return the best; the best with each number of slots, which take what could stay; then with other
    numbers of each placement.
    """
    known = [c for c, score in search.scores.items() if not math.isinf(score.iteration_s)]
    known.sort(key=lambda c: search.scores[c].iteration_s)
    slots = {c.staging_slots: c for c in reversed(known)}
    numbers = {tuple(c.placements.count(p) for p in PLACEMENTS): c for c in reversed(known)}
    by_score = (sorted(some.values(), key=known.index) for some in (slots, numbers))
    return list(dict.fromkeys(chain(known[:1], *by_score)))[:most]


def reorder(search: Search, evaluations: int) -> None:
    """Other orders of the updates for the best candidates so far; ends once the bound is near."""
    rng = Random(search.seed)
    known = sorted(search.scores, key=lambda c: search.scores[c].iteration_s)
    for start in known[:REORDERED]:
        tried = [search.ordered(start), *(replace(start, order=o) for o in _named(start))]
        walk = _Walk(search, min(tried, key=lambda c: search.score(c).iteration_s))
        for _ in range(evaluations):
            if walk.best_s <= CLOSE * search.bound.iteration_s:
                return
            walk.try_(walk.state.reordered(rng), 0.0, rng)


def options(search: Search) -> None:
    """Slots, prefetch, threads, overlap and host slots of the best candidate, in turn."""
    best = search.best()
    most = max(1, min(MOST_SLOTS, sum(p in STAGED for p in best.placements)))
    values: dict[str, list[Any]] = {
        "threads": [0, *sorted(search.machine.host_adam_by_threads)],
        "staging_slots": list(range(max(1, best.prefetch), most + 1)),
        "prefetch": list(range(most + 1)),
        "overlap_forward": [True, False],
        "host_slots": HOST_SLOTS if not STORED.isdisjoint(best.placements) else [],
    }
    for name, some in values.items():
        best = search.best()
        for value in some:
            if name != "prefetch" or value <= best.staging_slots:
                search.score(replace(best, **{name: value, "device_sums": None}))


class _Walk:
    """A walk from a candidate: the last accepted candidate, and the best one. Worse ones are accepted with heat
    only.
    """

    def __init__(self, search: Search, base: Candidate) -> None:
        self.search, self.base = search, base
        self.state = Moved.of(
            base.placements, base.order, base.staging_slots, base.prefetch, search.choices, base.host_slots
        )
        if search.speculates and "early" not in search.fixed:
            self.state = replace(self.state, early_updates=search.ordered(base).early_updates)
        self.state_s = self.best_s = search.score(base).iteration_s

    def cool(self, heat_s: float, evaluations: int, floor_s: float, rng: Random) -> None:
        """Anneal from a temperature to zero. Stop early near the lower bound."""
        for step in range(evaluations):
            if self.search.best_s <= CLOSE * floor_s:
                return
            self.try_(self.state.moved(rng), heat_s * (1 - step / evaluations), rng)

    def try_(self, tried: Moved, heat_s: float, rng: Random) -> None:
        codes, issue = tried.arrays()
        options = (tried.slots, tried.prefetch, self.base.threads, self.base.overlap_forward)
        early_updates = self.base.early_updates if tried.early_updates is None else tried.early_updates
        seconds = self.search.seconds(codes, *options, issue, tried.host_slots, early_updates)
        worse_s = seconds - self.state_s
        if worse_s > 0 and (heat_s <= 0 or rng.random() >= math.exp(-worse_s / heat_s)):
            return
        self.state, self.state_s = tried, seconds
        if seconds < self.best_s * (1 - BETTER):
            found = replace(
                self.base,
                placements=tried.placements,
                order=tried.order,
                staging_slots=tried.slots,
                prefetch=tried.prefetch,
                host_slots=tried.host_slots,
                speculate=early_updates[0],
                speculate_among=early_updates[1],
                speculate_visits=early_updates[2],
                device_sums=None,
            )
            self.best_s = min(self.best_s, self.search.score(found).iteration_s)


def _named(candidate: Candidate) -> Iterator[UpdateOrder]:
    """Yield the directions, and each queue with the subgroups first that wait for no staging slot."""
    for host, device in product(DIRECTIONS, repeat=2):
        yield UpdateOrder(host=host, device=device)
    order = candidate.order or UpdateOrder()
    state = Moved.of(candidate.placements, order, 1, 0)
    for sequence in state.sequences:
        sequence.sort(key=lambda s: candidate.placements[s] in AWAITED)
    yield state.order
