"""Tests that a plan sweep has the results of a plan's own schedule, on other machines, for other layer times,
and for the memory by kind.
"""

import random

import numpy as np
import pytest
from ebbtide.simulator import build_schedule
from ebbtide.simulator.analysis.best_setting import under_plan
from ebbtide.simulator.analysis.many_plans import PlanSweep, peaks_by_kind
from ebbtide.simulator.engines.compiled import compile_schedule, simulate_fast
from ebbtide.simulator.engines.schedule_arrays import Program
from ebbtide.simulator.limits import Limits
from ebbtide.simulator.plan import Plan, PlanError
from ebbtide.simulator.quantity import Quantity
from ebbtide.simulator.schedules import ebbtide
from ebbtide.simulator.schedules.ebbtide import record
from ebbtide.tuner.calibrate.interval import plan_interval_s, workload_interval_s

from tests.machines import machine, random_machine, random_workload, workload
from tests.simulator.any_job import random_job
from tests.simulator.test_tiers import random_plan

EXACT = {"rel": 1e-9, "abs": 1e-9}


@pytest.mark.parametrize("seed", range(12))
def test_a_sweep_has_the_results_of_the_schedule_of_a_plan(seed):
    rng = random.Random(seed)
    work, on = random_workload(rng, rng.choice([3, 3, 2, 1])), random_machine(rng)
    plan, sweep = random_plan(work, rng), PlanSweep(work, random_machine(rng))
    sweep.result(plan)  # on the first machine
    slower = work.model_copy(
        update={
            "layers": tuple(
                layer.model_copy(update={"forward_s": 1.7 * layer.forward_s, "backward_s": 1.7 * layer.backward_s})
                for layer in work.layers
            )
        }
    )
    for some, of in ((build_schedule(work, plan), sweep.on(on)), (build_schedule(slower, plan), sweep.on(on, slower))):
        compiled = compile_schedule(some)
        expected, got = simulate_fast(compiled, on), of.result(plan)
        assert got.iteration_s == pytest.approx(expected.iteration_s, **EXACT)
        assert got.phases == pytest.approx(expected.phases, **EXACT)
        assert of.memory(plan) == peaks_by_kind(some.held, compiled.ops, expected)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_separate_passes_take_the_time_that_the_fused_kernel_has_at_their_rate(seed, early):
    rng = random.Random(seed)
    work = random_workload(rng).model_copy(update={"optimizer": "adam"})
    on = random_machine(rng)
    unlimited = {"dram_bytes_per_s": Quantity.exact(1e30), "host_adam_by_threads": {}}
    on = on.model_copy(update={**unlimited, "host_adam_out_of_place": Quantity.exact(1.0)})
    stock = on.stock_host_adam_params_per_s

    plan = random_plan(work, rng).with_bits(early=early)
    separate = PlanSweep(work, on, fused=False).result(plan).iteration_s
    slow = PlanSweep(work, on.model_copy(update={"host_adam_params_per_s": stock})).result(plan).iteration_s
    assert separate == pytest.approx(slow, **EXACT)


@pytest.mark.parametrize("seed", range(40))
def test_a_micro_batch_that_stands_for_others_gives_the_recording_of_all(seed, monkeypatch):
    rng = random.Random(seed)
    work = random_workload(rng, rng.choice([3, 3, 2, 1])) if seed % 2 else random_job(np.random.default_rng(seed))[0]
    work = work.model_copy(update={"gradient_accumulation_steps": rng.choice([3, 4, 5, 9])})
    away = work.zero_stage == 3 and rng.random() < 0.7
    locations = [rng.choice(["device", "host"]) if away else "device" for _ in work.subgroups]
    few = Program.of(record(work, locations, overlaps=work.zero_stage == 3))
    monkeypatch.setattr(ebbtide, "RECORDED", 9)
    every = Program.of(record(work, locations, overlaps=work.zero_stage == 3))
    for one, other in zip(few, every, strict=True):
        assert np.array_equal(one, other)


@pytest.mark.parametrize("seed", range(4))
def test_the_interval_of_a_plan_is_that_of_its_schedule(seed):
    rng = random.Random(seed)
    work, on = random_workload(rng).model_copy(update={"provenance": "estimated"}), random_machine(rng)
    on = on.with_rates(device_flops_per_s=1e14)
    plan = random_plan(work, rng)
    of_schedule = workload_interval_s(lambda one: build_schedule(one, plan), work, on)
    assert plan_interval_s(PlanSweep(work, on), plan) == pytest.approx(of_schedule, **EXACT)


def test_a_plan_that_does_not_fit_the_job_is_refused_as_by_its_schedule():
    work = workload((10, 20, 30))
    for count in (2, 3):
        plan = Plan(subgroup_size=10, placement=Plan.runs(["host"] * count))
        other = work.model_copy(update={"zero_stage": 2, "step_gather_s": 1.0})  # so its steps wait for their updates
        with pytest.raises(PlanError) as told:
            build_schedule(other, plan)
        with pytest.raises(PlanError) as also:
            under_plan(plan, PlanSweep(other, machine()), Limits.of(other, machine()))
        assert str(told.value) == str(also.value)
