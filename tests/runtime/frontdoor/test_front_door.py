"""Tests of the ``ebbtide`` key in a real DeepSpeed config: which engines get a plan by this key, in every
form of config.
"""

import argparse
import base64
import json

import pytest
import torch
from ebbtide.runtime.frontdoor import hook
from ebbtide.runtime.frontdoor.initialize import read
from ebbtide.runtime.frontdoor.request import RequestError
from ebbtide.runtime.zero.checks.guard import ConfigError
from ebbtide.runtime.zero.stage3 import EbbtideStage3

from studies.bench.byte_gpt import ByteGPT, ds_config
from tests.runtime.contract.small_model import SmallModel
from tests.runtime.contract.training import SUBGROUP, assert_same, outcome, plan_for, start

PATTERN = ["host", "device", "resident"]


@pytest.fixture(scope="module")
def plan(only_rank):
    engine = start()
    made = plan_for(engine, PATTERN).model_dump(mode="json")
    engine.destroy()
    return made


def config_with(key, **options):
    made = ds_config(micro_batch=2, subgroup_size=SUBGROUP, learning_rate=1e-3, **options)
    return {**made, "ebbtide": key}


def initialize(config=None, size=None, **options):
    import deepspeed

    torch.manual_seed(0)
    model = SmallModel() if size is None else ByteGPT(size)
    options.setdefault("model_parameters", model.parameters())
    return deepspeed.initialize(model=model, config=config, **options)[0]


def test_same_bits_as_stock(front_door, plan):
    stock = outcome(initialize({**config_with(None)}))
    engine = initialize(config_with({"plan": plan, "device": "emulated"}))
    assert isinstance(engine.optimizer, EbbtideStage3)
    assert_same(outcome(engine), stock)


def test_a_config_by_file_in_base64_and_in_the_arguments(front_door, plan, tmp_path):
    config = config_with({"plan": "plan.json"})
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    file = tmp_path / "ds.json"
    file.write_text(f"// DeepSpeed reads comments too\n{json.dumps(config)}")
    packed = base64.urlsafe_b64encode(json.dumps(config_with({"plan": plan})).encode()).decode()
    arguments = argparse.Namespace(deepspeed_config=str(file), local_rank=0)
    for call in ({"config": str(file)}, {"config": packed}, {"args": arguments}):
        engine = initialize(**call)
        assert isinstance(engine.optimizer, EbbtideStage3)
        engine.destroy()
    assert arguments.deepspeed_config == str(file)
    engine = initialize(None, config_params=config_with({"plan": plan}))
    assert isinstance(engine.optimizer, EbbtideStage3)
    engine.destroy()


@pytest.mark.parametrize("key", ["train_batch_size", "ebbtide"])
def test_duplicate_keys_are_refused_as_by_deepspeed(front_door, tmp_path, key):
    file = tmp_path / "ds.json"
    text = json.dumps(config_with({"plan": "auto"}) | {"train_batch_size": 2}).removesuffix("}")
    file.write_text(f'{text}, "{key}": {{}}}}')
    with pytest.raises(ValueError, match=rf"Duplicate keys in DeepSpeed config: \['{key}'\]"):
        initialize(str(file))


@pytest.mark.parametrize("text", ["[1]", "1", '{"train_batch_size": 1e400}', "{"])
def test_a_config_that_deepspeed_cannot_use_is_left_to_it(tmp_path, text):
    (tmp_path / "ds.json").write_text(text)
    assert read(str(tmp_path / "ds.json")) == (None, None)


def test_checkpoints_alone_and_beside_a_plan(front_door, plan, tmp_path, monkeypatch):
    looks = []
    monkeypatch.setattr(hook, "_has_leftovers", lambda folder: bool(looks.append(folder)))
    for key in ({"checkpoint": {"keep": 1}}, {"plan": plan, "checkpoint": {"keep": 1}}):
        engine = initialize(config_with(key))
        assert isinstance(engine.optimizer, EbbtideStage3) == ("plan" in key)
        for step in (1, 2):
            engine.global_steps = step
            engine.save_checkpoint(str(tmp_path / str(len(key))))
        engine.destroy()
        kept = [p.name for p in (tmp_path / str(len(key))).iterdir() if p.is_dir()]
        assert [name for name in kept if not name.startswith(".")] == ["global_step2"]
    assert looks == [], "the hook must not look for leftovers while an engine lists folders itself"


def test_engines_that_train_nothing_stay_as_they_are(front_door, plan, caplog):
    config = config_with({"plan": plan})
    del config["optimizer"]
    engine = initialize(config, model_parameters=None)
    assert not hasattr(engine.optimizer, "_ebbtide")
    engine.destroy()
    key = {"plan": plan, "checkpoint": {"interval_steps": 2, "dir": "checkpoints"}}
    reference = config_with(key, precision="fp32")
    reference["zero_optimization"] = {"stage": 0}
    reference["optimizer"]["params"]["torch_adam"] = True  # the fused optimizer needs a GPU
    engine = initialize(reference)
    assert not hasattr(engine.optimizer, "_ebbtide")
    assert type(engine.checkpoint_engine).__name__ == "TorchCheckpointEngine"
    assert '"ebbtide.checkpoint" has no effect' in caplog.text
    engine.destroy()


def test_a_bad_key_is_told_before_the_model_is_touched(front_door):
    with pytest.raises(RequestError, match="must be an object such as"):
        initialize(config_with("auto"))
    with pytest.raises(ConfigError, match="offload_optimizer must be an object, but got 'cpu'"):
        initialize(config_with({"plan": "auto"}, offload_optimizer="cpu"))
    nvme = {"device": "nvme"}
    with pytest.raises(ValueError, match=r"offload_optimizer\.device must be 'cpu'"):
        initialize(config_with({"plan": "auto"}, offload_optimizer=nvme))


def test_where_nothing_is_offloaded_stock_trains_and_checkpoints_may_still_be_asked_for(front_door, plan, caplog):
    for key in ({"plan": "auto"}, {"plan": plan}, {"plan": "auto", "checkpoint": {"keep": 1}}):
        config = config_with(key, offload=False)
        config["optimizer"]["params"]["torch_adam"] = True  # a fused optimizer takes a minute to compile
        engine = initialize(config)
        assert type(engine.optimizer).__name__ == "DeepSpeedZeroOptimizer_Stage3"
        lazy = type(engine.checkpoint_engine).__name__ == "LazyCheckpointEngine"
        assert lazy == ("checkpoint" in key)
        engine.destroy()
    assert caplog.text.count("this engine is left to DeepSpeed, without a plan") == 3
