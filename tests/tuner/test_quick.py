"""Tests of the short plan search that the runtime calls during training."""

import subprocess
import sys

import numpy as np
import pytest
from ebbtide.simulator import Plan, build_schedule
from ebbtide.simulator.engines.compiled import simulate_fast
from ebbtide.tuner.placements.quick import quick_plan

from studies.optimality.command import random_pair


def on_the_host(workload, **fields):
    count = len(workload.subgroups)
    fields = {"staging_slots": 0, **fields}
    return Plan(subgroup_size=1, placement=Plan.runs(["host"] * count), **fields)


@pytest.mark.parametrize("seed", range(3))
def test_it_is_never_slower_and_keeps_what_it_does_not_search(seed):
    workload, machine = random_pair(np.random.default_rng(seed), counts=(8, 20))
    current = on_the_host(workload, threads=8, overlap_forward=bool(seed % 2))
    found = quick_plan(workload, machine, current, device_bytes=machine.device_memory_bytes)
    assert found.iteration_s <= found.current_s
    assert (found.plan.threads, found.plan.overlap_forward) == (8, bool(seed % 2))
    made = simulate_fast(build_schedule(workload, found.plan), machine)
    assert made.iteration_s <= found.current_s * (1 + 1e-9)
    assert made.device_peak_bytes <= machine.device_memory_bytes


def test_by_itself_it_takes_no_more_device_memory_than_the_plan_that_runs():
    workload, machine = random_pair(np.random.default_rng(7), counts=(8, 8))
    current = on_the_host(workload)
    found = quick_plan(workload, machine, current)
    before, after = (
        simulate_fast(build_schedule(workload, plan), machine).device_peak_bytes for plan in (current, found.plan)
    )
    assert after <= before
    assert found.plan is current or found.iteration_s < found.current_s


def test_a_training_run_loads_no_pandas_for_it():
    code = (
        "import sys, ebbtide.tuner.placements.quick\n"
        "print(sorted({'pandas', 'matplotlib', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_parameters_move_where_that_is_asked_for():
    """Check that the short plan search moves parameters to host memory only if `move_parameters` is set. The
    freed GPU memory then holds optimizer state, which makes this case faster.
    """
    workload, machine = random_pair(np.random.default_rng(3), counts=(16, 16))
    base = workload.params * workload.wire_bytes
    workload = workload.model_copy(update={"device_base_bytes": base, "clip_rate": 1.0})
    current = on_the_host(workload)
    stay = quick_plan(workload, machine, current)
    moved = quick_plan(workload, machine, current, move_parameters=True)
    assert "host" not in stay.plan.parameter_locations
    assert "host" in moved.plan.parameter_locations
    assert moved.iteration_s < stay.iteration_s
    again = quick_plan(workload, machine, moved.plan)
    assert again.plan.parameter_locations == moved.plan.parameter_locations


def test_sums_of_micro_batches_stay_where_device_memory_is_given():
    """Check that the short plan search keeps gradient sums on the GPU if it is given more GPU memory than the
    running plan uses, and otherwise keeps the choice of the running plan.
    """
    workload, machine = random_pair(np.random.default_rng(7), counts=(8, 8))
    slow = machine.with_rates(h2d_bytes_per_s=4e9, d2h_bytes_per_s=4e9)
    workload = workload.model_copy(update={"gradient_accumulation_steps": 4})
    current = on_the_host(workload)
    found = quick_plan(workload, slow, current, device_bytes=machine.device_memory_bytes)
    assert any(found.plan.summed_on_device)
    again = quick_plan(workload, slow, found.plan)
    assert again.plan.summed_on_device == found.plan.summed_on_device


def test_ranks_can_vote_on_what_it_says_of_plans_with_early_updates():
    """Check that comparing two iteration times from the short plan search (`quick_plan`) gives a Python bool, not a
    numpy bool.

    The ranks vote on the result with a torch tensor made from this bool, and torch cannot make one from a numpy bool.
    """
    workload, machine = random_pair(np.random.default_rng(1), counts=(8, 8))
    current = on_the_host(workload, speculate=3)
    found = quick_plan(workload, machine, current, device_bytes=machine.device_memory_bytes)
    assert type(found.iteration_s < found.current_s) is bool
