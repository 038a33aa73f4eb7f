"""Tests of the examples: each one trains a few steps under a plan, on one rank and without a GPU."""

import json
import runpy
import sys
from pathlib import Path

import ebbtide.runtime
import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
# Script -> subgroups of its engine: the optimizer's parameter groups, each smaller than a subgroup.
SUBGROUPS = {"plain_loop.py": 1, "hf_trainer.py": 2, "accelerate_loop.py": 1, "trl_sft.py": 2, "lightning_fit.py": 1}


def config_of(script):
    """Return the DeepSpeed config in the `tune run` command that an example script's docstring shows."""
    command = next(line for line in (EXAMPLES / script).read_text().splitlines() if line.strip().startswith("tune run"))
    assert command.strip() in (EXAMPLES / "README.md").read_text()
    return EXAMPLES.parent / command.split()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("script", SUBGROUPS)
def test_an_example_trains_under_a_plan(script, only_rank, tmp_path, monkeypatch, capfd):
    config = json.loads(config_of(script).read_text())
    assert config["ebbtide"] == {"plan": "automatic"}  # "auto" would first measure this machine
    size = config["zero_optimization"].get("sub_group_size", 10**9)
    placement = [{"placement": "host", "count": SUBGROUPS[script]}]
    config["ebbtide"] = {"plan": {"subgroup_size": size, "placement": placement}}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [script, "ds.json", "3"])
    monkeypatch.syspath_prepend(str(EXAMPLES))
    engines = watched_engines(monkeypatch)
    if script == "lightning_fit.py":
        without_a_gpu(monkeypatch)
    ebbtide.runtime.enable()
    try:
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    finally:
        ebbtide.runtime.disable()
        if script != "plain_loop.py":
            forget_accelerate()
    assert [hasattr(engine.optimizer, "_ebbtide") for engine in engines] == [True]
    assert engines[0].global_steps == 3
    assert "loss" in capfd.readouterr().out


def test_every_example_is_tried():
    scripts = {path.name for path in EXAMPLES.glob("*.py")}
    assert scripts == {*SUBGROUPS, "tiny_llama.py"}


def watched_engines(monkeypatch):
    import deepspeed

    engines, stock = [], deepspeed.DeepSpeedEngine.__init__

    def init(engine, *args, **kwargs):
        engines.append(engine)
        stock(engine, *args, **kwargs)

    monkeypatch.setattr(deepspeed.DeepSpeedEngine, "__init__", init)
    return engines


def without_a_gpu(monkeypatch):
    """Make Lightning train without a GPU. Lightning requires CUDA devices, and DeepSpeed does not."""
    import torch
    from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy

    monkeypatch.setattr(
        DeepSpeedStrategy, "setup_environment", lambda self: super(DDPStrategy, self).setup_environment()
    )
    monkeypatch.setattr(
        DeepSpeedStrategy, "parallel_devices", property(lambda _: [torch.device("cpu", 0)], lambda *_: None)
    )


def forget_accelerate():
    from tests.runtime.frontdoor.trainers import forget_accelerate as forget

    forget()
