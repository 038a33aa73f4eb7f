"""Tests that the plan search chooses early updates (updates before the gradient norm is known) if they are
faster on the average over clipped and unclipped steps, and within memory.
"""

from functools import cache

import ebbtide.tuner
import pytest
from ebbtide import what_if
from ebbtide.simulator import build_schedule, simulate
from ebbtide.simulator.analysis.many_plans import PlanSweep, expected, times_of
from ebbtide.simulator.engines.compiled import simulate_fast
from ebbtide.simulator.limits import UNKNOWN_MARGIN, Limits
from ebbtide.simulator.schedules.footprint import footprint
from ebbtide.simulator.update.pausing import ALLOWANCE
from ebbtide.tuner.answer.rows import compare
from ebbtide.tuner.quantities import seconds_text

from tests.machines import node
from tests.tuner.test_search import workload

GIB = 2**30


def machine(room=2.8):
    """Return a simulated machine with a slow link and little GPU memory."""
    return node(
        h2d_bytes_per_s=16e9, d2h_bytes_per_s=16e9, device_memory_bytes=int(room * GIB), host_adam_params_per_s=2e9
    )


def small(clip_rate=None):
    return workload(5, size=5 * 10**7, forward_s=0.012, clip_rate=clip_rate)


@cache
def planned(clip_rate, **limits):
    return ebbtide.tuner.plan(small(clip_rate), machine(), memory_margin=0, **limits)


def test_ten_percent_are_assumed_and_told_if_no_clip_rate_is_given():
    found = planned(None)
    assert any(found.updated_early)
    assert found.prediction.clip_rate == 0.1
    assert found.prediction.iteration_s == planned(0.1).prediction.iteration_s
    assert any("10% of the steps clip (assumed" in reason for reason in found.reasons)
    assert not any("assumed" in reason for reason in planned(0.1).reasons)


def test_pieces_of_deepspeeds_subgroups_are_updated_early_too():
    pieces = ebbtide.tuner.plan(small().model_copy(update={"state_stays": True}), machine(), memory_margin=0)
    assert pieces.ways == planned(None).ways
    assert pieces.prediction.iteration_s == planned(None).prediction.iteration_s


def test_without_clipping_no_step_is_assumed_to_clip():
    assert workload(5, clip=False).expected_clip_rate == 0.0


def test_where_no_step_clips_the_plan_updates_early_and_is_faster():
    plain, found = planned(1.0), planned(0.0)
    assert any(found.updated_early)
    assert found.prediction.iteration_s < 0.95 * plain.prediction.iteration_s
    assert found.prediction.iteration_s >= found.prediction.lower_bound_s
    assert found.prediction.lower_bound_s < plain.prediction.lower_bound_s
    timeline = simulate(build_schedule(small(), found), machine())
    assert found.prediction.iteration_s == pytest.approx(timeline.iteration_s)
    assert any("before the gradient norm is known), which saves" in reason for reason in found.reasons)


def test_early_updates_are_spread_where_the_next_forward_would_wait_for_what_lies_before_them():
    work = workload(8, size=5 * 10**7, forward_s=0.02, clip_rate=0.0)
    on = machine(room=3).with_rates(host_adam_params_per_s=5 * 10**7 / 0.06)
    found = ebbtide.tuner.plan(work, on, memory_margin=0)
    early = [i for i, way in enumerate(found.ways) if way.early]
    assert early != [*range(8)][8 - len(early) :]

    def seconds(early):
        ways = tuple(way._replace(early=i in early) for i, way in enumerate(found.ways))
        return simulate(build_schedule(work, found.model_copy(update={"ways": ways})), on).iteration_s

    assert seconds(early) < 0.95 * min(seconds(range(8 - count, 8)) for count in range(9))


def test_where_every_step_clips_it_does_not():
    found = planned(1.0)
    assert not any(found.updated_early)
    assert found.prediction.clip_rate is None


def test_early_updates_stay_within_host_memory():
    all_of_it = planned(0.0)
    less = footprint(small(), all_of_it)["host"] - GIB // 2
    found = planned(0.0, host_memory_bytes=less)
    assert found.prediction.host_peak_bytes <= less
    assert 0 < sum(found.updated_early) < sum(all_of_it.updated_early)
    assert found.prediction.iteration_s >= all_of_it.prediction.iteration_s * (1 - 1e-9)


def test_the_expected_iteration_is_the_mean_over_steps_that_clip_and_that_do_not():
    plan, on = planned(0.0), machine()

    def mean_s(rate):
        return expected(small(rate), on, plan, lambda p: simulate_fast(build_schedule(small(), p), on)).iteration_s

    right_s = mean_s(0.0)
    plain_s = simulate(build_schedule(small(), plan.with_bits(early=False)), on).iteration_s
    longest_s = max(small().subgroups) / 0.8 / on.rate("host_adam_params_per_s")
    assert right_s < plain_s
    assert 0.8 * right_s + 0.2 * plain_s < mean_s(0.2) <= 0.8 * right_s + 0.2 * (plain_s + longest_s) + 1e-9
    assert mean_s(1.0) == pytest.approx((1 + ALLOWANCE) * plain_s)


def test_what_the_fused_kernel_saves_counts_the_wait_for_a_late_update_at_the_rate_without_it():
    found, on = planned(0.2), machine()
    slow = PlanSweep(small(), on, fused=False)
    right, plain = slow.result(found), slow.result(found.with_bits(early=False))
    late_s = max(small().subgroups) / on.rate("stock_host_adam_params_per_s")
    times = times_of((right.iteration_s, right.backward_s), (plain.iteration_s, plain.backward_s), late_s)
    assert any(found.updated_early)
    assert times.mean_s(0.2) < (1 + ALLOWANCE) * plain.iteration_s
    saved = seconds_text(times.mean_s(0.2) - found.prediction.iteration_s)
    assert any(reason.startswith(f"the fused host kernel saves {saved}") for reason in found.reasons)


def test_one_figure_everywhere():
    work, on = small(0.2), machine()
    found = ebbtide.tuner.plan(work, on, memory_margin=0)
    rows = compare(work, on, Limits.of(work, on, margin=0), found)
    assert any(found.updated_early)
    assert rows[0].result.iteration_s == pytest.approx(found.prediction.iteration_s)
    assert min(row.result.iteration_s for row in rows if row.role in ("plan", "variant")) == pytest.approx(
        found.prediction.iteration_s
    )
    told = found.prediction
    assert told.iteration_low_s < told.iteration_s < told.iteration_high_s
    assert any(reason.startswith("overlapping the update with forward saves") for reason in found.reasons)


def test_the_rate_at_which_steps_clip_can_be_asked_of_a_what_if():
    roomy = machine(2.8 / (1 - UNKNOWN_MARGIN))  # with the margin that a plan leaves free
    table = what_if(small(), roomy, ["ebbtide"], clip_rate=[1.0, 0.0, 0.05])
    always_s, never_s, some_s = table.iteration_s
    assert never_s < some_s < always_s
    assert (table.iteration_s >= table.lower_bound_s * (1 - 1e-9)).all()
