"""Tests that a schedule with a repeated micro-batch equals the schedule in which each micro-batch is built."""

import random
from dataclasses import replace

import numpy as np
import pytest
from ebbtide.simulator import build_strategy
from ebbtide.simulator.analysis import best_setting
from ebbtide.simulator.analysis.many_plans import peaks_by_kind
from ebbtide.simulator.engines.compiled import compile_schedule, simulate_fast
from ebbtide.simulator.schedules.strategies import settings, strategies_of

from tests.machines import random_workload
from tests.simulator.test_fast import enlarged, random_machine, with_storage


def random_job(rng):
    """Return a random workload with 5 to 10 micro-batches and any gradient bucket, and a random machine."""
    work, on = random_workload(rng, rng.choice([1, 2, 3, 3])), with_storage(random_machine(rng), rng)
    below = work.zero_stage < 3
    layers = [
        layer.model_copy(
            update={
                "params_of_others": rng.choice([0, rng.randint(1, 40)]) if below else 0,
                "persistent_params": 0 if below else rng.choice([0, rng.randint(0, layer.params)]),
                "regathered_params": None if below else rng.choice([None, 0, layer.params]),
                "unhidden_s": rng.choice([0.0, rng.uniform(0, 1)]),
            }
        )
        for layer in work.layers
    ]
    changes = {
        "layers": tuple(layers),
        "gradient_accumulation_steps": rng.randint(5, 10),
        "reduce_bucket_params": rng.choice([0, rng.randint(1, 100)]),
        "reduced_beside": rng.choice([0.0, rng.uniform(0, 1)]),
        "stock_backward_extra_s": rng.choice([None, None, None, rng.uniform(0, 3)]),
        "stock_threads": rng.choice([None, 1, 3]),
        "wire_dtype": rng.choice(["bf16", "fp16"]),
        "grad_bytes_per_param": rng.choice([2, 4]),
        "clip": rng.random() < 0.5,
        "pipeline_idle_s": rng.choice([0.0, rng.uniform(0, 3)]),
    }
    return enlarged(work.model_copy(update=changes), on, rng)


@pytest.mark.parametrize("seed", range(60))
def test_a_repeated_micro_batch_gives_the_schedule_of_all(seed):
    rng = random.Random(seed)
    work, on = random_job(rng)
    for name in strategies_of(work.zero_stage):
        setting = rng.choice(list(settings(name, len(work.subgroups))))
        schedule = build_strategy(name, work, **setting)
        built, made = compile_schedule(schedule), best_setting.compiled(name, work, setting)
        for field in ("ops", "after_first", "after"):
            assert np.array_equal(getattr(made, field), getattr(built, field)), (name, setting)
        assert made.rate_keys == built.rate_keys
        assert replace(made.schedule, ops=()) == replace(schedule, ops=())
        got, expected = simulate_fast(made, on), simulate_fast(built, on)
        assert got == expected
        assert peaks_by_kind(schedule.held, made.ops, got) == peaks_by_kind(schedule.held, built.ops, expected)


def test_only_a_few_micro_batches_are_built(monkeypatch):
    asked = []

    def counting(name, work, **options):
        asked.append(work.gradient_accumulation_steps)
        return build_strategy(name, work, **options)

    monkeypatch.setattr(best_setting, "build_strategy", counting)
    work = random_workload(random.Random(0)).model_copy(update={"gradient_accumulation_steps": 100})
    for name in strategies_of(3):
        if name != "ebbtide":
            best_setting.compiled(name, work, {})
    assert set(asked) == {best_setting.BUILT}


@pytest.mark.parametrize(("micro", "setting"), [(10**6, {}), (50, {"iterations": 10**6})])
def test_too_many_micro_batches_are_refused_as_if_all_were_built(micro, setting):
    work = random_workload(random.Random(0)).model_copy(update={"gradient_accumulation_steps": micro})
    with pytest.raises(ValueError, match="gradient_accumulation_steps must be at most") as expected:
        build_strategy("zero3_offload", work, **setting)
    with pytest.raises(ValueError, match="gradient_accumulation_steps must be at most") as got:
        best_setting.compiled("zero3_offload", work, setting)
    assert str(got.value) == str(expected.value)
