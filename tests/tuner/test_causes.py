"""Tests of the causes of wrong predictions: a cause moves the rates of one activity, for every strategy alike."""

import math

import pytest
from ebbtide.simulator import Plan, build_strategy, preset, preset_names, workload_from_model
from ebbtide.simulator.analysis.many_plans import PlanSweep
from ebbtide.simulator.engines.compiled import simulate_fast
from ebbtide.simulator.plan import Way
from ebbtide.simulator.schedules.strategies import stock_offload
from ebbtide.tuner.calibrate.interval import causes, own_spread, shared_spread, workload_interval_s

GPT = {"layers": 4, "hidden": 2048, "heads": 16, "vocabulary": 32000}


def job(machine, stage=3, **shape):
    zero = {"stage": stage, "sub_group_size": 3e7, "reduce_bucket_size": 3e7}
    config = {"bf16": {"enabled": True}, "zero_optimization": zero}
    return workload_from_model(GPT, machine, config, **{"micro_batch": 2, "data_parallel": 4, **shape})


def host_plan(work):
    ways = Way.each(["host"] * len(work.subgroups))
    return Plan(subgroup_size=max(work.subgroups), ways=ways, overlap_forward=work.zero_stage == 3)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("name", ["a100-80gb", "rtx4090-x4"])
def test_a_cause_gives_what_is_built_anew_for_the_moved_machine(name, stage):
    machine = preset(name)
    work = job(machine, stage)
    plan, sweep = host_plan(work), PlanSweep(work, machine)
    for cause in causes(machine):
        other, moved = cause.moved(machine, work, 1.5)
        anew = job(other, stage)
        assert moved.layers == anew.layers
        for strategy, options in ((stock_offload(stage), {}), ("ebbtide", {"plan": plan})):
            expected, got = (
                simulate_fast(build_strategy(strategy, one, **options), other).iteration_s for one in (anew, moved)
            )
            assert got == pytest.approx(expected, rel=1e-9), cause.name
        assert sweep.on(other, moved).result(plan).iteration_s == pytest.approx(expected, rel=1e-9), cause.name


def test_a_workload_from_a_file_is_slower_on_slower_products_too(tmp_path):
    machine = preset("a100-80gb")
    work = job(machine)
    work.save(tmp_path / "work.json")
    read = type(work).load(tmp_path / "work.json")
    products = next(cause for cause in causes(machine) if "products" in cause.name)
    moved = products.moved(machine, read, -1.0)[1]
    assert moved.forward_s == pytest.approx(math.exp(products.sigma) * read.forward_s)
    measured = read.model_copy(update={"provenance": "measured"})
    assert products.moved(machine, measured, -1.0)[1] is measured


@pytest.mark.parametrize("name", preset_names())
def test_every_cause_of_a_preset_names_its_source(name):
    found = causes(preset(name))
    assert {"matrix products", "pinned copies", "unpinned copies", "host updates"} <= {cause.name for cause in found}
    assert all(len(cause.because) > 20 and cause.sigma > 0 for cause in found)
    assert ("collectives in a node" in {cause.name for cause in found}) == (preset(name).gpus_per_node > 1)


def test_a_gain_is_less_uncertain_than_the_two_times():
    machine = preset("a100-node")
    work = job(machine)
    stock, plan = ("zero3_offload", {}), ("ebbtide", {"plan": host_plan(work)})

    def log_s(strategy, on, of):
        return math.log(simulate_fast(build_strategy(strategy[0], of, **strategy[1]), on).iteration_s)

    variance = 0.0
    for cause in causes(machine):
        low, high = (
            log_s(stock, *one) - log_s(plan, *one) for one in (cause.moved(machine, work, turn) for turn in (-0.5, 0.5))
        )
        variance += (high - low) ** 2
    gain = math.sqrt(variance + sum(own_spread(machine, name) ** 2 for name, _ in (stock, plan)))
    widths = [
        math.log(high / low) / (2 * 1.6449)
        for low, high in (
            workload_interval_s(lambda w, s=s: build_strategy(s[0], w, **s[1]), work, machine) for s in (stock, plan)
        )
    ]
    assert gain < 0.95 * math.hypot(*widths)
    assert shared_spread(machine) > 0


def test_experts_are_a_cause_that_moves_stock_and_plan(tmp_path):
    machine = preset("h100")
    mixture = workload_from_model({**GPT, "experts": 8, "experts_per_token": 2}, machine, data_parallel=4)
    mixture.save(tmp_path / "w.json")
    for work in (mixture, type(mixture).load(tmp_path / "w.json")):
        (cause,) = set(causes(machine, work)) - set(causes(machine))
        on, slower = cause.moved(machine, work, 1.645)
        assert on == machine
        assert work.forward_s / slower.forward_s == pytest.approx(2.5, rel=0.01)
    assert causes(machine, job(machine)) == causes(machine)
    low, high = workload_interval_s(lambda w: build_strategy("no_offload", w), mixture, machine)
    assert high / low > 4
