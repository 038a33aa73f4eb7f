"""Tests of the predicted goodput of training under failures: the renewal formula against simulated failures."""

import math

import pytest
from ebbtide.simulator.analysis.goodput import (
    CheckpointCost,
    Failures,
    best_interval_steps,
    checkfreq_interval_steps,
    daly_interval,
    expected_goodput,
    optimal_interval,
    young_interval,
)
from scipy.optimize import minimize_scalar
from scipy.special import lambertw

from studies.goodput import availability_interval, cost, failures_of, simulated_goodput


def asked(iteration_s, stall_s, interference_s, steps, mtbf_s, restart_s=0.0, persist_s=0.0):
    """Build the arguments of `expected_goodput` and `simulated_goodput` from plain numbers, and return them as
    a tuple.
    """
    cost = CheckpointCost(stall_s, interference_s, persist_s)
    return iteration_s, cost, Failures(mtbf_s, restart_s), steps


# iteration, stall, interference, interval, mtbf, restart, persist
CASES = [
    (2.0, 1.0, 0.5, 50, 4_000.0, 200.0, 0.0),
    (2.0, 1.0, 0.5, 50, 400.0, 200.0, 60.0),  # restarts fail a third of the time
    (5.0, 0.0, 4.0, 10, 900.0, 0.0, 54.0),  # a commit takes the whole interval
    (1.0, 20.0, 0.0, 500, 11_135.0, 600.0, 3.0),
    (0.5, 0.1, 0.0, 10_000, 2_500.0, 30.0, 10.0),  # the interval is longer than two MTBFs
]


@pytest.mark.parametrize("case", CASES)
def test_formula_and_monte_carlo_agree_within_one_percent(case):
    intervals = 20_000 if case[3] == 10_000 else 100_000
    simulated = simulated_goodput(*asked(*case), intervals=intervals, seed=7)
    assert simulated == pytest.approx(expected_goodput(*asked(*case)), rel=0.01)


def test_known_value_of_the_formula():
    # L = 100 + 10 = M and R = 0: E = M (e - 1), goodput = 100 / (110 (e - 1)).
    value = expected_goodput(*asked(1.0, 10.0, 0.0, 100, 110.0, 0.0))
    assert value == pytest.approx(100 / (110 * (math.e - 1)), rel=1e-12)


def test_a_job_that_never_fails_pays_only_for_checkpoints():
    assert expected_goodput(*asked(1.0, 4.0, 1.0, 95, math.inf, 300.0)) == pytest.approx(0.95)
    assert expected_goodput(*asked(1.0, 4.0, 1.0, 0, math.inf, 300.0)) == 1.0
    assert best_interval_steps(*asked(1.0, 4.0, 1.0, 0, math.inf)[:3]) == 0
    assert expected_goodput(*asked(1.0, 4.0, 1.0, 95, 1e15, 300.0)) == pytest.approx(0.95, rel=1e-9)


def test_a_job_that_fails_all_the_time_gets_nowhere_without_overflow():
    assert expected_goodput(*asked(1.0, 1.0, 0.0, 100, 0.01, 600.0)) == 0.0


@pytest.mark.parametrize("relative_cost", [1e-9, 1e-4, 0.1, 2.0])
def test_optimal_interval_is_lambert_w(relative_cost):
    x = 1 + lambertw(-math.exp(-1 - relative_cost)).real
    assert optimal_interval(relative_cost * 5e3, 5e3) == pytest.approx(x * 5e3, rel=1e-3)


def test_optimal_interval_is_where_goodput_peaks():
    def lost(work_s):
        return -expected_goodput(*asked(work_s, 30.0, 0.0, 1, 7_000.0, 500.0))

    peak = minimize_scalar(lost, bounds=(1.0, 7_000.0), method="bounded", options={"xatol": 1e-4})
    assert optimal_interval(30.0, 7_000.0) == pytest.approx(peak.x, rel=1e-4)


@pytest.mark.parametrize("persist_s", [0.0, 40.0, 900.0])
@pytest.mark.parametrize("stall_s", [0.0, 0.3, 25.0])
def test_best_interval_beats_every_other(stall_s, persist_s):
    args = (3.0, CheckpointCost(stall_s, 0.2, persist_s), Failures(2_000.0, 100.0))
    best = best_interval_steps(*args)
    value = expected_goodput(*args, best)
    feasible = [k for k in range(1, 700) if 3.0 * k + stall_s + 0.2 >= persist_s]
    others = [expected_goodput(*args, k) for k in feasible]
    assert value == pytest.approx(max(others), rel=1e-12)


def test_the_textbook_intervals_approach_the_exact_one_when_checkpoints_are_cheap():
    exact = optimal_interval(1.0, 1e6)
    assert young_interval(1.0, 1e6) == pytest.approx(exact, rel=1e-3)
    assert daly_interval(1.0, 1e6) == pytest.approx(exact, rel=1e-3)
    assert availability_interval(1.0, Failures(1e6)) - 1.0 == pytest.approx(exact, rel=1e-3)
    assert young_interval(10.0, 500.0) == pytest.approx(100.0)
    assert daly_interval(10.0, 500.0) == pytest.approx(90.0)
    assert availability_interval(10.0, Failures(300.0, 100.0)) == pytest.approx(10 + math.sqrt(8100.0))


def test_daly_is_nearer_than_young_when_checkpoints_are_dear():
    exact = optimal_interval(400.0, 3_000.0)
    assert abs(daly_interval(400.0, 3_000.0) - exact) < abs(young_interval(400.0, 3_000.0) - exact)


def test_checkfreq_keeps_the_overhead():
    steps = checkfreq_interval_steps(2.0, CheckpointCost(1.0, 0.4))
    assert 1.4 / (2.0 * steps) <= 0.035 < 1.4 / (2.0 * (steps - 1))
    assert checkfreq_interval_steps(2.0, CheckpointCost(0.0, persist_s=61.0)) == 31


def test_storage_limits_many_nodes_and_nodes_limit_few():
    assert cost(8).persist_s == pytest.approx(405e9 * 14 * 8 / 16_384 / 2e9)  # one node
    assert cost(8).persist_s == pytest.approx(cost(4_096).persist_s)
    assert cost(100_000).persist_s == pytest.approx(405e9 * 14 * 100_000 / 16_384 / 2e12)
    assert failures_of(8).mtbf_s == pytest.approx(512 * failures_of(4_096).mtbf_s)


def test_regular_failures_differ_from_exponential_ones():
    simulated = simulated_goodput(*asked(1.0, 2.0, 0.0, 100, 1.0, 50.0), intervals=9_000, gap_s=lambda: 1_000.0)
    assert simulated == pytest.approx(0.9, rel=2e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"iteration_s": 0.0}, "iteration_s must be > 0, but got 0.0"),
        ({"iteration_s": math.nan}, "iteration_s must be > 0, but got nan"),
        ({"mtbf_s": -1.0}, "mtbf_s must be > 0, but got -1.0"),
        ({"stall_s": -1.0}, "stall_s must be finite and >= 0, but got -1.0"),
        ({"restart_s": math.inf}, "restart_s must be finite"),
        ({"steps": 0}, "interval_steps must be >= 1 if the job can fail"),
        ({"steps": -3}, "interval_steps must be >= 0, but got -3"),
        ({"persist_s": 1e6}, "raise interval_steps"),
    ],
)
def test_bad_input_says_the_rule_and_the_value(change, message):
    good = {"iteration_s": 1.0, "stall_s": 1.0, "interference_s": 0.0, "steps": 10, "mtbf_s": 1e4, "restart_s": 60.0}
    with pytest.raises(ValueError, match=message):
        expected_goodput(*asked(**{**good, **change}))
