"""Tests that Accelerate's own config is read as the DeepSpeed config that Accelerate makes of it."""

import json
import re

import pytest
import yaml
from click.testing import CliRunner
from ebbtide import estimate
from ebbtide.simulator import ModelError
from ebbtide.simulator.estimates.deepspeed_keys import _UNCOUNTED, check_counted, loaded, of_accelerate, read_file
from ebbtide.tuner.cli import main
from ebbtide.tuner.service.requests import Answer

CPU = {"device": "cpu"}

YAML = """\
compute_environment: LOCAL_MACHINE
debug: false
deepspeed_config:
  gradient_accumulation_steps: {steps}
  gradient_clipping: {clip}
  offload_optimizer_device: {device}
  offload_param_device: none
  zero3_init_flag: true
  zero3_save_16bit_model: true
  zero_stage: {stage}
distributed_type: DEEPSPEED
mixed_precision: {precision}
num_processes: 1
"""
# Keys of Accelerate's DeepSpeed config that change nothing that is estimated.
_ASIDE = {"steps_per_print", "zero_allow_untested_optimizer"}


def written(path, **values):
    path.write_text(YAML.format(**{"steps": 4, "clip": 0.5, "device": "cpu", "stage": 3, "precision": "bf16"} | values))
    return path


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("device", ["cpu", "none"])
def test_the_translation_is_accelerates_own(tmp_path, stage, device):
    accelerate = pytest.importorskip("accelerate")
    plugin = accelerate.DeepSpeedPlugin(
        zero_stage=stage,
        offload_optimizer_device=device,
        offload_param_device="none",
        gradient_accumulation_steps=4,
        gradient_clipping=0.5,
        zero3_save_16bit_model=True,
    )
    own = {key: value for key, value in plugin.deepspeed_config.items() if key not in _ASIDE}
    own["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    mine = read_file(written(tmp_path / "a.yaml", stage=stage, device=device))
    assert mine.pop("bf16") == {"enabled": True}
    for key in ("offload_optimizer", "offload_param"):
        own["zero_optimization"][key] = {k: v for k, v in own["zero_optimization"][key].items() if v is not None}
    assert mine == own | {"train_micro_batch_size_per_gpu": "auto"}
    loaded(mine)


def test_the_file_that_it_names_is_read_from_a_file_and_refused_in_a_request(tmp_path):
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 1}}))
    given = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "ds.json"}}
    (tmp_path / "a.yaml").write_text(
        "deepspeed_config:\n  deepspeed_config_file: ds.json\ndistributed_type: DEEPSPEED\n"
    )
    assert read_file(tmp_path / "a.yaml") == {"zero_optimization": {"stage": 1}}
    with pytest.raises(ModelError, match="must be given itself"):
        of_accelerate(given)


def test_another_way_of_training_is_refused(tmp_path):
    (tmp_path / "a.yaml").write_text("compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\n")
    with pytest.raises(ModelError, match="distributed_type DEEPSPEED, but got 'FSDP'"):
        read_file(tmp_path / "a.yaml")


@pytest.mark.parametrize("given", [{"zero_stage": 3}, {"a": 1, "b": {}}])
def test_a_config_without_a_key_of_deepspeed_is_refused(given):
    with pytest.raises(ModelError, match="a key that DeepSpeed knows, such as zero_optimization"):
        loaded(given)


@pytest.mark.parametrize("key", _UNCOUNTED)
def test_a_key_that_decides_what_fits_is_refused(key):
    def given(value):
        section, _, name = key.rpartition(".")
        return {section: {name: value}} if section else {name: value}

    harmless = _UNCOUNTED[key][0]
    with pytest.raises(ModelError, match=f"{key} must be absent or {json.dumps(harmless)} to estimate") as refused:
        check_counted(given(8 if harmless == 1 else True), 2, 2)
    assert refused.value.key == f"ds_config.{key}"
    check_counted(given(harmless), 2, 2)


HALVED = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}


@pytest.mark.parametrize("more", [HALVED, {"sequence_parallel_size": 8}, {"a_key": 1}])
def test_every_door_refuses_what_it_cannot_count(tmp_path, more):
    config = {**more, **({} if "a_key" in more else {"zero_optimization": {"stage": 3, "offload_optimizer": CPU}})}
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"DeepSpeed|absent") as refused:
        _ = Answer(model="Llama 3 8B", machine="rtx4090", ds_config=config).job
    for command in ("plan", "simulate", "search"):
        flags = ["--machine", "rtx4090", "--model", "Llama 3 8B", "--ds-config", str(path)]
        done = CliRunner().invoke(main, [command, *flags])
        assert done.exit_code == 2, done.output
        assert str(refused.value) in done.output
    for given in (config, path):
        with pytest.raises(ValueError, match=re.escape(str(refused.value))):
            estimate("Llama 3 8B", batch=1, sequence=512, ds_config=given)


def test_every_door_answers_for_accelerates_config(tmp_path):
    path = written(tmp_path / "a.yaml")
    flags = ["--machine", "h100", "--model", "Llama 3.2 1B", "--sequence", "512", "--ds-config", str(path), "--json"]
    simulated = json.loads(CliRunner().invoke(main, ["simulate", *flags]).stdout)
    assert simulated["strategy"] == "zero3_offload"
    body = {"machine": "h100", "model": "Llama 3.2 1B", "sequence": 512}
    given = yaml.safe_load(path.read_text())
    job = Answer(**body, ds_config=given).job
    more = Answer(**body, ds_config={**given, "num_processes": 8}).job
    assert any("for 8 processes, and the answer for 1" in note for note in more.notes)
    assert Answer(**body, gpus=8, ds_config={**given, "num_processes": 8}).job.notes == job.notes
    assert (job.zero_stage, job.accumulation, job.clip, job.precision) == (3, 4, 0.5, "bf16")
    told = estimate("Llama 3.2 1B", batch=1, sequence=512, gpu="h100", ds_config=path)
    assert told.iteration_s == pytest.approx(simulated["iteration_s"])
