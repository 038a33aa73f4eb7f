"""Annealing goes on from the best plan: it fits, is no slower, and the same under a seed."""

import math
from dataclasses import replace
from random import Random

from simulator.limits import Limits
from tests.tuner.test_search import machine, workload
from tuner.placements.annealing import WORTH, _State, anneal
from tuner.placements.search import Candidate, Search

GIB = 2**30


def begun(seed=0):
    """Twenty subgroups of which eight could stay, all on the host so far."""
    work, on = workload(), machine(device_memory_bytes=9 * GIB, host_adam_params_per_s=1e9)
    search = Search(work, on, Limits.of(work, on), seed)
    search.score(Candidate(("host",) * 20))
    return search


def annealed(evaluations, seed=0):
    search = begun(seed)
    anneal(search, evaluations)
    return search, search.best()


def test_it_comes_by_a_better_plan_that_fits():
    before = begun()
    start_s = before.score(before.best()).iteration_s
    search, best = annealed(1500)
    score = search.score(best)
    assert WORTH * search.bound.iteration_s < start_s, "else there is nothing to do"
    assert score.iteration_s < 0.9 * start_s
    assert search.limits.hold(score.device_peak_bytes, score.host_peak_bytes)
    assert {"host", "resident"} <= set(best.placements)


def test_the_same_seed_gives_the_same():
    assert annealed(300, 4)[1] == annealed(300, 4)[1]
    assert annealed(300, 4)[1] != annealed(300, 5)[1]


def test_what_is_near_the_bound_is_left_alone():
    search, best = annealed(1500)
    near_s = search.score(best).iteration_s / WORTH
    search.__dict__["bound"] = replace(search.bound, iteration_s=near_s)
    known = len(search.scores)
    anneal(search)
    assert len(search.scores) == known


def test_every_move_keeps_each_subgroup_once_and_slots_for_visits_only():
    rng, state = Random(1), _State.of(Candidate(("host",) * 5 + ("device", "resident"), 1, 1))
    seen = set()
    for _ in range(500):
        state = state.moved(rng)
        assert sorted(state.queues[0] + state.queues[1]) == list(range(7))
        assert all((state.codes[s] == 0) == (s in state.queues[0]) for s in range(7))
        assert state.prefetch <= state.slots <= max(1, state.codes.count(1))
        seen.add(tuple(state.codes))
    assert len(seen) > 100


def test_what_does_not_fit_is_never_taken():
    search, best = annealed(1500)
    assert not math.isinf(search.score(best).iteration_s)
    codes = best.codes.copy()
    codes[:] = 2
    assert math.isinf(search.seconds(codes, 1, 0, 0, True, None)), "all of it cannot stay"
