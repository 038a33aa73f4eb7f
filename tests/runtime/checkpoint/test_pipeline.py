"""Tests of checkpoints and plans under DeepSpeed's pipeline engine, which trains by ``train_batch`` and has no
``step``.
"""

import errno
import json
import os

import pytest
import torch
from ebbtide.runtime.checkpoint.errors import CheckpointError
from ebbtide.runtime.frontdoor.recorded import record
from ebbtide.runtime.replan import auto
from ebbtide.runtime.verify.lines import Lines
from ebbtide.runtime.zero.attach import session_of
from ebbtide.simulator import CheckpointPlan
from ebbtide.simulator.plan import Way
from ebbtide.tuner.placements.planning import QuickPlan

from studies.bench.bits import differences, state_of
from studies.bench.byte_gpt import ds_config
from tests.machines import node
from tests.runtime.checkpoint.conftest import Gate

pytestmark = pytest.mark.slow

STEPS, INTERVAL = auto.WATCHED_STEPS + 3, 2


def start(key=None):
    import deepspeed
    from deepspeed.pipe import PipelineModule

    torch.manual_seed(0)
    layers = [torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 16)]
    model = PipelineModule(layers, num_stages=1, loss_fn=torch.nn.functional.mse_loss)
    config = ds_config(micro_batch=2, subgroup_size=500, learning_rate=1e-2, stage=1, accumulation=2, clipping=0.1)
    scheduler = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 5, "warmup_type": "linear"}}
    config = {**config, "scheduler": scheduler, **({"ebbtide": key} if key else {})}
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def train(engine, first, last):
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        batches = [torch.randn(2, 16, generator=generator).bfloat16() for _ in range(2)]
        engine.train_batch(iter([(batch, batch) for batch in batches]))


def state(engine):
    named = {name: parameter.detach().clone() for name, parameter in engine.module.named_parameters()}
    return {**state_of(engine), **named, "rate": torch.tensor(engine.get_lr())}


@pytest.fixture(scope="module")
def stock(only_rank):
    engine = start()
    train(engine, 0, STEPS)
    reached = state(engine)
    engine.destroy()
    return reached


def check_checkpoints(engine, folder, stock):
    """Check that an engine trained like stock, and wrote its automatic checkpoints."""
    assert not differences(state(engine), stock)
    engine.checkpoint_engine.wait()
    engine.destroy()
    written = sorted(int(path.name.removeprefix("global_step")) for path in folder.glob("global_step*"))
    assert written == [*range(INTERVAL, STEPS + 1, INTERVAL)]


def resumed(key, folder):
    engine = start(key)
    engine.load_checkpoint(str(folder))
    assert engine.global_steps == STEPS - 1
    train(engine, STEPS - 1, STEPS)
    reached = state(engine)
    engine.destroy()
    return reached


def test_automatic_checkpoints_are_written_and_resumed(front_door, stock, tmp_path):
    key = {"checkpoint": {"dir": str(tmp_path), "interval_steps": INTERVAL}}
    engine = start(key)
    train(engine, 0, STEPS)
    check_checkpoints(engine, tmp_path, stock)
    # With DeepSpeed's own Adam, powers of beta would differ after a resume.
    assert not differences(resumed(key, tmp_path), resumed(None, tmp_path))


def test_auto_plans_and_writes_checkpoints(front_door, stock, tmp_path, monkeypatch):
    ways = [Way("resident", "device")]
    better = lambda _, __, now, *___: QuickPlan(now.with_ways(ways * now.subgroup_count), 1.0, 2.0)
    monkeypatch.setattr(auto, "better_plan", better)
    monkeypatch.setattr(auto, "measured_machine", lambda drives: node())
    key = {"plan": "auto", "device": "emulated", "checkpoint": {"dir": str(tmp_path), "interval_steps": INTERVAL}}
    engine = start(key)
    train(engine, 0, auto.WATCHED_STEPS - 1)
    assert set(session_of(engine).plan.placements) == {"host"}
    train(engine, auto.WATCHED_STEPS - 1, STEPS)
    assert set(session_of(engine).plan.placements) == {"resident"}
    check_checkpoints(engine, tmp_path, stock)
    assert not differences(resumed(key, tmp_path), stock)


def test_the_error_of_a_save_is_raised_after_the_next_batch(only_rank, tmp_path):
    from ebbtide.runtime.checkpoint import install

    def fail():
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    engine, gate = start(), Gate("payload_fsynced", fail)
    lazy = install(engine, CheckpointPlan(interval_steps=1, dir=str(tmp_path)), files=gate)
    train(engine, 0, 1)
    gate.opened.set()
    lazy._job.wait()
    with pytest.raises(CheckpointError, match="'global_step1' of step 1 failed in the background"):
        train(engine, 1, 2)
    engine.destroy()


def test_a_record_for_verify_holds_each_batch(only_rank, tmp_path):
    engine, ends = start(), []
    record(engine, Lines(tmp_path, 0, {}), 3, lambda: ends.append(engine.global_steps))
    train(engine, 0, 4)
    _, begin, *batches = map(json.loads, (tmp_path / "rank0.jsonl").read_text().splitlines())
    assert ends == [3]
    assert [line["step"] for line in (begin, *batches)] == [0, 1, 2, 3]
    assert begin["losses"] == []
    assert all(len(line["losses"]) == 1 and line["norm"] > 0 for line in batches)
    assert batches[-1]["tensors"] != begin["tensors"]
    engine.destroy()


def test_auto_says_that_it_plans_for_one_stage_only(front_door, monkeypatch, caplog):
    # The number of stages is faked, because the test has one rank.
    monkeypatch.setattr("ebbtide.runtime.zero.checks.private.pipeline_stages", lambda engine: 2)
    engine = start({"plan": "auto"})
    assert "ebbtide makes no plan of its own for a model of 2 pipeline stages" in caplog.text
    train(engine, 0, 1)
    calls = session_of(engine).after_step
    assert calls  # those of the log and of the checkpoints
    assert not any(isinstance(getattr(call, "__self__", None), auto._Automatic) for call in calls)  # none that plans
    engine.destroy()
