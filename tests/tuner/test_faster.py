"""Tests of the changes with which the same samples train faster."""

import json
from functools import cache
from itertools import combinations

import pytest
from ebbtide import estimate
from ebbtide.simulator.estimates.estimate import estimated
from ebbtide.simulator.estimates.job import Job
from ebbtide.simulator.estimates.knobs import needs
from ebbtide.simulator.estimates.presets import preset
from ebbtide.simulator.limits import Limits
from ebbtide.simulator.plan import Plan
from ebbtide.tuner.advice import tried
from ebbtide.tuner.advice.tried import WORTH, Changing, Faster, faster
from ebbtide.tuner.placements.decision import decide
from ebbtide.tuner.placements.planning import quick_plan
from ebbtide.tuner.service import answers
from ebbtide.tuner.service.requests import MODELS, Answer

from tests.tuner.test_cli import run

ASKED = {"model": "Llama 3.2 3B", "machine": "rtx4090", "accumulation": 8, "sequence": 1024}


@cache
def lines():
    job, have = Job.of_deepspeed(MODELS[ASKED["model"]], accumulation=8, sequence=1024), preset(ASKED["machine"])
    work = estimated(job, have)
    before_s = quick_plan(work, have, Limits.of(work, have)).prediction.iteration_s
    return job, have, before_s, faster(job, have, before_s)


def test_each_line_is_faster_than_the_line_before_and_asks_for_more():
    job, have, before_s, found = lines()
    assert 1 <= len(found) <= 3
    asked = [needs(one.changes) for one in found]
    assert asked == sorted(set(asked))
    for one in found:
        assert one.outcome.fits
        assert one.outcome.iteration_s < (1 - WORTH) * before_s
        assert one.job.micro_batch * one.job.accumulation == 8
        before_s = one.outcome.iteration_s
    work = estimated(found[-1].job, have)
    again = quick_plan(work, have, Limits.of(work, have))
    assert again.prediction.iteration_s <= found[-1].outcome.iteration_s * 1.003, "planning it is no slower than told"


def test_no_search_is_made_twice(monkeypatch):
    job, have, before_s, found = lines()
    asked = []
    monkeypatch.setattr(tried, "decide", lambda question: asked.append(question) or decide(question))
    again = faster(job, have, before_s)
    assert [one.changes for one in again] == [one.changes for one in found]
    assert len(asked) > 1
    assert not any(one == other for one, other in combinations(asked, 2))


def test_a_line_is_no_longer_offered_once_it_is_taken():
    _, have, _, found = lines()
    best = found[-1]
    assert best.factor > 1.2, "nothing was gained, so the test would check nothing"
    assert all(one.factor < 1.1 for one in faster(best.job, have, best.outcome.iteration_s))


def test_the_command_tells_the_lines_and_writes_the_one_that_is_named(tmp_path):
    flags = ["--machine", "rtx4090", "--model", "Llama 3.2 3B", "--accumulation", "8", "--sequence", "1024", "--quick"]
    _, _, _, found = lines()
    plan, config = tmp_path / "plan.json", tmp_path / "ds.json"
    done = run("plan", *flags, "-o", plan, "--faster", len(found), "--emit-deepspeed", config)
    assert done.exit_code == 0, done.output
    made, written = Plan.load(plan), json.loads(config.read_text())
    assert made.prediction.iteration_s <= found[-1].outcome.iteration_s * 1.003
    assert written["train_micro_batch_size_per_gpu"] == found[-1].job.micro_batch
    assert written["zero_optimization"]["stage"] == found[-1].job.zero_stage
    assert written["ebbtide"] == {"plan": str(plan)}
    done = run("plan", *flags, "-o", plan, "--faster", "3" if len(found) < 3 else "1")
    told = [why for why in Plan.load(plan).reasons if "the same samples, faster" in why]
    if len(found) < 3:
        assert done.exit_code == 2
        assert "--faster" in done.output
    assert not told, "a plan for a line tells no lines"
    assert run("plan", *flags, "-o", plan).exit_code == 0
    told = [why for why in Plan.load(plan).reasons if "the same samples, faster" in why]
    assert len(told) == len(found)


@pytest.mark.parametrize("wanted", [False, True])
def test_the_service_tells_them_if_it_is_asked(wanted):
    answer = answers.answer(Answer(**ASKED, peers=False, timelines=False, faster=wanted), lambda *_: None)
    if not wanted:
        assert answer["faster"] is None
        return
    _, _, _, found = lines()
    assert [one["label"] for one in answer["faster"]] == [one.label for one in found]
    best = answer["faster"][-1]
    there = {**ASKED, **best["changes"], "peers": False, "timelines": False}
    again = answers.answer(Answer(**there), lambda *_: None)
    (row,) = [row for row in again["rows"] if row["role"] == "plan"]
    assert row["iteration_s"] <= best["iteration_s"] * 1.003
    assert best["deepspeed"]["ebbtide"] == {"plan": "automatic"}


def test_without_offload_a_line_needs_no_plan():
    job, have = Job.of_deepspeed(MODELS["Llama 3.2 1B"], zero_stage=2, micro_batch=8), preset("h200")
    changes = {"offload": "none", "zero_stage": 3, "recompute": False}
    tried = Changing(job, have).tried(changes)
    line = Faster(changes, tried.job, tried.workload, tried.outcome(), 1.0)
    assert line.outcome.fits
    assert line.outcome.plan is None
    config = line.deepspeed({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}})
    assert "ebbtide" not in config
    assert config["zero_optimization"]["stage"] == 3
    assert "offload_optimizer" not in config["zero_optimization"]
    assert "no offload" in line.options(job)


def test_an_estimate_tells_them_too():
    told = estimate(ASKED["model"], batch=1, accumulation=8, sequence=1024, gpu=ASKED["machine"])
    _, _, _, found = lines()
    assert told.fits
    assert [line.split(", ")[0] for line in told.faster] == [one.label.split(", ")[0] for one in found]
