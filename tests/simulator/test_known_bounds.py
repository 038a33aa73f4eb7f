"""Tests that a plan search's shortcut to a lower bound says what the bound itself says."""

import math
import random

import pytest
from ebbtide.simulator.analysis import bounds
from ebbtide.simulator.analysis.bounds import lower_bound
from ebbtide.simulator.estimates.estimate import estimated
from ebbtide.simulator.estimates.job import Job
from ebbtide.simulator.estimates.presets import preset
from ebbtide.tuner.placements.decision import PlanQuestion

# A model of 8e9 parameters in few layers: the linear program of its bound has few rows.
MODEL = {"layers": 5, "hidden": 11_264, "heads": 88, "vocabulary": 32_000}


def exact_s(question, limits, away):
    try:
        return lower_bound(question.workload, question.machine, limits, away=away).iteration_s
    except ValueError:
        return math.inf


@pytest.mark.parametrize(("storage", "accumulation"), [({"": 10**12}, 4), (None, 1)])
def test_the_lines_through_known_bounds_decide_as_the_bound_does(monkeypatch, storage, accumulation):
    rng, have = random.Random(0), preset("h100-node").with_rates(host_memory_bytes=80 * 2**30)
    work = estimated(Job.of_deepspeed(MODEL, accumulation=accumulation), have)
    question, known, solved = PlanQuestion.of(work, have, storage=storage), bounds.Bounds(), []

    def counted(*args, **options):
        solved.append((args[2], options["away"]))
        return lower_bound(*args, **options)

    monkeypatch.setattr(bounds, "lower_bound", counted)
    limits = sorted({question.limits.in_memory, question.limits}, key=repr)
    some = [(one, round(rng.random() * work.params)) for one in limits for _ in range(8)]
    floors_s = [exact_s(question, *one) for one in some]
    for factors in ((0.8, 1.25), (0.9999, 1.0001)):
        for one, floor_s in zip(some, floors_s, strict=True):
            for seconds in (factor * min(floor_s, 1e6) for factor in factors):
                assert known.may_take_less(work, have, *one, seconds) == (floor_s < seconds), (one, seconds)
        if factors[0] < 0.9:
            assert len(solved) < 0.8 * len(some), "no line through known bounds decided"
    assert len(solved) == len({*solved}), "a bound was computed twice"
