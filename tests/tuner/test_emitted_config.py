"""Tests of the DeepSpeed config that `tune plan --emit-deepspeed` writes. Keys that Hugging Face's Trainer fills in
stay `"auto"`, and keys that the plan decides are set.
"""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from ebbtide.runtime.frontdoor.request import read_request
from ebbtide.simulator import Plan
from ebbtide.tuner.cli import main

from tests.tuner.test_search import machine, workload


@pytest.fixture
def inputs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    machine().save(tmp_path / "machine.json")
    workload(6).save(tmp_path / "workload.json")
    return ["--machine", "machine.json", "--workload", "workload.json"]


def emit(*arguments):
    result = CliRunner().invoke(main, ["plan", *arguments, "--emit-deepspeed", "ds.json"])
    return result, json.loads(Path("ds.json").read_text()) if result.exit_code == 0 else None


def test_a_config_for_the_trainer(inputs, tmp_path):
    result, config = emit(*inputs)
    assert "written to plan.json and ds.json" in result.output
    plan = Plan.load("plan.json")
    assert read_request(config["ebbtide"]).plan == plan
    assert config["ebbtide"]["plan"] == str(tmp_path / "plan.json")
    zero = config["zero_optimization"]
    assert (zero["sub_group_size"], zero["offload_optimizer"]["device"]) == (3 * 10**7, "cpu")
    assert config["gradient_clipping"] == config["gradient_accumulation_steps"] == "auto"
    assert config["bf16"] == {"enabled": "auto"}


def test_what_is_given_stays(inputs, tmp_path):
    given = {
        "gradient_clipping": 0.5,
        "train_micro_batch_size_per_gpu": "auto",
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": "auto",
            "offload_optimizer": {"device": "none", "pin_memory": True},
        },
    }
    (tmp_path / "given.json").write_text(json.dumps(given))
    _, config = emit(*inputs, "--ds-config", "given.json")
    assert config["gradient_clipping"] == 0.5
    assert config["train_micro_batch_size_per_gpu"] == "auto"
    assert config["zero_optimization"]["reduce_bucket_size"] == "auto"
    assert config["zero_optimization"]["offload_optimizer"] == {"device": "cpu", "pin_memory": True}
    assert "bf16" not in config


def test_what_cannot_be_read_or_written_is_named(inputs, tmp_path):
    (tmp_path / "given.json").write_text("[]")
    result, _ = emit(*inputs, "--ds-config", "given.json")
    assert result.exit_code == 2
    assert "must be a file that holds a JSON object, but given.json holds a list" in result.output
    result = CliRunner().invoke(main, ["plan", *inputs, "--emit-deepspeed", "no/ds.json"])
    assert result.exit_code == 2
    assert "--emit-deepspeed must be a file that can be written" in result.output


def test_a_section_that_is_null_is_filled(inputs, tmp_path):
    (tmp_path / "given.json").write_text('{"zero_optimization": null}')
    _, config = emit(*inputs, "--ds-config", "given.json")
    assert config["zero_optimization"]["offload_optimizer"] == {"device": "cpu"}
    assert config["zero_optimization"]["stage"] == 3
