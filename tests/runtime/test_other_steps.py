"""Tests of the runtime's warning about a plan that was made for another batch size, precision or
recomputation. The warning appears before the first step.
"""

import logging

import ebbtide.runtime
import pytest
import torch
from ebbtide.runtime.zero.checks.other_steps import differences, recomputes
from ebbtide.simulator.plan import Prediction
from ebbtide.simulator.workload import TrainedAs

from tests.runtime.contract.training import DEVICES, device_of, plan_for, start

PLANNED = TrainedAs(precision="bf16", micro_batch=1, accumulation=4, sequence=1024, recompute=True)


class Block(torch.nn.Module):
    gradient_checkpointing = False


def test_the_same_steps_say_nothing():
    assert differences(PLANNED, PLANNED) == []
    assert differences(PLANNED, PLANNED.model_copy(update={"recompute": None, "sequence": None})) == []


@pytest.mark.parametrize(
    ("change", "advice"),
    [
        ({"precision": "fp32"}, "bf16=True"),
        ({"micro_batch": 8}, "per_device_train_batch_size=1"),
        ({"accumulation": 1}, "gradient_accumulation_steps=4"),
        ({"recompute": False}, "gradient_checkpointing=True"),
    ],
)
def test_each_difference_names_the_argument_to_change(change, advice):
    (line,) = differences(PLANNED, PLANNED.model_copy(update=change))
    assert advice in line


def test_recomputation_is_read_from_a_transformers_model():
    assert recomputes(torch.nn.Linear(1, 1)) is None
    block = Block()
    assert recomputes(torch.nn.Sequential(block)) is False
    block.gradient_checkpointing = True
    assert recomputes(torch.nn.Sequential(block)) is True


@pytest.mark.usefixtures("only_rank")
def test_an_engine_with_another_micro_batch_warns_before_its_first_step(caplog):
    engine = start()
    here = int(engine.train_micro_batch_size_per_gpu())
    steps = TrainedAs(precision="bf16", micro_batch=here + 1, accumulation=int(engine.gradient_accumulation_steps()))
    plan = plan_for(engine, ["host"]).model_copy(update={"trained_as": steps})
    with caplog.at_level(logging.WARNING, logger="ebbtide"):
        ebbtide.runtime.attach(engine, plan, device=device_of(next(iter(DEVICES))))
    engine.destroy()
    (said,) = [r.getMessage() for r in caplog.records if r.name == "ebbtide"]
    assert f"micro-batch size: {here + 1} in the plan, {here} in training" in said


@pytest.mark.usefixtures("only_rank")
@pytest.mark.parametrize(
    ("zero", "told"), [({}, True), ({"reduce_bucket_size": 500_000_000}, False), ({"reduce_bucket_size": 5}, False)]
)
def test_an_engine_with_deepspeeds_bucket_warns_that_gradients_leave_late(zero, told, caplog):
    engine = start(**zero)
    times = ("iteration_s", "iteration_low_s", "iteration_high_s", "forward_s", "backward_s", "step_s", "update_s")
    predicted = Prediction(**dict.fromkeys(times, 1.0))
    plan = plan_for(engine, ["host"]).model_copy(update={"prediction": predicted})
    with caplog.at_level(logging.WARNING, logger="ebbtide"):
        ebbtide.runtime.attach(engine, plan, device=device_of(next(iter(DEVICES))))
    engine.destroy()
    assert any("Set reduce_bucket_size to 50000000" in r.getMessage() for r in caplog.records) == told
