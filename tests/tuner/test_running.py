"""Tests of the change that a run under an automatic plan names, with which its samples would train fastest."""

from functools import cache

import pytest
from ebbtide.simulator.estimates.estimate import estimated
from ebbtide.simulator.estimates.job import Job
from ebbtide.simulator.estimates.knobs import needs
from ebbtide.simulator.estimates.presets import preset
from ebbtide.simulator.limits import Limits
from ebbtide.tuner.advice.running import RunningJob, UnknownRunError, hint, log_line
from ebbtide.tuner.advice.tried import faster
from ebbtide.tuner.placements.planning import quick_plan
from ebbtide.tuner.service.requests import MODELS

SLOWER = 0.7  # of the preset's speeds: the script's kernels, or the card's power
OFFLOADED = {"stage": 3, "offload_optimizer": {"device": "cpu"}}


@cache
def watched(model="Llama 3.2 3B", card="rtx4090", micro_batch=1, accumulation=8, sequence=1024):
    """Return a run as it would be watched on a card that computes more slowly than its preset, and the best changes
    for that card.
    """
    config = {
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": OFFLOADED,
    }
    shape = {"sequence": sequence, "kernels": "eager", "recompute": True}
    have, job = preset(card), Job.of_deepspeed(MODELS[model], config, **shape)
    speeds = ("device_flops_per_s", "attention_flops_per_s", "expert_flops_per_s", "device_memory_bytes_per_s")
    slower = have.with_rates(**{name: SLOWER * have.rate(name) for name in speeds})
    work = estimated(job, slower)
    seconds = quick_plan(work, slower, Limits.of(work, slower)).prediction.iteration_s
    run = RunningJob(
        model=MODELS[model],
        config=config,
        shape=shape,
        elements=sum(block.elements for block in job.architecture.blocks()),
        machine=have,
        computed_s=work.planned.forward_s + work.planned.backward_s,
        expected_s=seconds,
    )
    return run, faster(job, slower, seconds, most=1)


@pytest.mark.parametrize(
    "job",
    [
        {},
        {"model": "Llama 3 8B", "card": "gh200", "accumulation": 16, "sequence": 2048},
        {"model": "Llama 3 8B", "card": "a100-40gb", "micro_batch": 2, "accumulation": 4, "sequence": 2048},
    ],
)
def test_the_hint_of_a_watched_run_is_that_of_its_described_job(job):
    run, known = watched(**job)
    best = hint(run)
    if not known:
        assert best is None
        assert log_line(run) == ""
        return
    assert best.label == known[-1].label
    assert best.factor == pytest.approx(known[-1].factor, rel=0.03)
    assert best.seconds == pytest.approx(run.expected_s / best.factor)
    assert needs(known[-1].changes) < 2
    line = log_line(run)
    assert best.label in line
    assert f"{best.factor:.2f} times as fast" in line
    again = run.model_validate_json(run.model_dump_json())
    assert again == run, "it crosses to another process"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"elements": 10**9}, "the model has 1,000,000,000 parameters, and its config describes"),
        ({"expected_s": 1.0}, "the model's config gives"),
        ({"computed_s": 1e-9}, "no speed of the GPU explains"),
        ({"device_bytes": 2**30}, "does not fit into this machine's memory"),
        ({"model": {"model_type": "unheard of"}}, "model_type must be"),
    ],
)
def test_a_run_that_its_config_does_not_describe_gets_no_hint(changes, why):
    run, _ = watched()
    run = run.model_copy(update=changes)
    with pytest.raises(UnknownRunError, match=why):
        hint(run)
    assert "times as fast" not in log_line(run)
    assert why in log_line(run)


def test_a_change_that_needs_more_memory_than_was_measured_is_not_named():
    run, _ = watched()
    best, least = hint(run), preset("rtx4090").device_memory_bytes
    cramped = hint(run.model_copy(update={"device_bytes": least, "activation_bytes": 20 * 2**30}))
    assert cramped is None or cramped.factor < best.factor
