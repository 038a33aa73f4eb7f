"""Tests that every field of a job changes the estimate, and reaches the job by every door: flags of
commands, requests and Python. All of them follow from `Job`, so that a new field needs no line here or elsewhere.
"""

from typing import Annotated, get_args

import click
import pytest
from ebbtide.simulator import preset
from ebbtide.simulator.estimates.estimate import estimated
from ebbtide.simulator.estimates.job import Asked, Job, bare, settings
from ebbtide.simulator.estimates.models.architecture import architecture
from ebbtide.simulator.estimates.offloading import offloading
from ebbtide.tuner.cli import main
from ebbtide.tuner.inputs import given, options_of
from ebbtide.tuner.service.requests import Request, Scenario, controls_of_a_job, fields_of_a_job
from pydantic import create_model

# The loss and the layers are large enough that each setting of theirs counts.
TINY = {"layers": 4, "hidden": 1024, "heads": 8, "kv_heads": 4, "vocabulary": 32000, "name": "tiny"}
ON = preset("h100-node")
# Values that do not follow from a field's type, and fields without which another has no effect.
VALUES = {
    "architecture": architecture({**TINY, "layers": 5}),
    "offload": offloading(
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}}
    ),
    "optimizer": "lion",
    "precision": "fp32",
    "clip_rate": 0.05,
    "clip": 0.0,
    "flash_version": 3,
    "gradient_bytes": 4,
    "notes": ("assumed",),
    "config": {"steps_per_print": 7},
    "sub_group_size": 10**6,
    "reduce_bucket_elements": 10**6,
    "prefetch_bucket_elements": 10**4,
    "max_live_parameters": 0,
    "max_reuse_distance": 0,
    "persistence_threshold": 0,
}
BESIDE = {
    "pipeline_parallel": {"zero_stage": 1},
    "stage": {"zero_stage": 1, "pipeline_parallel": 2},
    "sequence_parallel": {"tensor_parallel": 2},
    "launcher": {"data_parallel": 2},
    "flash_version": {"sequence": 2**16},
    "overlap_comm": {"data_parallel": 8, "zero_stage": 2},
    "max_live_parameters": {"accumulation": 2, "data_parallel": 8, "prefetch_bucket_elements": 0},
    "max_reuse_distance": {"prefetch_bucket_elements": 0},
}
# Fields that the plan or DeepSpeed's own strategies read from the job, not from the workload.
OF_THE_JOB = {"offload"}


def other(name):
    """Return another value of a field than its default."""
    if name in VALUES:
        return VALUES[name]
    field = Job.model_fields[name]
    kind = bare(field.annotation)
    if kind is bool:
        return not field.default
    if known := get_args(kind):
        return next(one for one in known if one != field.default)
    return 0.5 if kind is float else (field.default or 1) * 2 if field.default else 1


def made(**fields):
    return Job.of_deepspeed(TINY, None, **fields)


@pytest.mark.parametrize("name", Job.model_fields)
def test_every_field_changes_the_estimate(name):
    beside = BESIDE.get(name, {})
    plain = made(**beside)
    changed = plain.changed(**{name: other(name)})
    assert getattr(changed, name) == other(name) != getattr(plain, name)
    before, after = (estimated(job, ON).model_copy(update={"job": None, "name": ""}) for job in (plain, changed))
    assert (before != after) or (name in OF_THE_JOB and plain.offload.strategy(3) != changed.offload.strategy(3))


def words_of(setting):
    value = other(setting.name)
    option = "--" + setting.flag.replace("_", "-")
    return [option] if isinstance(value, bool) else [option, str(value)]


@pytest.mark.parametrize("setting", settings(), ids=lambda one: one.name)
def test_every_setting_is_given_by_its_flag_and_by_its_field_of_a_request(setting):
    value = other(setting.name)
    command = click.Command("any", params=options_of())
    about = command.make_context("any", words_of(setting)).params
    assert given(about) == {setting.name: value}
    assert given(about, "no field") == {}
    if setting.http is not None:
        sent = {setting.http: setting.value(value, setting.http)}
        job = Scenario(machine="h200", model=TINY, **sent).job
        assert getattr(job, setting.name) == value != getattr(Scenario(machine="h200", model=TINY).job, setting.name)


@pytest.mark.parametrize("name", ["plan", "simulate", "calibrate"])
def test_commands_about_a_job_have_every_flag(name):
    command = main.get_command(click.Context(main), name)
    assert {one.flag for one in settings()} <= {parameter.name for parameter in command.params}


class Wider(Job):
    """A job with one more property, which is described nowhere else."""

    colours: Annotated[int, Asked("number of colours of a pixel.", http="shades")] = 3


def test_every_setting_of_requests_has_a_control_on_the_page():
    shown = {control["key"]: control for control in controls_of_a_job()}
    assert list(shown) == [one.http for one in settings() if one.http is not None]
    numbers = [one.http for one in settings() if one.http is not None and one.kind in (int, float)]
    assert all("steps" in shown[key] for key in numbers), "a choice cannot show a number that is not among its values"
    for key, control in shown.items():
        values = [value for value, _ in control["values"]] if "values" in control else control["steps"]
        assert control["standard"] in values
        asked = {"machine": "h200-node", "model": TINY, "gpus": 2}
        for value in values:  # each is accepted, and each but the standard changes the job
            sent = asked if value is None else {**asked, key: value}
            changed, usual = (Scenario(**one).job.model_dump(exclude={"notes"}) for one in (sent, asked))
            assert (changed != usual) == (value not in (None, asked.get(key, control["standard"])))


def test_one_field_is_a_flag_a_field_of_requests_and_an_argument():
    (option,) = options_of(["colours"], Wider)
    assert (option.opts, option.help) == (["--colours"], "With --model: number of colours of a pixel.")
    request = create_model("Asking", __base__=Request, **fields_of_a_job(Wider))
    assert (request(shades=4).shades, request.model_fields["shades"].description) == (
        4,
        "number of colours of a pixel.",
    )
    assert Wider.of_deepspeed(TINY, None, colours=4).colours == 4
    *_, control = controls_of_a_job(Wider)
    assert (control["key"], control["label"], control["steps"]) == ("shades", "Shades", [1, 2, 4, 8, 16, 32, 64])
