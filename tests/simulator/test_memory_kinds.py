"""Tests of the predicted memory by kind (parameters, gradients, state and others): the kinds add up to the
simulated peak of GPU memory and of host memory, to the byte.
"""

import random

import pytest
from ebbtide.simulator import Plan, build_schedule, build_strategy, simulate
from ebbtide.simulator.analysis.many_plans import peaks_by_kind
from ebbtide.simulator.analysis.templates import Templates
from ebbtide.simulator.engines.compiled import compile_schedule, simulate_fast
from ebbtide.simulator.schedules.footprint import footprint, footprint_by_kind
from ebbtide.simulator.schedules.strategies import strategies_of

from tests.machines import machine, random_machine, random_workload, workload
from tests.simulator.test_tiers import random_plan

OPTIONS = {
    "deep_optimizer_states": {"stride": 2, "staging_slots": 2},
    "twin_flow": {"ratio": 0.4},
    "zero_infinity": {"activations": "cpu", "pipelined": True},
}


def by_kind(schedule, on):
    compiled = compile_schedule(schedule)
    return peaks_by_kind(schedule.held, compiled.ops, simulate_fast(compiled, on))


def sums(peaks):
    return tuple(sum(peaks[memory].values()) for memory in ("device", "host", "storage"))


@pytest.mark.parametrize("seed", range(40))
def test_kinds_are_the_peaks_of_every_strategy_and_of_plans_with_locations_and_stored_state(seed):
    rng = random.Random(seed)
    work, on = random_workload(rng, rng.choice([3, 3, 2, 1])), random_machine(rng)
    parts = {"parameters": rng.randint(0, 60), "activations": rng.randint(0, 60)}
    work = work.model_copy(update={"device_base_parts": rng.choice([{}, parts])})
    names = [name for name in strategies_of(work.zero_stage) if name != "ebbtide"]
    made = [build_strategy(name, work, **OPTIONS.get(name, {})) for name in names]
    plan = random_plan(work, rng)
    for schedule in (*made, build_schedule(work, plan)):
        timeline = simulate(schedule, on)
        expected = (timeline.device_peak_bytes, timeline.host_peak_bytes, timeline.storage_bytes)
        assert sums(by_kind(schedule, on)) == expected, schedule.strategy
    held, told = footprint(work, plan), footprint_by_kind(work, plan)
    assert {memory: sum(kinds.values()) for memory, kinds in told.items()} == held


def test_kinds_of_a_plan_worked_out_by_hand():
    work = workload((10, 20, 30, 40), device_base_bytes=500)
    plan = Plan(
        subgroup_size=40,
        placement=Plan.runs(["host", "device", "resident", "stored"]),
        parameter_home=Plan.runs(["host", "device", "device", "device"], "home"),
        staging_slots=1,
    )
    peaks = by_kind(build_schedule(work, plan), machine())
    assert peaks == {
        "device": {
            # Parameters in host memory are on the GPU for two layers, and the model has one such layer.
            "parameters": 200,
            "buckets": 300,
            "state": 30 * 12,
            "activations": 4 * 7,
            "gradients": 2 * (20 + 30) + 2 * (10 + 40),  # their gradients, and those that are being copied to the host
            "staging": 64 * 12,
        },
        "host": {
            "parameters": 2 * 10,
            "state": 12 * (10 + 20),
            "gradients": 2 * (10 + 40),
            # The state of a stored subgroup, and its parameters that the CPU's kernel has written.
            "staging": 64 * 12 + 2 * 40,
        },
        "storage": {"state": 2 * 12 * 40},
    }


def test_kinds_of_stock_and_of_not_offloading_worked_out_by_hand():
    work = workload((10, 20), device_base_bytes=100)
    stock = by_kind(build_strategy("zero3_offload", work), machine())
    assert stock["device"] == {"parameters": 60, "buckets": 40, "activations": 14}
    assert stock["host"] == {"state": 12 * 30, "gradients": 8 * 30}
    plain = by_kind(build_strategy("no_offload", work), machine())
    # The gradient of the larger subgroup exists in both precisions, with the flat copy between. Those of the other one
    # are freed.
    assert plain["device"] == {"parameters": 60, "buckets": 40, "state": 360, "gradients": (2 + 2 + 4) * 20}
    assert plain["host"] == {}


def test_what_is_known_of_the_base_is_told_and_follows_a_template():
    parts = {"parameters": 60, "gradients": 10, "activations": 20}
    work = workload((10, 20), device_base_bytes=100, device_base_parts=parts)
    templates = Templates(build_strategy)
    for base in (100, 95, 70):  # the second schedule is built to compare, and the third one is only retimed
        changed = work.model_copy(update={"device_base_bytes": base})
        made = templates.compiled("zero3_offload", changed, {})
        peaks = peaks_by_kind(made.schedule.held, made.ops, simulate_fast(made, machine()))
        known = {"parameters": 60, "gradients": 10, "activations": 14 + min(20, base - 70)}
        buckets = {"buckets": base - 90} if base > 90 else {}
        assert peaks["device"] == {**known, **buckets}
