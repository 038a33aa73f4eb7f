"""Tests of the study that runs DeepSpeed's own test suite with ebbtide plans: which engines get a plan,
and the counts of passed and failed tests.
"""

import json

import deepspeed
import pytest
import torch
from ebbtide.runtime.zero.checks.guard import ConfigError

from studies.bench.byte_gpt import SIZES, Batches, ByteGPT, ds_config, train_step
from studies.deepspeed_tests.__main__ import main, summary
from studies.deepspeed_tests.attaching import begin
from studies.deepspeed_tests.plugin import lines

FILE = "unit/checkpoint/test_a.py"


class FusedLamb(torch.optim.SGD):
    """An optimizer with the name of DeepSpeed's FusedLamb, which uses norms of whole tensors. No plan supports
    such an optimizer.
    """


def config_of(stage):
    """Return a DeepSpeed config for a ZeRO stage as DeepSpeed's own tests use it, without offloading."""
    config = ds_config(stage=max(stage, 1), micro_batch=2)
    for key in ("offload_optimizer", "sub_group_size"):
        del config["zero_optimization"][key]
    return config


def test_every_engine_that_can_take_a_plan_has_one_or_fails(only_rank, tmp_path, monkeypatch):
    monkeypatch.setattr(deepspeed, "initialize", deepspeed.initialize)
    notes = tmp_path / "notes.jsonl"
    for stage, events in ((2, ["attached", "stepped"]), (3, ["attached", "stepped"]), (0, [])):
        begin(f"zero-{stage}", "mix", str(notes))
        model, config = ByteGPT(SIZES["tiny"]), config_of(stage)
        config["zero_optimization"]["stage"] = stage
        config["optimizer"] = {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": stage == 0}}
        engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
        train_step(engine, Batches(2, SIZES["tiny"].sequence).at(0, engine.device))
        engine.destroy()
        noted = [note for note in lines(notes) if note["case"] == f"zero-{stage}"]
        assert [note["event"] for note in noted] == events
        assert not noted or all(noted[0]["subgroups"][home] for home in ("resident", "host"))
    model = ByteGPT(SIZES["tiny"])
    client = FusedLamb(model.parameters(), lr=1e-3)
    config = {k: v for k, v in config_of(2).items() if k != "optimizer"}
    with pytest.raises(ConfigError, match="without a plan"):
        deepspeed.initialize(model=model, optimizer=client, config=config)


def ended(arm, name, outcome, at_s=5.0):
    return {
        "arm": arm,
        "case": f"{FILE}::{name}",
        "outcome": outcome,
        "why": "broken",
        "begun_s": at_s,
        "at_s": at_s + 1,
        "commit": "abc",
    }


def noted(name, event, at_s=5.5, **what):
    return {"arm": "mix", "case": f"{FILE}::{name}", "event": event, "at_s": at_s, **what}


def test_only_a_plan_that_was_live_in_the_run_that_passed_counts():
    names = ("plan", "early", "left", "none", "bad", "absent")
    results = [ended("stock", name, "passed") for name in names]
    results += [ended("mix", name, "passed") for name in names[:4]]
    results += [ended("mix", "bad", "failed"), ended("stock", "worse", "failed")]
    results += [ended("mix", "worse", "failed"), {"arm": "mix", "case": f"{FILE}::absent"}]
    notes = [noted("plan", "attached"), noted("plan", "stepped"), noted("bad", "attached")]
    notes += [noted("early", "attached", at_s=4.0), noted("left", "left", why="ZeRO stage 0")]
    figures = summary(results, notes)
    (row,) = (row for row in figures["files"] if row["arm"] == "mix")
    assert row == {
        "arm": "mix",
        "file": FILE,
        "stock_passes": 6,
        "passed": 4,
        "attached": 1,
        "stepped": 1,
        "without_a_plan": {"no engine with ZeRO": 2, "ZeRO stage 0": 1},
        "failed": 1,
        "not_run": 1,
    }
    assert [failure["case"] for failure in figures["failures"]] == [f"{FILE}::bad"]


COMMON = """
class DistributedExec:
    pass
"""
TESTS = """
import os

import pytest

def test_good(): pass
def test_skipped(): pytest.skip("no GPU")
def test_bad(): assert os.environ["EBBTIDE_DEEPSPEED_TESTS"] == "x"
def test_hangs(): os._exit(1)
def test_behind(): pass
"""


@pytest.mark.slow
def test_what_hangs_is_left_and_what_has_run_is_not_run_again(tmp_path):
    folder, unit = tmp_path / "out", tmp_path / "source" / "tests" / "unit"
    (unit / "checkpoint").mkdir(parents=True)
    (unit / "common.py").write_text(COMMON)
    (unit / "simple_model.py").write_text("")
    (unit / "checkpoint" / "test_a.py").write_text(TESTS)
    command = ["--deepspeed-source", str(tmp_path / "source"), "--folder", str(folder)]
    command += ["--arms", "plain", "--json", str(tmp_path / "figures.json"), FILE]
    assert main(command) == 0, "failures of stock count against a plan"
    results = lines(folder / "results.jsonl")
    outcomes = {r["case"].split("::")[1]: r["outcome"] for r in results if "outcome" in r}
    assert outcomes == {"test_good": "passed", "test_skipped": "skipped", "test_bad": "failed", "test_behind": "passed"}
    begun = [r["case"].split("::")[1] for r in results if "outcome" not in r]
    assert sorted(begun) == sorted([*outcomes, "test_hangs", "test_hangs"])
    assert json.loads((tmp_path / "figures.json").read_text())["commits"]["plain"]
