"""Tests of the descent over shares (the fraction of the parameters with each placement), with which every
plan search begins: it makes plans faster, keeps to memory, and moves parameters only if that is worth it.
"""

import itertools
import math
import random
from dataclasses import replace

import pytest
from ebbtide.simulator.estimates.estimate import estimated
from ebbtide.simulator.estimates.job import Job
from ebbtide.simulator.estimates.presets import preset
from ebbtide.simulator.limits import GIB, Limits
from ebbtide.simulator.update.way import EARLY, PARAMETERS_ON_HOST
from ebbtide.tuner.placements.candidate import PLACEMENTS
from ebbtide.tuner.placements.decision import QUICK, PlanQuestion, decide
from ebbtide.tuner.placements.parameters_and_early import begun
from ebbtide.tuner.placements.search import Search
from ebbtide.tuner.placements.shares import WORTH_FREEING, Shares, descend, free_parameters, spaced, spread
from ebbtide.tuner.service.requests import MODELS

from tests.tuner.test_laws import job as random_job

MOST = 300  # largest number of changes
# Jobs whose best mixture of placements lies between the points of the first grid.
BETWEEN = {"Mistral 7B": ("h100-node", 30), "Qwen3 4B": ("gh200", 30), "Llama 2 13B": ("gh200", 64)}
MOVING = ("Llama 3 8B", "a100-node", 40)  # parameters in host memory make its iteration 12% shorter
STAYING = ("Llama 3.2 1B", "rtx4090", 12)


def job(model, machine, device_gib):
    have = preset(machine).with_rates(device_memory_bytes=device_gib * GIB)
    return estimated(Job.of_deepspeed(MODELS[model], sequence=2048), have).recut(5 * 10**8), have


def first_plans(work, have):
    search = begun(work, have, Limits.of(work, have))
    assert search.fits
    return search


@pytest.mark.parametrize("model", BETWEEN)
def test_the_descent_finds_mixtures_between_the_points_of_the_first_grid(model):
    search = first_plans(*job(model, *BETWEEN[model]))
    before_s = search.best_s
    descend(search, MOST)
    assert search.best_s < 0.97 * before_s
    assert search.spread.seconds(search) == pytest.approx(search.best_s)


@pytest.mark.parametrize("seed", range(6))
def test_the_descent_ends_with_nothing_slower_than_its_beginning(seed):
    search = first_plans(*random_job(seed))
    plain = min((c for c in search.scores if not c.count(EARLY)), key=lambda c: search.scores[c].iteration_s)
    starts = [Shares.from_plan(search, c) for c in (search.best(), plain)] + [
        Shares.from_bound(search, search.locations)
    ]
    starts_s = [start.seconds(search) for start in starts]
    best_s = search.best_s
    descend(search, MOST)
    assert search.spread.seconds(search) <= min(starts_s)
    assert search.best_s <= best_s


@pytest.mark.parametrize("seed", range(4))
def test_every_plan_of_the_descent_is_within_memory_by_a_simulation(seed):
    work, have = random_job(seed)
    search = first_plans(work, have)
    descend(search, MOST)
    free_parameters(search, MOST)
    fitting = [score for score in search.scores.values() if not math.isinf(score.iteration_s)]
    assert len(fitting) > 10
    for score in fitting:
        assert search.limits.hold(score.device_peak_bytes, score.host_peak_bytes, score.storage_bytes)


def test_early_updates_are_as_many_as_memory_holds():
    # Each early update needs additional host memory. The plan must fit into memory. Some of its updates must be early,
    # but not all.
    work, have = random_job(1)
    all_early = Shares({"host": 1.0}, {}, {"host": 1.0}, 1, 1, ())
    plenty = Search(work, have, Limits(10**12, 10**12)).peaks
    none, every = (
        plenty(shares.plan(Search(work, have, Limits(10**12, 10**12))))
        for shares in (replace(all_early, early={}), all_early)
    )
    middle = (none.host_peak_bytes + every.host_peak_bytes) // 2
    search = Search(work, have, Limits(10**12, middle))
    made = all_early.plan(search)
    assert search.holds(made)
    assert 0 < made.count(EARLY) < len(work.subgroups)


@pytest.mark.parametrize("about", [MOVING, STAYING])
def test_parameters_move_if_that_makes_an_iteration_clearly_shorter(about):
    search = first_plans(*job(*about))
    descend(search, MOST)
    before, before_s = search.spread, search.spread.seconds(search)
    free_parameters(search, MOST)
    assert search.moves_parameters is (about is MOVING)
    if search.moves_parameters:
        assert search.spread.seconds(search) < WORTH_FREEING * before_s
        assert search.locations == search.spread.locations
        assert "host" in search.locations
    else:
        assert search.spread is before
        assert "host" not in search.locations


@pytest.mark.parametrize("worth", [1.0, 0.8])
def test_less_than_the_least_gain_moves_no_parameters(worth, monkeypatch):
    monkeypatch.setattr("ebbtide.tuner.placements.shares.WORTH_FREEING", worth)
    search = first_plans(*job(*MOVING))
    descend(search, MOST)
    free_parameters(search, MOST)
    assert search.moves_parameters is (worth == 1.0)


@pytest.mark.parametrize("offload_parameters", [True, False])
def test_parameters_stay_on_the_gpu_if_they_must(offload_parameters):
    work, have = job(*MOVING)
    asked = PlanQuestion.of(work, have, subgroup_sizes=(), offload_parameters=offload_parameters, effort=QUICK)
    assert bool(decide(asked).chosen.count(PARAMETERS_ON_HOST)) is offload_parameters


@pytest.mark.parametrize("seed", range(20))
def test_each_placement_gets_its_share_of_the_elements(seed):
    rng = random.Random(seed)
    sizes = [rng.randint(1, 100) for _ in range(rng.randint(3, 60))]
    weights = [rng.random() * rng.choice([0, 1]) for _ in PLACEMENTS[:3]]
    weights[0] += 0.1
    shares = {p: w / sum(weights) for p, w in zip(PLACEMENTS, weights, strict=False)}
    made = spread(sizes, shares)
    for placement, share in shares.items():
        got = sum(size for size, p in zip(sizes, made, strict=True) if p == placement)
        assert abs(got - share * sum(sizes)) <= 2 * max(sizes)
        assert share or not got


@pytest.mark.parametrize(("count", "away"), [(1, 1), (7, 3), (20, 20), (163, 41), (5, 0)])
def test_parameters_in_host_memory_are_evenly_spaced(count, away):
    locations = spaced(count, away)
    there = [i for i, location in enumerate(locations) if location == "host"]
    assert len(there) == away
    assert len(locations) == (count if away else 0)
    gaps = {after - before for before, after in itertools.pairwise(there)}
    assert gaps <= ({count // away, -(-count // away)} if away else set())


@pytest.mark.parametrize("locations", [(), ("host", "device") * 5])
def test_shares_of_an_evenly_spread_plan_give_the_plan_again(locations):
    work, have = random_job(0)
    work = work.model_copy(update={"subgroups": work.subgroups[:1] * 10, "layers": work.layers[:1] * 10})
    search = Search(work, have, Limits(10**12, 10**12))
    search.locations = locations
    plan = search.ordered(search.evenly({"resident": 2, "device": 5, "host": 3}, 2))
    again = search.ordered(Shares.from_plan(search, plan).plan(search))
    assert sorted(again.placements) == sorted(plan.placements)
    assert (again.staging_slots, again.host_slots) == (plan.staging_slots, plan.host_slots)
    assert [bool(code & PARAMETERS_ON_HOST) for code in again.ways] == [
        place == "host" for place in locations or ["device"] * 10
    ]
