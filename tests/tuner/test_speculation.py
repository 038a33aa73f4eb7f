"""Plans that update before the norm: chosen where they are faster on the average, within memory."""

from functools import cache

import ebbtide.tuner
import pytest
from ebbtide.simulator import build_schedule, simulate, what_if
from ebbtide.simulator.analysis.guessed import expected
from ebbtide.simulator.engines.compiled import simulate_fast
from ebbtide.simulator.update.footprint import footprint
from ebbtide.simulator.update.guessing import shares

from tests.machines import node
from tests.tuner.test_search import workload

GIB = 2**30


def machine(room=2.8):
    """A slow link and little room: nearly all is updated on the host, for longer than forward."""
    return node(
        h2d_bytes_per_s=16e9, d2h_bytes_per_s=16e9, device_memory_bytes=int(room * GIB), host_adam_params_per_s=2e9
    )


def small(clip_rate=None):
    return workload(5, size=5 * 10**7, forward_s=0.012, clip_rate=clip_rate)


@cache
def planned(clip_rate, **limits):
    return ebbtide.tuner.plan(small(clip_rate), machine(), memory_margin=0, **limits)


def test_nobody_guesses_where_nobody_says_how_many_steps_clip():
    assert planned(None).speculate == 0


def test_where_no_step_clips_the_plan_guesses_and_is_faster():
    plain, found = planned(None), planned(0.0)
    assert found.speculate > 0
    assert found.prediction.iteration_s < 0.95 * plain.prediction.iteration_s
    assert found.prediction.iteration_s >= found.prediction.lower_bound_s
    assert found.prediction.lower_bound_s < plain.prediction.lower_bound_s
    timeline = simulate(build_schedule(small(), found), machine())
    assert found.prediction.iteration_s == pytest.approx(timeline.iteration_s)
    assert any("before the norm is known, which saves" in reason for reason in found.reasons)


def test_while_guesses_pause_the_plan_is_nearly_as_quick_as_one_that_waits():
    """It was 12% slower: its order was good for guesses alone."""
    on = machine(room=3.5)
    work = workload(8, size=5 * 10**7, forward_s=0.02)
    plain = ebbtide.tuner.plan(work, on, memory_margin=0)
    found = ebbtide.tuner.plan(work.model_copy(update={"clip_rate": 0.0}), on, memory_margin=0)
    paused = found.model_copy(update={"speculate": 0})
    waits_s, paused_s = (simulate(build_schedule(work, p), on).iteration_s for p in (plain, paused))
    assert found.speculate > 0
    assert found.prediction.iteration_s < 0.96 * waits_s
    assert paused_s <= 1.0101 * waits_s


def test_guesses_are_spread_where_the_next_forward_would_wait_for_what_lies_before_them():
    """Updates last as long as the passes: behind the norm, those of the first layers end last, and
    all layers with guesses come behind.
    """
    work = workload(8, size=5 * 10**7, forward_s=0.02, clip_rate=0.0)
    on = machine(room=3).with_rates(host_adam_params_per_s=5 * 10**7 / 0.06)
    found = ebbtide.tuner.plan(work, on, memory_margin=0)
    assert found.speculate_among > found.speculate

    def seconds(speculate, among=0):
        fields = {"speculate": speculate, "speculate_among": among}
        plan = found.model_copy(update=fields)
        return simulate(build_schedule(work, plan), on).iteration_s

    best_s = seconds(found.speculate, found.speculate_among)
    assert best_s < 0.95 * min(map(seconds, range(9)))


def test_where_every_step_clips_it_does_not():
    found = planned(1.0)
    assert found.digest == planned(None).digest
    assert any("(--clip-rate) that is no faster" in reason for reason in found.reasons)


def test_guesses_stay_within_host_memory():
    all_of_it = planned(0.0)
    less = footprint(small(), all_of_it)["host"] - GIB // 2
    found = planned(0.0, host_memory_bytes=less)
    assert found.prediction.host_peak_bytes <= less
    assert 0 < sum(found.guessed) < sum(all_of_it.guessed)
    assert found.prediction.iteration_s >= all_of_it.prediction.iteration_s * (1 - 1e-9)


def test_the_shares_of_steps_are_those_of_the_rule():
    assert shares(0.0) == (1.0, 0.0, 0.0)
    right, wrong, paused = shares(1.0)
    assert right == 0
    assert 0 < wrong < 0.01
    assert wrong + paused == pytest.approx(1)
    right, wrong, paused = shares(0.05)
    assert wrong == pytest.approx(0.05 * (right + wrong), rel=0.2)
    assert paused > 0


def test_the_expected_iteration_is_the_mean_over_the_rule_s_steps():
    work, on = small(0.2), machine()
    plan = planned(0.0)

    def run(p):
        return simulate_fast(build_schedule(work, p), on)

    right_s = run(plan).iteration_s
    plain_s = run(plan.model_copy(update={"speculate": 0})).iteration_s
    share = shares(0.2)
    mean_s = expected(work, on, plan, run).iteration_s
    least_s = share.right * right_s + (1 - share.right) * plain_s
    longest_s = max(work.subgroups) / 0.8 / on.rate("host_adam_params_per_s")
    assert right_s < plain_s
    assert least_s < mean_s <= least_s + share.wrong * longest_s * (1 + 1e-9)


def test_the_rate_at_which_steps_clip_can_be_asked_of_a_what_if():
    table = what_if(small(), machine(), ["ebbtide"], clip_rate=[None, 0.0, 0.05, 1.0])
    plain_s, never_s, some_s, always_s = table.iteration_s
    assert never_s < some_s < plain_s
    assert always_s == plain_s
    assert (table.iteration_s >= table.lower_bound_s * (1 - 1e-9)).all()
