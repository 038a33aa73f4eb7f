"""Tests that no plan for a job has a shorter iteration than the job's lower bound, at any subgroup size
and with any option.
"""

import numpy as np
import pytest
from ebbtide.simulator import Layer, Plan, Way, Workload, build_schedule, simulate
from ebbtide.simulator.analysis.bounds import lower_bound, problem, rough_bound_s
from ebbtide.simulator.limits import Limits
from ebbtide.simulator.schedules.footprint import footprint
from ebbtide.tuner.placements.decision import QUICK, PlanQuestion, decide
from ebbtide.tuner.placements.division import ImpossibleError

from tests.machines import node
from tests.simulator.any_job import cut_anew, random_job, random_plan

LONG = 200  # iterations of a plan that seems to beat the bound
PLENTY = Limits(2**45, 2**45)


def below(tried, floor_s):
    """Return the simulated iteration time of a plan divided by the lower bound of the iteration time.

    A simulation of three iterations can give less than the bound, if copies to the GPU fall behind from iteration to
    iteration. So a plan that seems to beat the bound is simulated again with more iterations.
    """
    seconds = tried.seconds()
    if seconds < floor_s:
        seconds = max(seconds, tried.seconds(LONG))
    return seconds / floor_s


@pytest.mark.parametrize("seed", range(2))
def test_no_random_plan_beats_the_bound_of_its_job(seed):
    # The bound is computed for the smallest memory limits under which the plan fits. With larger limits the bound would
    # be lower, and an error in its memory rules would stay hidden.
    rng, near = np.random.default_rng(seed), []
    for _ in range(10):
        work, on = random_job(rng)
        for _ in range(3):
            tried = random_plan(rng, cut_anew(rng, work), on)
            floor_s = lower_bound(work, on, tried.limits).iteration_s
            times = below(tried, floor_s)
            assert times >= 1 - 1e-6, (times, tried)
            near.append(times)
    assert min(near) < 1.01, "the bound would say little"


@pytest.mark.parametrize("seed", range(2))
def test_the_rough_bound_is_no_higher_at_any_stage(seed):
    rng, stages = np.random.default_rng(seed), set()
    for _ in range(20):
        work, on = random_job(rng)
        limits = random_plan(rng, cut_anew(rng, work), on).limits
        assert rough_bound_s(work, on, limits) <= lower_bound(work, on, limits).iteration_s * (1 + 1e-6)
        stages.add(work.zero_stage)
    assert stages == {1, 2, 3}


@pytest.mark.parametrize("seed", range(2))
def test_no_plan_that_the_search_finds_beats_the_bound(seed):
    rng, near = np.random.default_rng(seed), []
    for _ in range(3):
        work, on = random_job(rng)
        limits = random_plan(rng, cut_anew(rng, work), on).limits
        for pieces in {False, work.zero_stage == 3 and not limits.storage_bytes}:
            asked = PlanQuestion(work, on, limits, offload_parameters=True, effort=QUICK, pieces=pieces)
            try:
                found = decide(asked)
            except ImpossibleError:  # with these subgroup sizes, no plan fits
                continue
            near.append(found.iteration_s / lower_bound(work, on, limits).iteration_s)
    assert min(near) >= 1 - 1e-6


def test_the_bound_is_the_same_for_all_sizes_of_subgroups():
    rng = np.random.default_rng(5)
    work, on = random_job(rng)
    limits = random_plan(rng, work, on).limits
    found = {lower_bound(cut_anew(rng, work), on, limits).iteration_s for _ in range(4)}
    assert len(found) == 1


def machine(**changes):
    rates = {
        "h2d_bytes_per_s": 20e9,
        "d2h_bytes_per_s": 10e9,
        "dram_bytes_per_s": 1e13,
        "host_adam_params_per_s": 1e9,
        "stock_host_adam_params_per_s": 1e9,
    }
    facts = {"host_memory_bytes": 2**45, "device_memory_bytes": 2**45, "copy_latency_s": 0.0, "launch_latency_s": 0.0}
    return node(**{**rates, **facts, **changes})


def workload(subgroups=40, size=10**7, **changes):
    layer = Layer(params=size, forward_s=0.01, backward_s=0.02)
    fields = {"device_base_bytes": 10**9, "layers": (layer,) * subgroups, "clip_rate": 1.0} | changes
    return Workload(name="w", subgroups=(size,) * subgroups, **fields)


def test_with_room_for_all_state_the_bound_is_the_passes_and_the_updates_on_the_gpu():
    work, on = workload(), machine(host_adam_params_per_s=1.0)
    by_hand = work.forward_s + work.backward_s + work.params / on.rate("device_adam_params_per_s")
    assert lower_bound(work, on, PLENTY).iteration_s == pytest.approx(by_hand, rel=1e-4)


def test_without_room_on_the_gpu_the_bound_is_the_updates_on_the_host():
    # The simulated iteration is the sum of backward, all updates, the copy of the last updated parameters to the GPU,
    # and the last layer's forward. The bound must lie between 75% and 100% of this sum, and must list the CPU updates
    # among the resources that limit it.
    work, on = workload(), machine(host_adam_params_per_s=4e8, h2d_bytes_per_s=4e9, device_adam_params_per_s=4e9)
    limits = Limits(work.device_base_bytes + 2**28, 2**45)
    found = lower_bound(work, on, limits)
    plan = Plan(subgroup_size=10**7, placement=Plan.runs(["host"] * 40), staging_slots=0)
    took_s = simulate(build_schedule(work, plan), on).iteration_s
    assert took_s == pytest.approx(work.backward_s + work.params / 4e8 + 2e7 / 4e9 + 0.01, rel=2e-3)
    assert 0.75 * took_s < found.iteration_s <= took_s
    assert "updates on the CPU (update)" in found.binding


def test_what_is_in_buffers_need_not_be_copied_after_the_norm():
    slow = Layer(params=10**7, forward_s=0.001, backward_s=0.1)
    work = workload(100, layers=(slow,) * 100)
    on = machine(host_adam_params_per_s=1.0, h2d_bytes_per_s=2e9, d2h_bytes_per_s=1e12, device_adam_params_per_s=1e12)
    plan = Plan(subgroup_size=10**7, placement=Plan.runs(["device"] * 100), staging_slots=60, prefetch=60)
    took_s = simulate(build_schedule(work, plan), on).iteration_s
    assert took_s == pytest.approx(work.backward_s + 40 * 12e7 / 2e9, rel=1e-3)
    limits = Limits(footprint(work, plan)["device"], 2**45)
    p = problem(work, on, limits, early=False)
    p.rows.equal(1.0, (p.x[:, p.ways.index(Way("device"))], 1.0))  # state that stays on the GPU would be as good
    floor_s = p.rest_s + p.rows.lowest(*p.mean(1.0))[0]
    assert 0.999 * took_s < floor_s <= took_s


def test_backward_waits_where_gradients_reach_the_host_slowly():
    layer = Layer(params=10**8, forward_s=0.01, backward_s=0.02)
    work = workload(100, 10**8, layers=(layer,) * 100, grad_bytes_per_param=4)
    on = machine(host_adam_params_per_s=1e12, h2d_bytes_per_s=1e12, d2h_bytes_per_s=1e9)
    plan = Plan(subgroup_size=10**8, placement=Plan.runs(["host"] * 100), staging_slots=0)
    took_s = simulate(build_schedule(work, plan), on).iteration_s
    assert took_s == pytest.approx(0.02 + 100 * 0.4 + work.forward_s, rel=0.01)
    limits = Limits(footprint(work, plan)["device"], 2**45)
    assert 0.98 * took_s < lower_bound(work, on, limits, away=0).iteration_s <= took_s


def test_a_memory_in_which_nothing_fits_is_refused():
    with pytest.raises(ValueError, match="no plan fits into 100000000 bytes of GPU memory"):
        lower_bound(workload(), machine(), Limits(10**8, 2**45))
    with pytest.raises(ValueError, match="no plan fits"):
        lower_bound(workload(), machine(), Limits(2 * 10**9, 10**9))


def test_more_memory_and_drives_never_raise_the_bound():
    work, on = workload(), machine(host_adam_params_per_s=4e8)
    tight = Limits(work.device_base_bytes + 2**30, 12 * work.params)
    looser = (Limits(tight.device_bytes + 2**30, tight.host_bytes), Limits(tight.device_bytes, 2 * tight.host_bytes))
    stored = Limits(tight.device_bytes, tight.host_bytes, storage_bytes=2**45)
    low = lower_bound(work, on, tight).iteration_s
    assert all(lower_bound(work, on, limits).iteration_s <= low * (1 + 1e-9) for limits in (*looser, stored))


def test_steps_that_clip_take_the_time_of_updates_after_the_norm():
    work, on = workload(), machine(host_adam_params_per_s=4e8)
    limits = Limits(work.device_base_bytes + 2**30, 2**45)
    never, half, always = (
        lower_bound(work.model_copy(update={"clip_rate": rate}), on, limits).iteration_s for rate in (0.0, 0.5, 1.0)
    )
    assert never < (never + always) / 2 <= half <= always * (1 + 1e-9), "one plan serves both kinds of steps"
