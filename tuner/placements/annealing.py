"""Simulated annealing from the best plan so far, where the bound says that better may be there.

Placements and orders move together here, which the local searches of `tuner.placements.search` and
`tuner.placements.refine` change in turn: between two good plans there is often none but worse ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from random import Random

import numpy as np

from simulator.engines.recipe_arrays import PLACEMENT_CODES
from simulator.update.order import UpdateOrder
from tuner.placements.refine import NEAR, taken_out
from tuner.placements.search import Candidate, Search

WORTH = 1.02  # times the bound: nearer than that, others are as good a use of the time
EVALUATIONS_EACH, MOST_EVALUATIONS = 300, 12_000  # for each subgroup; in all
HEAT = 0.08  # of a mean subgroup's update on the host: the first temperature
PLACEMENTS = tuple(PLACEMENT_CODES)
HOST, DEVICE = PLACEMENT_CODES["host"], PLACEMENT_CODES["device"]


@dataclass
class _State:
    """A plan as it is moved: the queues hold the subgroups in the order of their updates."""

    codes: list[int]
    queues: tuple[list[int], list[int]]  # host, device
    slots: int
    prefetch: int

    @classmethod
    def of(cls, c: Candidate) -> _State:
        issue = range(len(c.placements)) if c.issue is None else c.issue.tolist()
        codes = [PLACEMENT_CODES[p] for p in c.placements]
        queues = [s for s in issue if codes[s] == HOST], [s for s in issue if codes[s] != HOST]
        return cls(codes, queues, c.staging_slots, c.prefetch)

    def moved(self, rng: Random) -> _State:
        """Another one near it."""
        new = _State(list(self.codes), (list(self.queues[0]), list(self.queues[1])),
                     self.slots, self.prefetch)  # fmt: skip
        kind = rng.random()
        if kind < 0.3:
            new._swap(rng)
        elif kind < 0.5:
            new._place(rng)
        elif kind < 0.9:
            new._reorder(rng)
        elif kind < 0.95:
            new.slots = max(1, new.slots + rng.choice((-1, 1)))
        else:
            new.prefetch = max(0, new.prefetch + rng.choice((-1, 1)))
        new.slots = max(1, min(new.slots, new.codes.count(DEVICE)))
        new.prefetch = min(new.prefetch, new.slots)
        return new

    def _queue(self, subgroup: int) -> list[int]:
        return self.queues[self.codes[subgroup] != HOST]

    def _swap(self, rng: Random) -> None:
        """Two subgroups take each other's placement and place in the order."""
        one, other = rng.randrange(len(self.codes)), rng.randrange(len(self.codes))
        first, second = self._queue(one), self._queue(other)
        i, j = first.index(one), second.index(other)
        first[i], second[j] = other, one
        self.codes[one], self.codes[other] = self.codes[other], self.codes[one]

    def _place(self, rng: Random) -> None:
        subgroup, code = rng.randrange(len(self.codes)), rng.randrange(len(PLACEMENTS))
        before = self._queue(subgroup)
        place = before.index(subgroup)
        self.codes[subgroup] = code
        after = self._queue(subgroup)
        if after is not before:
            before.remove(subgroup)
            behind = (i for i, other in enumerate(after) if other > subgroup)
            place = next(behind, len(after)) if rng.random() < 0.7 else rng.randint(0, len(after))
            after.insert(place, subgroup)

    def _reorder(self, rng: Random) -> None:
        """A part of a queue goes elsewhere, turned round or not."""
        queue = self.queues[rng.random() < 0.4]
        if len(queue) < 2:
            return
        first, part = taken_out(queue, 0.5, rng)
        near = min(len(queue), max(0, first + rng.randint(-NEAR, NEAR)))
        place = near if rng.random() < 0.5 else rng.randint(0, len(queue))
        queue[place:place] = part[::-1] if rng.random() < 0.3 else part

    def candidate(self, base: Candidate) -> Candidate:
        return replace(
            base, placements=tuple(PLACEMENTS[code] for code in self.codes),
            order=UpdateOrder.from_sequences(*self.queues), staging_slots=self.slots,
            prefetch=self.prefetch,
        )  # fmt: skip

    def seconds(self, search: Search, base: Candidate) -> float:
        """As simulated; ``inf`` where it does not fit."""
        heads = iter(self.queues[0]), iter(self.queues[1])
        issue = np.array([next(heads[code != HOST]) for code in self.codes], dtype=np.int64)
        codes = np.array(self.codes, dtype=np.int8)
        options = (self.slots, self.prefetch, base.threads, base.overlap_forward, issue)
        return search.seconds(codes, *options)


def anneal(search: Search, evaluations: int | None = None) -> None:
    """Adds to the search's scores what it comes by; deterministic under the search's seed."""
    if evaluations is None:
        count = len(search.workload.subgroups)
        evaluations = min(MOST_EVALUATIONS, EVALUATIONS_EACH * count)
    floor_s, base = search.bound.iteration_s, search.ordered(search.best())
    best_s = search.score(base).iteration_s
    if best_s <= WORTH * floor_s:
        return
    rng, state, state_s = Random(search.seed), _State.of(base), best_s
    mean = search.workload.params / len(base.placements)
    first_s = HEAT * mean / search.machine.host_adam_params_per_s.median
    for step in range(evaluations):
        heat_s = first_s * (1 - step / evaluations)
        tried = state.moved(rng)
        tried_s = tried.seconds(search, base)
        if tried_s > state_s and rng.random() >= math.exp((state_s - tried_s) / heat_s):
            continue
        state, state_s = tried, tried_s
        if state_s < best_s * (1 - 1e-6):
            best_s = min(best_s, search.score(state.candidate(base)).iteration_s)
            if best_s <= WORTH * floor_s:
                return
