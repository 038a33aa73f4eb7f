"""Tests of the plan search by simulated annealing: the resulting plan fits into memory, is no slower than
the plan from which the search starts, and depends only on the seed.
"""

import math
from dataclasses import replace
from random import Random

import pytest
from ebbtide.simulator import Quantity
from ebbtide.simulator.limits import Limits
from ebbtide.simulator.update.order import UpdateOrder, issue_order
from ebbtide.simulator.update.recipes import RECIPES
from ebbtide.simulator.update.way import EARLY, PARAMETERS_ON_HOST, PLACEMENT_CODES, SUMMED, Way, of_codes
from ebbtide.tuner.placements.candidate import CHOICES, QUEUES, STAGED, Candidate, Freedom
from ebbtide.tuner.placements.decision import CLOSE, anneal, settings
from ebbtide.tuner.placements.search import Search
from ebbtide.tuner.placements.shares import try_first

from tests.tuner.test_search import machine, workload

GIB = 2**30


def begun(seed=0):
    """Return a plan search for twenty subgroups that has so far simulated one plan: updates of all subgroups
    on the CPU.

    The GPU memory could hold the optimizer state of eight subgroups throughout training (placement ``resident``).
    """
    work, on = workload(), machine(device_memory_bytes=9 * GIB, host_adam_params_per_s=1e9)
    search = Search(work, on, Limits.of(work, on), seed)
    search.score(Candidate.of(("host",) * 20))
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
    assert CLOSE * search.bound.iteration_s < start_s, "annealing has nothing to improve"
    assert score.iteration_s < 0.9 * start_s
    assert search.limits.hold(score.device_peak_bytes, score.host_peak_bytes)
    assert {"host", "resident"} <= set(best.placements)


def test_the_same_seed_gives_the_same():
    assert annealed(300, 4)[1] == annealed(300, 4)[1]
    assert annealed(300, 4)[1] != annealed(300, 5)[1]


def test_what_is_near_the_bound_is_left_alone(monkeypatch):
    search, best = annealed(1500)
    near_s = search.score(best).iteration_s / CLOSE
    bound = replace(search.bound_with(()), iteration_s=near_s)
    monkeypatch.setattr(search, "bound_with", lambda _locations: bound)
    known = len(search.scores)
    anneal(search)
    assert len(search.scores) == known


def codes(count):
    return [PLACEMENT_CODES[CHOICES[i % len(CHOICES)]] for i in range(count)]


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize("parameters", [False, True])
def test_moves_turn_the_bits_that_they_may_turn_and_make_ways_that_there_are(early, sums, parameters):
    free = Freedom(CHOICES, early, sums, parameters)
    rng, state, seen = Random(3), Candidate(bytes(codes(9)), 2, 1).movable(free), set()
    for _ in range(500):
        state = state.moved(rng)
        ways = of_codes(state.codes)
        assert all(way == way.fitted() for way in ways)
        seen |= {*state.codes}
    bits = {EARLY: early, SUMMED: sums, PARAMETERS_ON_HOST: parameters}
    for bit, allowed in bits.items():
        assert any(code & bit for code in seen) is allowed
    if all(bits.values()):
        assert {way for way in of_codes(seen) if way.early} == {
            Way(placement, early=True, sum_on_device=summed)
            for placement, summed in (("host", False), ("host", True), ("device", False))
        }


def test_every_move_keeps_each_subgroup_once_in_its_recipes_queue():
    rng, state = Random(1), Candidate(bytes(codes(9)), 2, 1).movable(Freedom())
    seen = set()
    for _ in range(500):
        state = state.moved(rng)
        assert sorted(s for sequence in state.sequences for s in sequence) == list(range(9))
        for queue, sequence in zip(QUEUES, state.sequences, strict=True):
            assert all(RECIPES[state.placements[s]].queue == queue for s in sequence)
        staged = sum(p in STAGED for p in state.placements)
        assert state.prefetch <= state.slots <= max(1, staged)
        seen.add(state.placements)
    assert len(seen) > 100


def test_what_is_issued_is_the_order_of_the_plan_that_it_becomes():
    rng, state = Random(2), Candidate(bytes(codes(9)), 2, 1).movable(Freedom())
    for _ in range(50):
        state = state.moved(rng)
        placed, issue = state.arrays()
        assert [CHOICES[code] for code in placed] == list(state.placements)
        assert issue.tolist() == list(issue_order(state.placements, state.order))


def test_first_plans_mix_every_placement_that_there_is_and_try_slots():
    search = begun()
    try_first(search)
    assert {p for c in search.scores for p in c.placements} == set(CHOICES)
    assert {c.staging_slots for c in search.scores} > {1, 2, 4}
    assert all(sum(p in STAGED for p in c.placements) >= c.prefetch for c in search.scores)


def test_options_are_tried_where_they_help():
    work = workload(6)
    by_threads = {1: Quantity.exact(9e9), 4: Quantity.exact(2e9)}
    on = machine(host_adam_by_threads=by_threads, host_adam_params_per_s=2e9)
    search = Search(work, on, Limits.of(work, on))
    search.score(Candidate.of(("host",) * 6, overlap_forward=False))
    settings(search)
    assert (search.best().threads, search.best().overlap_forward) == (1, True)


def test_other_orders_of_the_updates_are_found():
    search = begun()
    updated_early = search.ordered(Candidate.of(("host",) * 20, order=UpdateOrder(host="arrival")))
    search = Search(search.workload, search.machine, search.limits)  # a search that knows only this plan
    before_s = search.score(updated_early).iteration_s
    settings(search)
    assert search.best().placements == updated_early.placements
    assert search.score(search.best()).iteration_s < before_s


def test_what_does_not_fit_is_never_taken():
    search, best = annealed(1500)
    assert not math.isinf(search.score(best).iteration_s)
    codes = best.codes.copy()
    codes[:] = 2
    assert math.isinf(search.seconds(codes, 1, 0, 0, True, None)), "not all state fits into GPU memory"
