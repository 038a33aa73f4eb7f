"""Tests of the comparison between a plan and DeepSpeed without ebbtide: of DeepSpeed's own settings that fit into
memory, the fastest one counts.
"""

import json
from dataclasses import replace
from functools import cache

import pytest
from ebbtide import estimate
from ebbtide.simulator import simulate
from ebbtide.simulator.analysis.best_setting import simulated
from ebbtide.simulator.estimates.estimate import estimated
from ebbtide.simulator.estimates.job import Job
from ebbtide.simulator.estimates.offloading import WITHOUT_CONFIG
from ebbtide.simulator.estimates.presets import preset
from ebbtide.simulator.limits import GIB, Limits
from ebbtide.simulator.plan import Plan, Way
from ebbtide.simulator.schedules.strategies import build_strategy
from ebbtide.tuner.answer.rows import (
    OVERLAPS,
    WAITS_FOR_NORM,
    StockTraining,
    alternatives,
    best_stock,
    compare,
    stock_beside,
)
from ebbtide.tuner.answer.verdict import headline, role_of
from ebbtide.tuner.placements.planning import quick_plan
from ebbtide.tuner.service.requests import MODELS

from tests.tuner.test_cli import run

OF_THE_BEST = ("no_offload", "twin_flow", "superoffload")  # the comparison at the job's stage is plain offload


@cache
def job(parameters="host"):
    """Return a training job, its machine, the peak of GPU memory that DeepSpeed alone needs with all parameters
    on the GPU (by a simulation), and a plan that keeps parameters at the given location.
    """
    have = preset("a100-node")
    work = estimated(Job.of_deepspeed(MODELS["Llama 3.2 3B"], sequence=1024), have).recut(10**9)
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
def test_a_setting_that_does_not_fit_is_not_the_comparison(spare):
    work, have, peak, plan = job()
    slow_link = have.with_rates(h2d_bytes_per_s=2e9, d2h_bytes_per_s=2e9)  # parameters on the GPU are faster here
    within = limited(peak + spare)
    there = replace(WITHOUT_CONFIG, optimizer="cpu", parameters="none" if spare >= 0 else "cpu").strategy(3)
    assert stock_beside(work, slow_link, within) == there
    rows = {row.role: row for row in compare(work, slow_link, within, plan, others=False)}
    assert (rows["stock"].simulated.strategy, rows["stock"].simulated.setting) == there
    assert rows["stock"].simulated.fits


JOBS = [
    ("Llama 3.2 3B", "rtx4090", {}),
    ("Llama 3 8B", "a100-40gb", {"sequence": 1024}),
    ("Llama 3 8B", "gh200", {"accumulation": 8}),
    ("Llama 2 13B", "a100-node", {"data_parallel": 4, "zero_stage": 2}),
    ("Qwen3 4B", "h100-node", {"data_parallel": 2, "zero_stage": 1}),
]


def _every_setting(asked, have, limits):
    for stage in (1, 2, 3):
        work = estimated(asked.changed(zero_stage=stage), have)
        base = replace(WITHOUT_CONFIG, optimizer="cpu")
        moved = [base, replace(base, pinned=False), replace(base, optimizer="none", given=True)]
        if stage == 3:
            moved += [replace(base, parameters="cpu"), replace(base, superoffload=True)]
            moved += [replace(base, ratio=ratio / 10) for ratio in range(10)]
        for offload in moved:
            name, options = offload.strategy(stage)
            one = simulated(name, work, have, limits, options)
            if one.fits:
                yield stage, name, one.result.iteration_s


@pytest.mark.parametrize(("model", "machine", "settings"), JOBS)
def test_no_other_setting_of_deepspeed_is_faster_and_more_memory_never_makes_it_slower(model, machine, settings):
    asked, have = Job.of_deepspeed(MODELS[model], **settings), preset(machine)
    work = estimated(asked, have)
    before_s: dict[str, float] = {}
    for share in (0.5, 0.8, 1.0, 1.02, 1.5):
        roomier = have.with_rates(device_memory_bytes=int(share * have.device_memory_bytes))
        limits = Limits.of(work, roomier)
        alone, every = StockTraining(work, roomier, limits), list(_every_setting(asked, roomier, limits))
        here = [s for stage, name, s in every if stage == work.zero_stage and name not in OF_THE_BEST]
        for name, chosen, others in (("given", alone.given, here), ("best", alone.best, [s for _, _, s in every])):
            seconds = chosen.simulated.result.iteration_s
            if chosen.lacking_bytes:
                assert not others, f"{name}: a setting fits, but was not chosen"
                continue
            assert seconds <= min(others) * 1.003, f"{name} at {share:.0%} of the GPU's memory"
            assert seconds <= before_s.get(name, seconds) * 1.003, f"more GPU memory made {name} slower"
            before_s[name] = seconds
    assert before_s, "nothing fits anywhere, so the test would check nothing"


def test_deepspeed_alone_at_its_best_is_a_row_with_the_gain_over_it():
    have = preset("gh200")
    asked = Job.of_deepspeed(MODELS["Llama 3 8B"])
    work = estimated(asked, have)
    plan = quick_plan(work, have, Limits.of(work, have))
    rows = compare(work, have, Limits.of(work, have), plan, others=False)
    (best,) = [row for row in rows if row.role == "best stock"]
    assert best.name not in ("", rows[1].name)
    assert role_of(best.label) == "best stock"
    assert best is best_stock(rows)
    sentence = headline(plan.model_copy(update={"alternatives": alternatives(rows)}))
    low, high = best.over(rows[0])
    gain = f"faster ({low:.2g}x to {high:.2g}x as fast, in nine runs of ten) than"
    assert f"{gain} DeepSpeed alone at its best ({best.name}: {best.result.iteration_s:.2f} s)" in sentence


@pytest.mark.parametrize("clipping", [0.0, 1.0])
def test_superoffload_is_shown_with_and_without_clipping_where_the_job_clips(clipping):
    have = preset("gh200")
    config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}, "gradient_clipping": clipping}
    work = estimated(Job.of_deepspeed(MODELS["Llama 3.2 3B"], config, sequence=1024), have)
    rows = compare(work, have, Limits.of(work, have), None)
    seconds = {row.label: row.result.iteration_s for row in rows if row.simulated.strategy == "superoffload"}
    if clipping:
        assert list(seconds) == [WAITS_FOR_NORM, OVERLAPS]
        assert seconds[OVERLAPS] < 0.97 * seconds[WAITS_FOR_NORM]
    else:
        assert list(seconds) == ["SuperOffload"]


CONFIGS = {
    "offload_param cpu": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
    "pin_memory false": {"offload_optimizer": {"device": "cpu", "pin_memory": False}},
    "ratio 0.5": {"offload_optimizer": {"device": "cpu", "ratio": 0.5}},
    "super_offload": {"offload_optimizer": {"device": "cpu", "super_offload": True}},
    "offload_optimizer nvme": {"offload_optimizer": {"device": "nvme", "nvme_path": "/nvme", "pipeline_read": True}},
}


@pytest.mark.parametrize("setting", CONFIGS)
def test_the_setting_of_the_users_config_is_listed_even_if_another_one_is_the_comparison(setting):
    have = preset("rtx4090")
    config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3, **CONFIGS[setting]}}
    asked = Job.of_deepspeed(MODELS["Llama 3.2 3B"], config, sequence=1024)
    work = estimated(asked, have)
    name, options = asked.offload.strategy(3)
    expected = simulate(build_strategy(name, work, **options), have).iteration_s
    rows = [row for row in compare(work, have, Limits.of(work, have), None, others=False) if "stock" in row.label]
    stock, *others = rows
    (own,) = [row for row in rows if row.result.iteration_s == pytest.approx(expected, rel=1e-9)]
    assert setting in own.label
    assert own is stock or "as configured" in own.label
    assert own is stock or stock.result.iteration_s < expected or not own.simulated.fits
    assert all(role_of(row.label) == row.role for row in others)
    alone = estimate(MODELS["Llama 3.2 3B"], batch=1, sequence=1024, gpu=have, ds_config=config)
    assert alone.iteration_s == pytest.approx(expected, rel=1e-9)


def test_without_a_config_deepspeeds_other_settings_are_listed_beside_its_fastest():
    work, have, _, plan = job("device")
    rows = {row.label: row.role for row in compare(work, have, Limits.of(work, have), plan) if "stock" in row.label}
    assert rows == {
        "stock ZeRO-3 offload, offload_param cpu": "stock",
        "stock, offload_param none": "peer",
        "stock, pin_memory false": "peer",
    }


def test_a_profiled_workload_is_compared_with_what_the_given_config_does(tmp_path):
    have = preset("rtx4090")
    config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3, **CONFIGS["pin_memory false"]}}
    asked = Job.of_deepspeed(MODELS["Llama 3.2 1B"], config, sequence=1024)
    estimated(asked, have).save(tmp_path / "w.json")
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
