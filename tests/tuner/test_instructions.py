"""Tests of how a plan is used for training: the Trainer's arguments and the DeepSpeed config have the plan's numbers,
such as the micro-batch size.
"""

from types import SimpleNamespace

import pytest
from ebbtide.simulator import preset, workload_from_model
from ebbtide.tuner.answer.instructions import trainer, use
from ebbtide.tuner.answer.report import show_plan, wide_console
from ebbtide.tuner.placements.planning import plan
from ebbtide.tuner.service.requests import MODELS


@pytest.fixture(scope="module")
def planned():
    machine = preset("a100-node")
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "bf16": {"enabled": True}}
    config["zero_optimization"] = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    work = workload_from_model(MODELS["Llama 3.2 1B"], machine, ds_config=config, sequence=512)
    return work, plan(work, machine)


def test_the_arguments_are_python_and_say_all_that_memory_depends_on(planned):
    work, _ = planned
    text = trainer(work)
    given = eval(text, {"TrainingArguments": SimpleNamespace})
    assert vars(given) == {
        "output_dir": "out",
        "bf16": True,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "gradient_checkpointing": True,
        "deepspeed": "ds.json",
    }
    assert "512 tokens" in text


def test_what_is_auto_in_the_config_becomes_the_plans_number(planned):
    work, made = planned
    left_out = use(made, work, None)["deepspeed"]
    auto = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"},
    }
    for config in (left_out, use(made, work, auto)["deepspeed"]):
        assert config["train_micro_batch_size_per_gpu"] == 2
        assert config["gradient_accumulation_steps"] == 4
        assert config["bf16"] == {"enabled": True}
        assert config.get("fp16", {"enabled": False}) == {"enabled": False}
    assert "train_batch_size" not in left_out


def test_a_plan_knows_what_it_was_made_for(planned):
    work, made = planned
    assert made.trained_as == work.trained_as
    assert made.trained_as.recompute is True


def test_a_plan_that_is_shown_names_what_it_counts_on(planned, capsys):
    _, made = planned
    show_plan(made, wide_console())
    told = " ".join(capsys.readouterr().out.split())  # the console breaks lines at its width
    assert "bf16, micro-batch 2, accumulation 4, 512 tokens per sample, gradient_checkpointing=True" in told
