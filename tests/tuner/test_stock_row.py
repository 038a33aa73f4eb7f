"""Tests of the comparison between a plan and DeepSpeed without ebbtide: the simulated settings of DeepSpeed, and the
location of its 16-bit parameters.

The settings are those of the user's DeepSpeed config. Without a config, DeepSpeed is simulated with all 16-bit
parameters on the GPU if the plan keeps all of them there. If the plan keeps some of them in host memory, DeepSpeed is
simulated with all of them in host memory, but only if GPU memory is too small.
"""

import json
from dataclasses import replace
from functools import cache

import pytest
from ebbtide import estimate
from ebbtide.simulator import simulate
from ebbtide.simulator.estimates.job import Job
from ebbtide.simulator.estimates.offloading import WITHOUT_CONFIG
from ebbtide.simulator.estimates.presets import preset
from ebbtide.simulator.limits import GIB, Limits
from ebbtide.simulator.plan import Plan, Way
from ebbtide.simulator.schedules.strategies import build_strategy
from ebbtide.tuner.answer.roles import role_of
from ebbtide.tuner.answer.rows import compare, stock_beside
from ebbtide.tuner.placements.planning import predict
from ebbtide.tuner.service.scenario import MODELS

from tests.tuner.test_cli import run


@cache
def job(parameters="host"):
    """Return a training job, its machine, the peak of GPU memory that DeepSpeed alone needs with all parameters
    on the GPU (by a simulation), and a plan that keeps parameters at the given location.
    """
    have = preset("a100-node")
    work = Job.of_deepspeed(MODELS["Llama 3.2 3B"], sequence=1024).workload(have).recut(10**9)
    peak = simulate(build_strategy("zero3_offload", work), have).device_peak_bytes
    ways = (Way("host", parameters),) * len(work.subgroups)
    return (
        work,
        have,
        peak,
        Plan(subgroup_size=work.subgroup_size, subgroups=work.subgroups, ways=ways, staging_slots=0),
    )


def limited(peak):
    return replace(Limits.of(*job()[:2]), device_bytes=peak)


@pytest.mark.parametrize("spare", [0, -1, GIB, -GIB])
def test_deepspeed_moves_parameters_exactly_if_its_own_peak_does_not_fit(spare):
    """Check where DeepSpeed without ebbtide keeps its parameters in a comparison with a plan that keeps them in host
    memory.

    DeepSpeed is simulated with its parameters on the GPU if its simulated peak of GPU memory, with the parameters
    there, is within the limit. Otherwise it is simulated with its parameters in host memory.
    """
    work, have, peak, plan = job()
    within = limited(peak + spare)
    there = replace(WITHOUT_CONFIG, optimizer="cpu", parameters="none" if spare >= 0 else "cpu").strategy(3)
    assert stock_beside(work, plan, within) == there
    predicted = plan.model_copy(update={"prediction": predict(work, have, plan, within)})
    assert stock_beside(work, predicted) == there


def test_the_limits_of_the_table_count_and_not_those_of_the_plan_file():
    """Check that `compare` uses its own memory limits, and not those of the plan, made for a larger GPU."""
    work, have, peak, plan = job()
    plan = plan.model_copy(update={"prediction": predict(work, have, plan, limited(4 * peak))})
    row = next(row for row in compare(work, have, limited(peak - GIB), plan, others=False) if row.role == "stock")
    assert row.simulated.setting["parameters"] == "cpu"
    assert row.result.device_peak_bytes < peak


def test_beside_a_plan_with_parameters_on_the_gpu_deepspeed_keeps_them_there():
    work, _, peak, plan = job("device")
    assert stock_beside(work, plan, limited(peak - GIB)) == ("zero3_offload", {})


CONFIGS = {
    "offload_param cpu": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
    "pin_memory false": {"offload_optimizer": {"device": "cpu", "pin_memory": False}},
    "ratio 0.5": {"offload_optimizer": {"device": "cpu", "ratio": 0.5}},
    "super_offload": {"offload_optimizer": {"device": "cpu", "super_offload": True}},
    "offload_optimizer nvme": {"offload_optimizer": {"device": "nvme", "nvme_path": "/nvme", "pipeline_read": True}},
}


@pytest.mark.parametrize("setting", CONFIGS)
def test_a_plan_is_compared_with_what_the_users_config_does_without_it(setting):
    """Check that stock's row and `estimate` simulate the offload of the user's config, which the label names."""
    have = preset("rtx4090")
    config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3, **CONFIGS[setting]}}
    asked = Job.of_deepspeed(MODELS["Llama 3.2 3B"], config, sequence=1024)
    work = asked.workload(have)
    name, options = asked.offload.strategy(3)
    expected = simulate(build_strategy(name, work, **options), have).iteration_s
    plan = Plan(subgroup_size=work.subgroup_size, subgroups=work.subgroups, ways=(Way("host"),) * len(work.subgroups))
    stock, *others = [row for row in compare(work, have, Limits.of(work, have), plan) if "stock" in row.label]
    assert stock.role == "stock"
    assert stock.result.iteration_s == pytest.approx(expected, rel=1e-9)
    assert stock.label.startswith("stock ZeRO-3 offload, ")
    assert setting in stock.label
    assert all(role_of(row.label) == row.role == "peer" for row in others)
    alone = estimate(MODELS["Llama 3.2 3B"], batch=1, sequence=1024, gpu=have, ds_config=config)
    assert alone.iteration_s == pytest.approx(expected, rel=1e-9)


def test_without_a_config_deepspeeds_other_settings_are_listed_beside_its_default():
    work, have, _, plan = job("device")
    rows = {row.label: row.role for row in compare(work, have, Limits.of(work, have), plan) if "stock" in row.label}
    assert rows == {
        "stock ZeRO-3 offload": "stock",
        "stock, offload_param cpu": "peer",
        "stock, pin_memory false": "peer",
    }


def test_a_profiled_workload_is_compared_with_what_the_given_config_does(tmp_path):
    have = preset("rtx4090")
    config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3, **CONFIGS["pin_memory false"]}}
    asked = Job.of_deepspeed(MODELS["Llama 3.2 1B"], config, sequence=1024)
    asked.workload(have).save(tmp_path / "w.json")
    (tmp_path / "m.json").write_text(json.dumps(MODELS["Llama 3.2 1B"]))
    (tmp_path / "ds.json").write_text(json.dumps(config))
    stock = []
    for trained in (("--workload", "w.json"), ("--model", "m.json", "--sequence", "1024")):
        files = [str(tmp_path / word) if word.endswith(".json") else word for word in trained]
        out, emitted = tmp_path / "plan.json", tmp_path / "out.json"
        files += ["--ds-config", tmp_path / "ds.json", "--emit-deepspeed", emitted]
        done = run("plan", "--machine", "rtx4090", *files, "--quick", "--subgroup-size", "keep", "-o", out)
        assert done.exit_code == 0, done.output
        stock += [p.iteration_s for p in Plan.load(out).alternatives if role_of(p.strategy) == "stock"]
    assert stock[0] == pytest.approx(stock[1], rel=1e-9)
