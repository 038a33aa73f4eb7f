"""Tests of an unchanged script with Trainer, Accelerate and Lightning: with the config key ``ebbtide``,
training has stock DeepSpeed's results, bit for bit.
"""

import gc
import json
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import ebbtide.runtime
import pytest
import torch
from ebbtide.runtime.storage.folder import list_checkpoints
from ebbtide.runtime.storage.reader import stored_problems
from ebbtide.simulator.plan import Plan, PlanError

from studies.bench.bits import differences, state_of
from tests import prepared
from tests.runtime.frontdoor import trainers

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def libraries():
    trainers.settle_imports()
    yield
    gc.unfreeze()


@pytest.fixture
def front_door(only_rank, libraries):
    ebbtide.runtime.enable()
    yield
    ebbtide.runtime.disable()
    trainers.forget_accelerate()


@pytest.mark.slow
def test_same_bits_and_losses_on_two_ranks(child_environment, tmp_path, deepspeed_ops):
    words = ["-m", "tests.runtime.frontdoor.trainers", tmp_path, *trainers.TRAINERS]
    done = prepared.run(words, env=child_environment, cwd=ROOT, timeout=500)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    told = {path.name: path.read_text() for path in tmp_path.glob("rank*")}
    assert told == {"rank0": "same", "rank1": "same"}


TRAINER_CASES = {
    "its own optimizer and schedule, accumulation of DeepSpeed's": {
        "gradient_accumulation_steps": 2,
        "max_steps": 6,
        "config": {
            "gradient_accumulation_steps": 2,
            "gradient_clipping": 1.0,
            "fp16": {"enabled": False},
            "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": 0.1}},
            "scheduler": {
                "type": "WarmupLR",
                "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
            },
        },
        "max_grad_norm": 1.0,
        "weight_decay": 0.1,
    },
    "fp32": {"bf16": False, "max_steps": 6},
    "evaluation between steps": {"eval_strategy": "steps", "eval_steps": 2, "max_steps": 6},
    "generation between steps": {"callbacks": trainers.generating, "max_steps": 4},
    "save_only_model": {
        "save_strategy": "steps",
        "save_steps": 2,
        "save_only_model": True,
        "max_steps": 4,
        "save_total_limit": 1,
    },
    "below ZeRO-3": {
        "max_steps": 6,
        "config": {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
    },
}


@pytest.mark.slow
def test_same_bits_through_trl(front_door):
    assert trainers.compare("sft") == []


@pytest.mark.slow
@pytest.mark.parametrize("case", TRAINER_CASES)
def test_settings_of_either_side(front_door, case):
    assert trainers.compare("trainer", **TRAINER_CASES[case]) == []


@pytest.mark.slow
def test_same_bits_of_a_compiled_model(front_door, dynamo):
    compiled = {"torch_compile": True, "torch_compile_backend": "eager"}
    assert trainers.compare("trainer", **compiled, max_steps=4, wrap=trainers.of_words) == []


@pytest.mark.slow
def test_lora_and_the_best_model_at_the_end(front_door, tmp_path):
    options = {
        "wrap": trainers.with_lora,
        "max_steps": 4,
        "save_strategy": "steps",
        "save_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_total_limit": 1,
        "load_best_model_at_end": True,
    }
    folders = {name: tmp_path / name for name in ("stock", "ours")}
    stock, key = trainers.outcome(trainers.with_trainer, None, output_dir=str(folders["stock"]), **options)
    ours, _ = trainers.outcome(trainers.with_trainer, key, output_dir=str(folders["ours"]), **options)
    assert differences(ours[0], stock[0]) == ()
    assert ours[1] == stock[1]
    saved = {}
    for name, folder in folders.items():
        state = json.loads((folder / "checkpoint-4/trainer_state.json").read_text())
        assert state["best_model_checkpoint"] == str(folder / "checkpoint-4")
        (path,) = folder.glob("checkpoint-4/*/*model_states.pt")
        page = torch.load(path, weights_only=False)
        saved[name] = sorted(page["module"]), page["frozen_param_fragments"]
    assert saved["ours"] == saved["stock"]
    assert all("lora" in parameter for parameter in saved["ours"][0])


BEST = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "max_steps": 10}
# The best loss is the greatest one, so the first checkpoint stays the best one.
BEST |= {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}


def stored_key(folder, **checkpoint):
    """Return the config key ``ebbtide`` with a plan that stores one subgroup on a drive."""
    made = Plan.from_fields(trainers.key_for(trainers.with_trainer(None, max_steps=1)[0])["plan"])
    placements = ["stored", *["host"] * (made.subgroup_count - 1)]
    plan = made.placed(placements, storage_dir=str(folder), staging_slots=0, prefetch=0).model_dump(mode="json")
    key = {"plan": plan, "device": "emulated"}
    return key | ({"checkpoint": checkpoint} if checkpoint else {})


@pytest.mark.slow
@pytest.mark.parametrize("limit", [None, 1, 3])
def test_the_best_model_of_stored_state_is_there_at_the_end(front_door, tmp_path, limit, monkeypatch):
    # In an earlier version the state of all checkpoints but the newest was overwritten, and the run failed at its end.
    out = tmp_path / "out"
    rows = trainers.samples(80)  # more samples than are trained, so that the loss on the first ones falls
    monkeypatch.setattr(trainers, "samples", lambda: rows)
    options = {**BEST, "save_total_limit": limit, "output_dir": str(out)}
    trainers.with_trainer(stored_key(tmp_path / "state"), **options)
    listed = {f.name: list_checkpoints(f)[0].status for f in out.iterdir()}
    whole = {name for name, status in listed.items() if status == "committed"}
    kept = {None: {2, 10}, 1: {2}, 3: {2, 8, 10}}[limit]  # checkpoint 2 is the best one
    assert whole == {f"checkpoint-{step}" for step in kept}
    assert len(listed) == (5 if limit is None else len(kept))  # the others are listed without their state
    for name in whole:
        assert not stored_problems(out / name / name.replace("checkpoint-", "global_step"))


def test_one_kept_step_is_refused_where_the_best_is_loaded_at_the_end(front_door, tmp_path):
    with pytest.raises(PlanError, match=r"Set checkpoint.keep to 2 or more"):
        trainers.with_trainer(stored_key(tmp_path / "state", keep=1), **BEST, output_dir=str(tmp_path / "out"))
    assert not list((tmp_path / "out").glob("checkpoint-*"))


def convert(checkpoint, out):
    """Convert a checkpoint with the script zero_to_fp32.py that DeepSpeed puts into every checkpoint, and
    return the fp32 parameters.
    """
    spec = spec_from_file_location("zero_to_fp32", checkpoint / "zero_to_fp32.py")
    script = module_from_spec(spec)
    spec.loader.exec_module(script)
    script.convert_zero_checkpoint_to_fp32_state_dict(str(checkpoint), str(out))
    return torch.load(out / "pytorch_model.bin", weights_only=True)


@pytest.mark.slow
def test_the_end_of_training_leaves_a_checkpoint_for_stock_and_for_zero_to_fp32(front_door, tmp_path):
    stock, _ = trainers.with_trainer(None, max_steps=1)
    trainers.forget_accelerate()
    saving = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "save_total_limit": 1}
    (state, _), _ = trainers.outcome(trainers.with_trainer, trainers.key_for(stock), output_dir=str(tmp_path), **saving)
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-4"]
    found = convert(tmp_path / "checkpoint-4", tmp_path / "converted")
    masters = {name for name in state if name.endswith("/fp32")}
    assert masters
    for name in masters:
        assert torch.equal(found[name.removesuffix("/fp32")], state[name])
    stock.load_checkpoint(str(tmp_path / "checkpoint-4"), load_lr_scheduler_states=False)
    assert differences(state_of(stock), state) == ()
    stock.destroy()
