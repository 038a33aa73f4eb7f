"""Tests that branch and bound, and the plan search, find the same fastest plan as simulating every plan."""

import random
from itertools import product
from math import factorial

import ebbtide.tuner
import numpy as np
import pytest
from ebbtide.simulator.analysis.many_plans import PlanSweep
from ebbtide.simulator.limits import Limits
from ebbtide.simulator.update.way import SUMMED
from ebbtide.tuner.placements.candidate import Candidate
from ebbtide.tuner.placements.search import Search
from ebbtide.tuner.placements.shares import try_first

from studies.optimality.optimum import MOST_SUBGROUPS, optimum, orders
from studies.optimality.pairs import random_pair
from tests.machines import random_machine, random_workload


def pairs(count, subgroups):
    rng = np.random.default_rng([3, subgroups])
    return [random_pair(rng, counts=(subgroups, subgroups)) for _ in range(count)]


def begun(workload, machine):
    search = Search(workload, machine, Limits.of(workload, machine))
    search.score(Candidate.of(("host",) * len(workload.subgroups)))
    return search


def by_brute_force(workload, machine):
    """Return the shortest simulated iteration time of all plans that fit into memory: every placement of every
    subgroup, every number of staging buffers, of prefetches and of gradient sums on the GPU.
    """
    limits, sweep = Limits.of(workload, machine), PlanSweep(workload, machine)
    best = np.inf
    for codes in product(range(3), repeat=len(workload.subgroups)):
        placement = np.array(codes, dtype=np.int8)
        staged = codes.count(1)
        for slots in range(1, staged + 1) if staged else (0,):
            for prefetch in range(slots + 1):
                for sums in range(1 + codes.count(0) * sweep.held.sums):
                    stay = placement.copy()
                    stay[np.flatnonzero(placement == 0)[:sums]] += SUMMED  # code 0 is host
                    row = sweep.evaluate(stay, slots, prefetch)
                    if limits.hold(int(row[6]), int(row[7])):
                        best = min(best, float(row[0]))
    return best


@pytest.mark.parametrize("number", range(4))
def test_branch_and_bound_against_brute_force_and_the_search(number):
    workload, machine = pairs(4, 5)[number]
    truth = by_brute_force(workload, machine)
    found = optimum(begun(workload, machine))
    assert found.iteration_s == pytest.approx(truth, rel=1e-9)
    assert found.pruned > 0
    plan = ebbtide.tuner.plan(workload, machine, subgroup_sizes=())
    assert plan.prediction.iteration_s == pytest.approx(truth, rel=1e-9)
    assert plan.prediction.lower_bound_s <= truth * (1 + 1e-9)


def test_fewer_sums_on_the_device_than_fit_may_be_better():
    # With a gradient sum on the GPU, an iteration would take 0.25% longer, because ops overlap differently.
    rng = random.Random(411)
    workload, machine = random_workload(rng), random_machine(rng)
    workload = workload.model_copy(update={"gradient_accumulation_steps": 4})
    found = optimum(begun(workload, machine))
    assert found.iteration_s <= by_brute_force(workload, machine) * (1 + 1e-9)
    assert not found.candidate.count(SUMMED)


def test_the_optimum_is_no_worse_than_what_was_known_and_pruning_spares_simulations():
    workload, machine = pairs(1, 5)[0]
    alone = optimum(begun(workload, machine))
    searched = begun(workload, machine)
    try_first(searched)
    before = searched.score(searched.best()).iteration_s
    after = optimum(searched)
    assert after.iteration_s <= before
    assert after.iteration_s == pytest.approx(alone.iteration_s, rel=1e-9)
    assert after.simulated <= alone.simulated < 3**5 * 5


def test_orders_are_all_of_them_and_each_once():
    found = list(orders({"host": 3, "device": 2, "resident": 2}))
    assert len(found) == len(set(found)) == factorial(7) // (6 * 2 * 2)
    assert all(o.count("host") == 3 and o.count("device") == 2 for o in found)


def test_too_many_subgroups_are_refused():
    workload, machine = random_pair(np.random.default_rng(0))
    assert len(workload.subgroups) > MOST_SUBGROUPS
    with pytest.raises(ValueError, match=f"limited to {MOST_SUBGROUPS} subgroups, but got"):
        optimum(begun(workload, machine))
