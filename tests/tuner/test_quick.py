"""Tests of the short plan search that the runtime calls during training."""

import numpy as np
import pytest
from ebbtide.simulator import Plan, build_schedule
from ebbtide.simulator.engines.compiled import simulate_fast
from ebbtide.simulator.estimates.estimate import estimated
from ebbtide.simulator.estimates.presets import preset
from ebbtide.simulator.plan import Way
from ebbtide.tuner.placements import decision
from ebbtide.tuner.placements.decision import most_micro_batches
from ebbtide.tuner.placements.planning import quicker_plan
from ebbtide.tuner.placements.search import Search
from ebbtide.tuner.placements.shares import WORTH

from studies.one_answer.__main__ import _job
from studies.optimality.pairs import random_pair


def on_the_host(workload, **fields):
    count = len(workload.subgroups)
    fields = {"staging_slots": 0, **fields}
    return Plan(subgroup_size=1, placement=Plan.runs(["host"] * count), **fields)


@pytest.mark.parametrize("seed", range(3))
def test_it_is_never_slower_and_keeps_what_it_does_not_search(seed):
    workload, machine = random_pair(np.random.default_rng(seed), counts=(8, 20))
    current = on_the_host(workload, threads=8, overlap_forward=bool(seed % 2))
    found = quicker_plan(workload, machine, current, device_bytes=machine.device_memory_bytes)
    assert found.iteration_s <= found.current_s
    assert (found.plan.threads, found.plan.overlap_forward) == (8, bool(seed % 2))
    made = simulate_fast(build_schedule(workload, found.plan), machine)
    assert made.iteration_s <= found.current_s * (1 + 1e-9)
    assert made.device_peak_bytes <= machine.device_memory_bytes


def test_by_itself_it_takes_no_more_device_memory_than_the_plan_that_runs():
    workload, machine = random_pair(np.random.default_rng(7), counts=(8, 8))
    current = on_the_host(workload)
    found = quicker_plan(workload, machine, current)
    before, after = (
        simulate_fast(build_schedule(workload, plan), machine).device_peak_bytes for plan in (current, found.plan)
    )
    assert after <= before
    assert found.plan is current or found.iteration_s < found.current_s


def test_a_step_too_long_for_a_search_keeps_the_plan_that_runs(monkeypatch):
    monkeypatch.setattr(decision, "MOST_PASSES", 64)
    workload, machine = random_pair(np.random.default_rng(7), counts=(8, 8))
    longer = most_micro_batches(workload) + 1
    workload = workload.model_copy(update={"gradient_accumulation_steps": longer})
    current = on_the_host(workload)
    found = quicker_plan(workload, machine, current, device_bytes=machine.device_memory_bytes)
    assert found.plan is current
    assert found.iteration_s == found.current_s
    made = simulate_fast(build_schedule(workload, current), machine)
    assert found.current_s == pytest.approx(made.iteration_s)


WORTH_MOVING = ("Mistral 7B", "h100-node", {"device_memory_bytes": 30 * 2**30})


@pytest.mark.parametrize("job", [WORTH_MOVING, ("Llama 2 13B", "a100-node", {"gpus": 4})], ids=str)
def test_parameters_move_only_if_that_is_clearly_faster(job, monkeypatch):
    model, name, about = job
    machine = preset(name).with_rates(**{k: v for k, v in about.items() if k == "device_memory_bytes"})
    workload = estimated(_job(model, about), machine).in_pieces(10**8)
    current = on_the_host(workload)
    away = current.model_copy(update={"ways": (Way("host", "host"),) * len(workload.subgroups)})
    room = int(0.85 * machine.device_memory_bytes)
    moving, back = (quicker_plan(workload, machine, plan, device_bytes=room) for plan in (current, away))
    with monkeypatch.context() as patch:
        patch.setattr(Search, "can_move_parameters", False)
        kept = quicker_plan(workload, machine, current, device_bytes=room)
    assert "host" not in kept.plan.parameter_locations
    for found in (moving, back):
        assert found.iteration_s <= kept.iteration_s * 1.01
        if "host" in found.plan.parameter_locations:
            assert found.iteration_s < WORTH * kept.iteration_s
    assert job is not WORTH_MOVING or "host" in moving.plan.parameter_locations


@pytest.mark.parametrize("seed", [2, 3, 4, 6])
def test_parameters_never_move_for_nothing(seed):
    workload, machine = random_pair(np.random.default_rng(seed), counts=(16, 16))
    base = workload.params * workload.wire_bytes
    workload = workload.model_copy(update={"device_base_bytes": base, "clip_rate": 1.0})
    current = on_the_host(workload)
    found = quicker_plan(workload, machine, current)
    stay = found.plan.with_ways([way._replace(parameters="device") for way in found.plan.ways])
    if "host" in found.plan.parameter_locations:
        assert found.iteration_s < WORTH * simulate_fast(build_schedule(workload, stay), machine).iteration_s


def test_sums_of_micro_batches_stay_where_device_memory_is_given():
    # If it is given more GPU memory than the running plan uses, it puts some of them on the GPU. Otherwise it leaves
    # them where the running plan has them.
    workload, machine = random_pair(np.random.default_rng(7), counts=(8, 8))
    slow = machine.with_rates(h2d_bytes_per_s=4e9, d2h_bytes_per_s=4e9)
    workload = workload.model_copy(update={"gradient_accumulation_steps": 4})
    current = on_the_host(workload)
    found = quicker_plan(workload, slow, current, device_bytes=machine.device_memory_bytes)
    assert any(found.plan.summed_on_device)
    again = quicker_plan(workload, slow, found.plan)
    assert again.plan.summed_on_device == found.plan.summed_on_device


def test_ranks_can_vote_on_what_it_says_of_plans_with_early_updates():
    workload, machine = random_pair(np.random.default_rng(1), counts=(8, 8))
    current = on_the_host(workload, speculate=3)
    found = quicker_plan(workload, machine, current, device_bytes=machine.device_memory_bytes)
    assert type(found.iteration_s < found.current_s) is bool
