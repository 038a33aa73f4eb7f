"""Updates before the norm: the rule that pauses them, their ops, what they take."""

from itertools import pairwise

import pytest
from ebbtide.simulator import Plan, simulate
from ebbtide.simulator.schedule import OpKind
from ebbtide.simulator.schedules.ebbtide import build_schedule
from ebbtide.simulator.update.footprint import footprint
from ebbtide.simulator.update.guessing import LONGEST_PAUSE_STEPS, PAUSE_STEPS, Guessing

from tests.machines import machine, workload


def planned(speculate, placement="host", **fields):
    return Plan(subgroup_size=10, placement=Plan.runs([placement] * 4), speculate=speculate, **fields)


def guesses(outcomes):
    """Of each step, whether it guesses; those that do take the next outcome."""
    rule, left, made = Guessing(), list(outcomes), []
    while left:
        made.append(rule.on)
        rule.stepped(left.pop(0) if rule.on else None)
    return made


def test_one_wrong_step_in_eight_does_not_pause():
    assert all(guesses([False, *[True] * 7] * 4))


def test_two_wrong_steps_pause_and_each_wrong_try_doubles_the_pause():
    made = guesses([True, False, False, *[False] * 6])
    pauses = [len(run) for run in "".join("x" if m else "." for m in made).split("x") if run]
    expected = [min(PAUSE_STEPS * 2**n, LONGEST_PAUSE_STEPS) for n in range(6)]
    assert pauses == expected


def test_a_right_try_ends_the_doubling():
    made = guesses([False, False, False, True, False, False, True])
    pauses = [len(run) for run in "".join("x" if m else "." for m in made).split("x") if run]
    assert pauses == [PAUSE_STEPS, 2 * PAUSE_STEPS, PAUSE_STEPS]


def test_the_last_subgroups_begin_in_backward_and_nothing_is_new_before_the_norm():
    work = workload(gradient_accumulation_steps=2)
    schedule = build_schedule(work, planned(2))
    norms = {op.iteration: op.id for op in schedule.of_kind(OpKind.NORM)}
    guesses = schedule.of_kind(OpKind.UPDATE_GUESSED)
    early = {op.subgroup for op in guesses}
    assert early == {2, 3}
    assert all(op.id < norms[op.iteration] for op in guesses)
    backwards = [op for op in schedule.of_kind(OpKind.BACKWARD) if op.iteration == 0]
    for op in guesses:
        if op.iteration == 0:
            assert op.id > backwards[len(backwards) // 2].id, "not of the first micro-batch"
    assert {op.subgroup for op in schedule.of_kind(OpKind.UPDATE_HOST)} == {0, 1}
    for op in schedule.of_kind(OpKind.PARAMETER_H2D):
        assert (norms[op.iteration] in op.after) == (op.subgroup in early)


def test_updates_move_under_backward():
    """Updates that take twice as long as forward hold it up; in backward they do not."""
    work = workload(forward_s=1.0, backward_s=3.0)
    on = machine(host_adam_params_per_s=5.0, h2d_bytes_per_s=1e4, d2h_bytes_per_s=1e4)
    waits, guessed = (simulate(build_schedule(work, planned(n)), on).iteration_s for n in (0, 4))
    assert work.forward_s + work.backward_s <= guessed < waits


def test_state_and_parameters_are_there_twice():
    work = workload()
    held = [footprint(work, planned(n))["host"] for n in range(5)]
    slots = min(2, 4) * 10 * work.wire_bytes
    assert [b - a for a, b in pairwise(held[:3])] == [10 * (12 + 2)] * 2
    assert held[4] - held[0] == 4 * 10 * (12 + 2) - slots  # nobody waits for a slot


def test_guessed_visits_come_as_gradients_do_and_go_home_with_their_parameters():
    """One slot, and a second each way: of the last one the norm is known while it comes in."""
    work, on = workload(), machine(h2d_bytes_per_s=120, d2h_bytes_per_s=140, device_adam_params_per_s=1e9)
    plan = planned(0, "device", staging_slots=1, prefetch=1, speculate_visits=4)
    schedule = build_schedule(work, plan)
    timeline = simulate(schedule, on)
    spans = [s for s in timeline.spans if s.iteration == 0]
    norm = next(s for s in spans if s.kind == OpKind.NORM)

    def begins(kind):
        """Of each subgroup, in seconds from the begin of backward."""
        return {s.subgroup: s.start_s - norm.end_s + 8 for s in spans if s.kind == kind}

    assert begins(OpKind.STATE_H2D) == pytest.approx({3: 2, 2: 4, 1: 6, 0: 8}, abs=1e-6)
    assert begins(OpKind.STATE_D2H) == pytest.approx({3: 3, 2: 5, 1: 7, 0: 9}, abs=1e-6)
    assert {op.work for op in schedule.of_kind(OpKind.STATE_D2H)} == {10 * (12 + 2)}
    assert not schedule.of_kind(OpKind.UPDATE_DEVICE)
    assert begins(OpKind.PARAMETER_H2D)[0] == pytest.approx(10, abs=1e-6)
    assert timeline.iteration_s == pytest.approx(8 + 2 + 20 / 120 + 4, abs=1e-6)
    waits = plan.model_copy(update={"speculate_visits": 0})
    assert simulate(build_schedule(work, waits), on).iteration_s > timeline.iteration_s + 0.4


def test_what_waits_for_the_norm_comes_in_behind_the_guesses():
    plan = planned(0, "device", staging_slots=2, prefetch=2, speculate_visits=2)
    schedule = build_schedule(workload(), plan, iterations=1)
    norm = schedule.of_kind(OpKind.NORM)[0].id
    fetches = schedule.of_kind(OpKind.STATE_H2D)
    assert [op.subgroup for op in fetches] == [3, 2, 0, 1]
    assert all(op.id < norm for op in fetches)
    home = {op.subgroup: op.id for op in schedule.of_kind(OpKind.STATE_D2H)}
    assert [home[3] in fetches[2].after, home[2] in fetches[3].after] == [True, True]


def test_what_a_guessed_visit_takes_of_each_memory():
    work = workload((64, 64, 64, 64))
    held = [footprint(work, planned(0, "device", speculate_visits=n)) for n in range(3)]
    assert [b["host"] - a["host"] for a, b in pairwise(held)] == [64 * (12 + 2)] * 2
    assert [b["device"] - a["device"] for a, b in pairwise(held)] == [2 * 64 * 2, 0]


def test_what_cannot_be_guessed_is_not():
    for placement in ("device", "resident", "stored"):
        assert not any(planned(4, placement).guessed)
    for placement in ("host", "resident", "stored"):
        assert not any(planned(0, placement, speculate_visits=4).guessed)
    homes = Plan.home_runs(["host"] * 4)
    assert not any(planned(4, parameter_home=homes).guessed)
    assert not any(planned(0, "device", parameter_home=homes, speculate_visits=4).guessed)
    assert planned(0, "device", speculate_visits=3).guessed == (False, True, True, True)
    assert planned(9).guessed == (True,) * 4
    assert planned(2, speculate_among=3).guessed == (False, False, True, True)
    assert planned(2, speculate_among=4).guessed == planned(2, speculate_among=9).guessed
    assert planned(2, speculate_among=4).guessed == (False, True, False, True)
    assert not {"speculate", "speculate_among"} & set(planned(0, speculate_among=1).model_dump())
    assert "speculate_among" not in planned(2).model_dump()
