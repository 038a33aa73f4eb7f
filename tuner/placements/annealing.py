"""Simulated annealing, which improves a good training plan by many small random changes.

Placements of subgroups (parts of DeepSpeed's optimizer state) and the order of their updates are changed
together, by the moves in `ebbtide.tuner.placements.candidate`. Changing only one of the two often gets
stuck, since only slower plans lie between two good ones.
"""

import math
from dataclasses import replace
from itertools import chain, product
from random import Random
from typing import Any

from ebbtide.simulator.update.order import Direction, UpdateOrder
from ebbtide.tuner.placements.candidate import PLAIN, STAGED, STORED, Candidate, Moved
from ebbtide.tuner.placements.search import Search

CLOSE = 1.001  # factor on the lower bound. Closer to it, a better plan would not be worth the search
BETTER = 1e-6
EVALUATIONS_EACH, MOST_EVALUATIONS = 400, 10_000  # evaluations per subgroup, and largest total
MOST_OPS = 14_000_000  # simulated ops, which limit the evaluations of long iterations (`Search.affordable`)
HEAT = 0.08  # first temperature, as a fraction of the CPU update of an average subgroup
MOST_SLOTS = 8
HOST_SLOTS = [1, 2, 3, 4, 6, 8, 12, 16]  # the values that are tried
DIRECTIONS: tuple[Direction, ...] = ("forward", "arrival")
LEAST_STARTS, MOST_STARTS, STARTS_TIMES_SUBGROUPS = 3, 16, 200


def anneal(search: Search, evaluations: int | None = None) -> None:
    """Look for faster training plans by simulated annealing, and add them to the scores of a plan search. The result is
    deterministic for the search's seed.

    The first half of the evaluations starts from several known plans: the fastest one for each number of staging
    buffers, and the fastest one for each choice of the numbers of subgroups per placement. Annealing mostly changes
    single subgroups, so it seldom gets from one of these plans to another one. The second half starts from the best
    plan, at a lower temperature.

    Args:
        search: Plan search with at least one scored plan.
        evaluations: Number of simulated plans. If None, it grows with the number of subgroups, up to a limit.
    """
    count = len(search.workload.subgroups)
    if evaluations is None:
        evaluations = search.share_of(min(MOST_EVALUATIONS, EVALUATIONS_EACH * count, search.affordable(MOST_OPS)))
    heat_s = HEAT * search.workload.params / count / search.machine.host_adam_params_per_s.median
    if search.best_s > _near_s(search):
        settings(search)
    starts = _starts(search, max(LEAST_STARTS, min(MOST_STARTS, STARTS_TIMES_SUBGROUPS // count)))
    each = evaluations // (2 * len(starts))
    for number, start in enumerate(starts):
        _Walk(search, start).cool(heat_s, each, Random(f"{search.seed} {number}"))
    for part in range(2):
        walk = _Walk(search, search.ordered(search.best()))
        walk.cool(heat_s / 2 ** (part + 1), evaluations // 4, Random(search.seed + part))


def _near_s(search: Search) -> float:
    return CLOSE * search.bound_with(None if search.moves_parameters else search.locations).iteration_s


def settings(search: Search) -> None:
    """Vary the best plan of a plan search, one setting at a time. Simulate each variant, and add its result to
    the search's scores.
    """
    best = search.best()
    most = max(1, min(MOST_SLOTS, sum(p in STAGED for p in best.placements)))
    values: dict[str, list[Any]] = {
        "threads": [0, *sorted(search.machine.host_adam_by_threads)],
        "staging_slots": list(range(max(1, best.prefetch), most + 1)),
        "prefetch": list(range(most + 1)),
        "overlap_forward": [True, False],
        "host_slots": HOST_SLOTS if not STORED.isdisjoint(best.placements) else [],
        "order": [UpdateOrder(host=host, device=device) for host, device in product(DIRECTIONS, repeat=2)],
    }
    for name, some in values.items():
        best = search.best()
        for value in some:
            if name != "prefetch" or value <= best.staging_slots:
                search.score(replace(best, **{name: value}))


def _starts(search: Search, most: int) -> list[Candidate]:
    known = [c for c, score in search.scores.items() if not math.isinf(score.iteration_s)]
    known.sort(key=lambda c: search.scores[c].iteration_s)
    # Dicts keep the order, so the fastest plans are first.
    slots, numbers = dict[int, Candidate](), dict[bytes, Candidate]()
    for c in known:
        slots.setdefault(c.staging_slots, c)
        numbers.setdefault(bytes(sorted(c.ways.translate(PLAIN))), c)
    return list(dict.fromkeys(chain(known[:1], slots.values(), numbers.values())))[:most]


class _Walk:
    """One simulated annealing over training plans.

    The object holds the plan that was accepted last. The next plan to try is a random change of that plan. A slower
    plan is accepted only by chance, and less often as the temperature falls.
    """

    def __init__(self, search: Search, base: Candidate) -> None:
        self.search, self.base = search, base
        self.state = base.movable(search.free)
        self.state_s = self.best_s = search.score(base).iteration_s

    def cool(self, heat_s: float, evaluations: int, rng: Random) -> None:
        near_s = _near_s(self.search)
        for step in range(evaluations):
            if self.search.best_s <= near_s:
                return
            self._try(self.state.moved(rng), heat_s * (1 - step / evaluations), rng)

    def _try(self, tried: Moved, heat_s: float, rng: Random) -> None:
        codes, issue = tried.arrays()
        options = (tried.slots, tried.prefetch, tried.threads, self.base.overlap_forward)
        most_s = self.state_s - heat_s * math.log(1.0 - rng.random())  # acceptance rule of Metropolis
        seconds = self.search.seconds(codes, *options, issue, tried.host_slots, most_s)
        if seconds > most_s:
            return
        self.state, self.state_s = tried, seconds
        if seconds < self.best_s * (1 - BETTER):
            found = replace(
                self.base,
                ways=codes.tobytes(),
                order=tried.order,
                staging_slots=tried.slots,
                prefetch=tried.prefetch,
                threads=tried.threads,
                host_slots=tried.host_slots,
            )
            self.best_s = min(self.best_s, self.search.score(found).iteration_s)
