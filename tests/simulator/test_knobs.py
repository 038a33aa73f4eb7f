"""Tests that advice and searches have every setting of a training job, and keep the samples of a step."""

import pytest
from ebbtide.simulator.estimates.estimate import estimated
from ebbtide.simulator.estimates.job import Job, NotAdvised
from ebbtide.simulator.estimates.knobs import (
    BOUGHT_BESIDE,
    KNOBS,
    SAME_SAMPLES,
    applied,
    changes_text,
    needs,
    present,
    same_samples,
    values,
)
from ebbtide.simulator.estimates.presets import preset

TINY = {"layers": 4, "hidden": 512, "heads": 8, "vocabulary": 50_000}
WORST = {"recompute_share": 0.75, "kernels": "eager", "flash_attention": False, "micro_batch": 2, "accumulation": 3}


def test_every_field_of_a_job_is_one_that_advice_changes_or_says_why_not():
    left = {
        name for name, field in Job.model_fields.items() if any(isinstance(one, NotAdvised) for one in field.metadata)
    }
    assert not set(KNOBS) & left
    assert {*KNOBS, *left} - set(BOUGHT_BESIDE) == set(Job.model_fields)
    same = {name for name, knob in KNOBS.items() if knob.effect == "same samples"}
    assert {*SAME_SAMPLES, "recompute_share"} == same


def test_changes_keep_the_samples_and_hold_only_what_differs():
    job = Job.of_deepspeed(TINY, sequence=256, **WORST)
    every = list(same_samples(job))
    assert every[0] == {}
    assert len({tuple(sorted(changes.items())) for changes in every}) == len(every)
    for changes in every:
        changed = applied(job, changes)
        assert (changed.micro_batch * changed.accumulation, changed.sequence) == (6, 256)
        assert all(present(changed, name) == value != present(job, name) for name, value in changes.items())
        assert not changes or changes_text(changes)
    touched = {name for changes in every for name in changes}
    assert touched == {*SAME_SAMPLES, "recompute_share", "micro_batch"} - {"sub_group_size"}  # plans choose their own
    assert {needs(changes) for changes in every} == {0, 1, 2}


@pytest.mark.parametrize("name", [name for name in SAME_SAMPLES if name not in ("sub_group_size", "offload")])
def test_every_setting_that_is_offered_changes_the_estimate(name):
    job, machine = Job.of_deepspeed(TINY, sequence=256, data_parallel=2, **WORST), preset("h100-node")
    fields = {"recompute": ("recompute", "recompute_share"), "accumulation": ("micro_batch", "accumulation")}.get(name)
    other = values(name, job)[1]
    changed = estimated(applied(job, dict(zip(fields, other, strict=True)) if fields else {name: other}), machine)
    before = estimated(job, machine)
    assert (changed.forward_s, changed.backward_s, changed.activation_bytes, changed.device_base_bytes) != (
        before.forward_s,
        before.backward_s,
        before.activation_bytes,
        before.device_base_bytes,
    )
