"""Tests of early updates (updates before the gradient norm is known) in the simulator: the rule that
pauses them, their ops, and their memory.
"""

from itertools import pairwise
from random import Random

import pytest
from ebbtide.simulator import Plan, simulate
from ebbtide.simulator.schedule import OpKind
from ebbtide.simulator.schedules.ebbtide import build_schedule
from ebbtide.simulator.schedules.footprint import footprint
from ebbtide.simulator.update.pausing import FIRST_BALANCE, PauseRule, StepTimes

from tests.machines import machine, workload


def planned(speculate, placement="host", **fields):
    return Plan(subgroup_size=10, placement=Plan.runs([placement] * 4), speculate=speculate, **fields)


def over_plain(times, clips):
    """Return the total time of steps under `PauseRule`, which allows or pauses early updates, divided by the time
    of these steps without early updates.

    Args:
        times: Times of a step whose early updates are kept, of one whose early updates are redone, and of one
            without early updates (`StepTimes`).
        clips: For each step, True if it clips, so that early updates are redone.
    """
    rule, total_s = PauseRule(times), 0.0
    for clipped in clips:
        early = rule.on
        total_s += (times.wrong_s if clipped else times.right_s) if early else times.plain_s
        rule.stepped((not clipped) if early else None)
    return total_s / (len(clips) * times.plain_s)


def at_rate(rate, steps=600, seed=0):
    rng = Random(f"{seed} {rate}")
    return [rng.random() < rate for _ in range(steps)]


def in_bursts(period, steps=600):
    return [step // period % 2 == 1 for step in range(steps)]


def drifting(steps=600):
    rng = Random(1)
    return [rng.random() < step / steps for step in range(steps)]


SAVES, COSTS = (0.02, 0.1, 0.3, 0.5), (0.02, 0.1, 0.3)
TIMES = [StepTimes(1 - saves, 1.0, 1 + costs) for saves in SAVES for costs in COSTS]


@pytest.mark.parametrize("times", TIMES, ids=str)
def test_early_updates_never_cost_more_than_a_percent(times):
    sequences = [at_rate(rate) for rate in (0, 0.05, 0.1, 0.2, 0.5, 0.8, 1)]
    sequences += [in_bursts(period) for period in (1, 10, 100, 300)]
    sequences += [drifting(), drifting()[::-1]]
    assert max(over_plain(times, clips) for clips in sequences) <= 1.01


@pytest.mark.parametrize("times", TIMES, ids=str)
def test_an_adversary_wins_no_more_than_a_percent(times):
    rule, early = PauseRule(times), 0
    for _ in range(600):
        early += rule.on
        rule.stepped(False if rule.on else None)
    assert early * times.costs / 600 <= 0.01
    assert early > 0


@pytest.mark.parametrize("rate", [0.0, 0.05, 0.1, 0.2])
@pytest.mark.parametrize("times", TIMES, ids=str)
def test_the_rule_is_within_three_percent_of_always_and_of_never_updating_early(times, rate):
    clips = at_rate(rate, 2000)
    always = sum(times.wrong_s if clipped else times.right_s for clipped in clips) / 2000
    assert over_plain(times, clips) <= 1.03 * min(always, 1.0)


def test_the_predicted_mean_is_that_of_the_rule():
    for times in TIMES:
        for rate in (0.0, 0.05, 0.1, 0.5, 1.0):
            found = sum(over_plain(times, at_rate(rate, 1000, seed)) for seed in range(3)) / 3
            assert times.mean_s(rate) == pytest.approx(found, rel=0.03)


def test_after_a_burst_early_updates_come_back():
    rule = PauseRule(StepTimes(0.8, 1.0, 1.2))
    while rule.on:
        rule.stepped(False)
    paused = 0
    while not rule.on:
        rule.stepped(None)
        paused += 1
    assert 10 < paused < 100
    rule.stepped(True)
    assert rule.on
    assert (rule.kept, rule.redone) == (1, FIRST_BALANCE)


def test_the_last_subgroups_begin_in_backward_and_nothing_is_new_before_the_norm():
    work = workload(gradient_accumulation_steps=2)
    schedule = build_schedule(work, planned(2))
    norms = {op.iteration: op.id for op in schedule.of_kind(OpKind.NORM)}
    early_updates = schedule.of_kind(OpKind.UPDATE_HOST_EARLY)
    early = {op.subgroup for op in early_updates}
    assert early == {2, 3}
    assert all(op.id < norms[op.iteration] for op in early_updates)
    backwards = [op for op in schedule.of_kind(OpKind.BACKWARD) if op.iteration == 0]
    for op in early_updates:
        if op.iteration == 0:
            assert op.id > backwards[len(backwards) // 2].id, "an early update belongs to the first micro-batch"
    assert {op.subgroup for op in schedule.of_kind(OpKind.UPDATE_HOST)} == {0, 1}
    for op in schedule.of_kind(OpKind.PARAMETER_H2D):
        assert (norms[op.iteration] in op.after) == (op.subgroup in early)


def test_updates_move_under_backward():
    work = workload(forward_s=1.0, backward_s=3.0)
    on = machine(host_adam_params_per_s=5.0, h2d_bytes_per_s=1e4, d2h_bytes_per_s=1e4)
    waits, updated_early = (simulate(build_schedule(work, planned(n)), on).iteration_s for n in (0, 4))
    assert work.forward_s + work.backward_s <= updated_early < waits


def test_state_and_parameters_are_there_twice():
    work = workload()
    held = [footprint(work, planned(n))["host"] for n in range(5)]
    slots = min(2, 4) * 10 * work.wire_bytes
    assert [b - a for a, b in pairwise(held[:3])] == [10 * (12 + 2)] * 2
    assert held[4] - held[0] == 4 * 10 * (12 + 2) - slots  # no update waits for a slot


def test_early_staged_updates_come_as_gradients_do_and_return_with_their_parameters():
    work, on = workload(), machine(h2d_bytes_per_s=120, d2h_bytes_per_s=140, device_adam_params_per_s=1e9)
    plan = planned(0, "device", staging_slots=1, prefetch=1, speculate_visits=4)
    schedule = build_schedule(work, plan)
    timeline = simulate(schedule, on)
    spans = [s for s in timeline.spans if s.iteration == 0]
    norm = next(s for s in spans if s.kind == OpKind.NORM)

    def begins(kind):
        return {s.subgroup: s.start_s - norm.end_s + 8 for s in spans if s.kind == kind}

    assert begins(OpKind.STATE_H2D) == pytest.approx({3: 2, 2: 4, 1: 6, 0: 8}, abs=1e-6)
    assert begins(OpKind.STATE_D2H) == pytest.approx({3: 3, 2: 5, 1: 7, 0: 9}, abs=1e-6)
    assert {op.work for op in schedule.of_kind(OpKind.STATE_D2H)} == {10 * (12 + 2)}
    assert not schedule.of_kind(OpKind.UPDATE_DEVICE)
    assert begins(OpKind.PARAMETER_H2D)[0] == pytest.approx(10, abs=1e-6)
    assert timeline.iteration_s == pytest.approx(8 + 2 + 20 / 120 + 4, abs=1e-6)
    waits = plan.with_bits(early=False)
    assert simulate(build_schedule(work, waits), on).iteration_s > timeline.iteration_s + 0.4


def test_what_waits_for_the_norm_comes_in_after_the_early_updates():
    plan = planned(0, "device", staging_slots=2, prefetch=2, speculate_visits=2)
    schedule = build_schedule(workload(), plan, iterations=1)
    norm = schedule.of_kind(OpKind.NORM)[0].id
    fetches = schedule.of_kind(OpKind.STATE_H2D)
    assert [op.subgroup for op in fetches] == [3, 2, 0, 1]
    assert all(op.id < norm for op in fetches)
    location = {op.subgroup: op.id for op in schedule.of_kind(OpKind.STATE_D2H)}
    assert [location[3] in fetches[2].after, location[2] in fetches[3].after] == [True, True]


def test_what_an_early_staged_update_takes_of_each_memory():
    work = workload((64, 64, 64, 64))
    held = [footprint(work, planned(0, "device", speculate_visits=n)) for n in range(3)]
    assert [b["host"] - a["host"] for a, b in pairwise(held)] == [64 * (12 + 2)] * 2
    assert [b["device"] - a["device"] for a, b in pairwise(held)] == [2 * 64 * 2, 0]


def test_what_cannot_be_updated_early_is_not():
    for placement in ("device", "resident", "stored"):
        assert not any(planned(4, placement).updated_early)
    for placement in ("host", "resident", "stored"):
        assert not any(planned(0, placement, speculate_visits=4).updated_early)
    locations = Plan.runs(["host"] * 4, "home")
    assert not any(planned(4, parameter_home=locations).updated_early)
    assert not any(planned(0, "device", parameter_home=locations, speculate_visits=4).updated_early)
    assert planned(0, "device", speculate_visits=3).updated_early == (False, True, True, True)
    assert planned(9).updated_early == (True,) * 4
    assert planned(2, speculate_among=3).updated_early == (False, False, True, True)
    assert planned(2, speculate_among=4).updated_early == planned(2, speculate_among=9).updated_early
    assert planned(2, speculate_among=4).updated_early == (False, True, False, True)
