"""Tests of the intervals of predicted times and of gains: what two ways to train share cancels in their ratio."""

import math

import pytest
from ebbtide.simulator import preset, workload_from_model
from ebbtide.simulator.limits import Limits
from ebbtide.tuner.answer.rows import alternatives, compare
from ebbtide.tuner.answer.verdict import TOLD, verdict
from ebbtide.tuner.calibrate.interval import Spread, causes
from ebbtide.tuner.placements.planning import quick_plan


def rows_on(name, **job):
    machine = preset(name)
    work = workload_from_model("Llama 3.2 3B", machine, sequence=1024, **job)
    limits = Limits.of(work, machine)
    made = quick_plan(work, machine, limits)
    return machine, work, compare(work, machine, limits, made, others=False)


def test_what_both_share_cancels_in_the_ratio():
    one = Spread({"link": 0.2, "products": 0.1}, own=0.0, shared=0.3)
    assert one.factor_over(Spread({"link": 0.2, "products": 0.1}, 0.0, 0.3)) == 1.0
    apart = Spread({"link": 0.1, "CPU": 0.2}, own=0.05, shared=0.3)
    sigma = math.hypot(0.1, 0.1, 0.2, 0.05)
    assert one.factor_over(apart) == apart.factor_over(one) == pytest.approx(math.exp(1.6449 * sigma), rel=1e-4)


@pytest.mark.parametrize("name", ["rtx4090", "a100-80gb"])
def test_a_gain_has_the_interval_of_its_causes(name):
    machine, work, rows = rows_on(name)
    by_role = {row.role: row for row in rows}
    plan, stock = by_role["plan"], by_role["stock"]
    assert {cause.name for cause in causes(machine, work)} == set(stock.spread.parts)
    low, high = stock.over(plan)
    gain = stock.result.iteration_s / plan.result.iteration_s
    assert low < gain < high
    # Narrower than if both times were drawn apart from each other.
    assert high / low < (stock.spread.factor * plan.spread.factor) ** 2
    told = {p.strategy: p for p in alternatives(rows)}[stock.label]
    assert (told.over_plan_low, told.over_plan_high) == pytest.approx((low, high))
    assert told.iteration_low_s < told.iteration_s < told.iteration_high_s
    fields = plan.fields(stock.result.iteration_s, None, None)
    assert (fields["speedup_low"], fields["speedup_high"]) == pytest.approx((low, high))
    assert plan.over(plan) is None


@pytest.mark.parametrize("high", [0.99 * TOLD, 1.01 * TOLD])
def test_a_gain_that_is_not_known_to_a_factor_of_two_is_told_without_a_figure(high):
    _, _, rows = rows_on("rtx4090")
    told = [(row.role, row.prediction) for row in rows if row.role in ("plan", "stock")]
    (_, plan), (_, stock) = sorted(told, key=lambda pair: pair[0])
    plan = plan.model_copy(update={"lower_bound_s": 0.9 * plan.iteration_s})
    interval = {"over_plan_low": 2.0, "over_plan_high": 2.0 * high}
    sentence = verdict([("plan", plan), ("stock", stock.model_copy(update=interval))]).sentence
    gain = f"{stock.iteration_s / plan.iteration_s:.1f}x"
    if high < TOLD:
        assert f"{gain} (2x to 4x) as fast as stock DeepSpeed" in sentence
    else:
        assert gain not in sentence
        assert "faster (2x to 4x as fast, in nine runs of ten) than stock DeepSpeed" in sentence
