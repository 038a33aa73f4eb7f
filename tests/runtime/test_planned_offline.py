"""Tests of plans made from a model config before any training: the plans fit the engine, and training
under them has stock DeepSpeed's results, bit for bit.
"""

import json
import logging
from importlib.util import find_spec

import ebbtide.runtime
import pytest
import torch
from click.testing import CliRunner
from ebbtide.runtime import session_of
from ebbtide.tuner.cli import main

from studies.bench.bits import differences
from tests.runtime.contract.training import all_state

# Not imported here, because collecting this file would then take each worker a second.
pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="could not find transformers")
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
}


def trained(engine, steps=4):
    from examples.tiny_llama import samples

    tokens = torch.stack([row["input_ids"] for row in samples(2 * steps)])
    for batch in tokens.split(2):
        engine.backward(engine(input_ids=batch, labels=batch).loss)
        engine.step()
    state = all_state(engine)
    engine.destroy()
    return state


@pytest.mark.usefixtures("only_rank")
@pytest.mark.parametrize("stage", [1, 2])
def test_a_plan_from_a_config_fits_the_engine_and_keeps_the_bits(stage, tmp_path, caplog):
    import deepspeed

    from examples.tiny_llama import SEQUENCE, tiny_llama

    model = tmp_path / "config.json"
    model.write_text(tiny_llama().config.to_json_string())
    zero = {"stage": stage, "offload_optimizer": {"device": "cpu"}}
    (tmp_path / "ds.json").write_text(json.dumps({**CONFIG, "zero_optimization": zero}))
    result = CliRunner().invoke(
        main,
        [
            "plan",
            "--machine",
            "h200",
            "--model",
            str(model),
            "--sequence",
            str(SEQUENCE),
            "--ds-config",
            str(tmp_path / "ds.json"),
            "--subgroup-size",
            "20000",
            "-o",
            str(tmp_path / "plan.json"),
            "--emit-deepspeed",
            str(tmp_path / "out.json"),
        ],
    )
    assert result.exit_code == 0, result.output
    config = json.loads((tmp_path / "out.json").read_text())
    assert config["zero_optimization"]["stage"] == stage
    with caplog.at_level(logging.WARNING, "ebbtide"):
        engine, *_ = ebbtide.runtime.initialize(
            model=tiny_llama(), config=config, plan=str(tmp_path / "plan.json"), device="emulated"
        )
    assert "ZeRO-" not in caplog.text  # the workload is the one for which the plan was made
    assert len(session_of(engine).plan.subgroups) > 3
    engine_of = tiny_llama()
    stock, *_ = deepspeed.initialize(
        model=engine_of, model_parameters=engine_of.parameters(), config={**CONFIG, "zero_optimization": zero}
    )
    assert differences(trained(engine), trained(stock)) == ()


SIZES = {"vocab_size": 101, "num_hidden_layers": 3, "num_attention_heads": 4, "hidden_size": 32}


@pytest.mark.usefixtures("only_rank")
@pytest.mark.parametrize("family", ["gpt2", "qwen3", "phi3", "opt"])
def test_subgroups_of_zero3_from_a_config_are_the_engines(family):
    import deepspeed
    import transformers
    from ebbtide.runtime.zero.flat_partitions import subgroups_of
    from ebbtide.simulator import preset, workload_from_model

    own = {"intermediate_size": 96, "num_key_value_heads": 2} if family in ("qwen3", "phi3") else {}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.AutoConfig.for_model(family, **SIZES, **own, **tokens)
    model = transformers.AutoModelForCausalLM.from_config(config)
    settings = {
        **CONFIG,
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "sub_group_size": 3000},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
    work = workload_from_model(config.to_dict(), preset("h200"), settings, sequence=32)
    sizes = subgroups_of(engine.optimizer, 3000)
    engine.destroy()
    assert work.subgroups == sizes
