"""Tests of on-device gradient accumulation: the gradient sums stay on the GPU until the last micro-batch,
training has stock DeepSpeed's results, and fewer gradients are copied to the host.
"""

import functools
import logging
from collections import Counter

import ebbtide.runtime
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_grad, safe_set_full_grad
from ebbtide.runtime import session_of
from ebbtide.simulator import build_schedule
from ebbtide.simulator.optimizer import ADAM
from ebbtide.simulator.schedule import OpKind
from ebbtide.simulator.schedules.footprint import footprint, tally
from ebbtide.simulator.update.holding import GRADIENTS_UNDER_WAY_BYTES, Holding
from ebbtide.simulator.update.way import Way
from ebbtide.simulator.workload import Layer, Workload

from studies.bench.byte_gpt import SIZES, Batches
from tests.runtime.contract.test_windows import Experts, follow
from tests.runtime.contract.training import (
    DEVICES,
    SUBGROUP,
    all_state,
    assert_same,
    attached,
    outcome,
    plan_for,
    start,
    steps,
    train,
)

pytestmark = pytest.mark.usefixtures("only_rank")
DEVICE = list(DEVICES)[-1]
MIX = ["host", "device", "stored", "resident", "host"]
FP32_SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}


@functools.cache
def stock(steps, **options):
    return outcome(start(**options), steps * options["accumulation"])


def crossings(engine):
    """Record the gradient copies of an engine between host and device. Return a list that gets (op kind,
    subgroup) for each gradient whose copy is submitted.
    """
    seen, ops = [], session_of(engine).executor.gradients
    submit = ops._submit

    def noted(how, subgroup, offsets, *others):
        seen.extend([(how.kind, subgroup)] * len(offsets))
        return submit(how, subgroup, offsets, *others)

    ops._submit = noted
    return seen


def chosen(engine):
    return {i for i, s in enumerate(session_of(engine).plan.summed_on_device) if s}


@pytest.mark.parametrize(("stage", "accumulation", "sums"), [(3, 2, 1), (3, 3, 99), (2, 3, 99)])
def test_no_sum_crosses_before_the_last_micro_batch(stage, accumulation, sums):
    options = {"stage": stage, "accumulation": accumulation, "clipping": 0.05}
    engine = attached(start(**options), MIX, DEVICE, device_sums=sums)
    seen, stay = crossings(engine), chosen(engine)
    pieces = session_of(engine).gradient_buffers.by_subgroup
    assert len(stay) == 1 if sums == 1 else len(stay) > 1
    assert_same(outcome(engine, 2 * accumulation), stock(2, **options))
    assert not [s for kind, s in seen if kind is OpKind.GRADIENT_H2D and s in stay]
    location = [s for kind, s in seen if kind is OpKind.GRADIENT_D2H and s in stay]
    assert len(location) == 2 * sum(len(pieces[s]) for s in stay)


@pytest.mark.parametrize(("stage", "extra"), [(1, {}), (2, {}), (2, FP32_SUMS)])
@pytest.mark.parametrize("sums", [0, 1])
def test_what_crosses_is_what_the_schedule_says(stage, extra, sums):
    # The test includes the two cases in which DeepSpeed itself accumulates gradients on the GPU. They are ZeRO-1, and
    # gradient sums in a wider dtype than the reduced gradients.
    engine = attached(start(stage=stage, accumulation=3, extra=extra), ["host"], DEVICE, seed=None, device_sums=sums)
    own, seen = session_of(engine), crossings(engine)
    train(engine, 3)
    sizes = engine.optimizer.sizes()
    layers = tuple(Layer(params=n, forward_s=1.0, backward_s=1.0) for n in sizes)
    work = Workload(
        name="w",
        layers=layers,
        subgroups=sizes,
        zero_stage=stage,
        gradient_accumulation_steps=3,
        grad_bytes_per_param=4 if extra else 2,
    )
    plan = own.plan.model_copy(update={"overlap_forward": False})
    for kind in (OpKind.GRADIENT_D2H, OpKind.GRADIENT_H2D):
        told = Counter(op.subgroup for op in build_schedule(work, plan, 1).of_kind(kind))
        parts = {s: n * len(own.gradient_buffers.by_subgroup[s]) for s, n in told.items()}
        assert Counter(s for k, s in seen if k is kind) == parts
    engine.destroy()


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_precisions(precision, monkeypatch):
    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: True)
    fp16 = {"fp16": {"enabled": True, "initial_scale_power": 20, "hysteresis": 1}}

    def new():
        extra = fp16 if precision == "fp16" else FP32_SUMS
        dtype = "fp16" if precision == "fp16" else "bf16"
        return start(precision=dtype, accumulation=2, extra=extra)

    steps = 14 if precision == "fp16" else 6
    ours = outcome(attached(new(), MIX, DEVICE, device_sums=99), steps)
    assert_same(ours, outcome(new(), steps))
    if precision == "fp16":
        assert ours[2][1] != ours[2][-1], "some steps must overflow, and others must not"


def micro_steps(engine, change, count=9):
    """Train some micro-batches and call ``change`` after each backward."""
    return steps(engine, change, count, state=all_state)


@pytest.mark.parametrize("stage", [3, 2])
def test_gradients_are_read_and_written_between_micro_batches(stage):
    shown = {}

    def change(engine, number):
        for position, param in enumerate(engine.module.parameters()):
            gradient = safe_get_full_grad(param)
            if gradient is not None:
                shown.setdefault(id(engine), []).append(gradient.clone())
                if position % 3 == number % 3:
                    safe_set_full_grad(param, gradient * 0.5)

    def new():
        return start(stage=stage, accumulation=3, clipping=0.05)

    assert_same(micro_steps(attached(new(), MIX, DEVICE, device_sums=2), change), micro_steps(new(), change))
    ours, theirs = shown.values()
    assert len(ours) == len(theirs) > 0
    assert all(torch.equal(mine, its) for mine, its in zip(ours, theirs, strict=True))


ROUTES = "012 01 02 1 012 0 1 12 2 01 0 2"
WAYS = [["host"], ["device", "host"], ["resident"], ["host", "stored", "device"]]


@pytest.mark.parametrize("stage", [3, 2])
@pytest.mark.parametrize("accumulation", [2, 3])
def test_plans_change_at_any_micro_batch(stage, accumulation):
    def new():
        return start(model=Experts(ROUTES), accumulation=accumulation, subgroup_size=9000, stage=stage, clipping=4.0)

    engine = attached(new(), MIX, DEVICE, subgroup=5_000, device_sums=99)
    session, apart = session_of(engine), []

    def switch(number):
        if number in (5, 6):  # the state leaves the GPU for a micro-batch
            (engine.offload_states if number == 5 else engine.reload_states)()
            return
        fields = {"device_sums": [0, 99, 3][number % 3]}
        if stage == 3:
            locations = [["device"], ["host", "device"]][number % 2]
            early = [99, 0, 2][number // 2 % 3]
            fields |= {"speculate": early, "speculate_visits": early, "locations": locations, "prefetch": number % 3}
        session.switch(plan_for(engine, WAYS[number % len(WAYS)], 5_000, **fields))
        pieces = session.gradient_buffers.slices.values()
        apart.extend(piece for piece in pieces if piece.begun and piece.apart is not None)

    step = engine.step
    engine.step = lambda: (step(), switch(engine.micro_steps))
    actions = "bs" * len(ROUTES.split())
    assert_same(follow(engine, actions), follow(new(), actions))
    assert apart, "some sum must be unfinished at a change of the plan"


def windows(engine, lengths, behind=lambda number: None):
    """Train one optimizer step for each number in ``lengths``, with this number of micro-batches. Return the training
    state and the losses.

    DeepSpeed's `set_gradient_accumulation_boundary` marks the last micro-batch of each step.
    """
    batches, losses = Batches(2, SIZES["tiny"].sequence), []
    for window, length in enumerate(lengths):
        for number in range(length):
            engine.set_gradient_accumulation_boundary(number == length - 1)
            loss = engine(*batches.at(len(losses), engine.device))
            engine.backward(loss)
            losses.append(loss.detach())
            engine.step()
        behind(window)
    state = all_state(engine)
    engine.destroy()
    return state, torch.stack(losses), None


@pytest.mark.parametrize("switches", [(), (0, 1, 2), (1,)])
def test_a_lone_gradient_leaves_the_sum_alone(switches):
    # In stock DeepSpeed, a step with one micro-batch does not write to the buffer of gradient sums, so older sums
    # remain in the buffer. If the first micro-batch of a later step does not use a parameter, that step adds to the
    # parameter's old sum. A plan must do the same, also after a change of the plan.
    def new():
        model = Experts("012 01 012 01 12 012 012")
        return start(model=model, accumulation=2, subgroup_size=9000, stage=2)

    engine = attached(new(), ["host"], DEVICE, subgroup=5_000, device_sums=99)
    session = session_of(engine)

    def switch(number):
        if number in switches:
            session.switch(session.plan)

    lengths = (2, 1, 2, 2)
    assert_same(windows(engine, lengths, switch), windows(new(), lengths))


def held_bytes(engine):
    states = session_of(engine).executor.states
    return sum(state.sum.nbytes for state in states if state.sum is not None)


@pytest.mark.parametrize("stage", [3, 2])
def test_states_that_go_away_take_the_sums_along(stage):
    def new():
        return start(stage=stage, accumulation=3)

    engine = attached(new(), MIX, DEVICE, device_sums=99)
    whole = held_bytes(engine)

    def change(engine, number):
        if number == 4 and hasattr(engine.optimizer, "_ebbtide"):
            engine.optimizer.reload_states()
            assert held_bytes(engine) == whole > 0
        if number == 2 and hasattr(engine.optimizer, "_ebbtide"):
            engine.optimizer.offload_states()
            assert held_bytes(engine) == 0

    step = engine.step
    engine.step = lambda: (step(), change(engine, engine.micro_steps))
    assert_same(micro_steps(engine, lambda *_: None, 9), micro_steps(new(), lambda *_: None, 9))


@pytest.mark.parametrize("stage", [3, 2])
@pytest.mark.parametrize("sums", [0, 2, 99])
def test_what_sums_take_is_told_to_the_byte(stage, sums):
    engine = attached(start(stage=stage, accumulation=2), MIX, DEVICE, seed=None, device_sums=sums)
    own = session_of(engine)
    sizes = engine.optimizer.sizes()
    held = Holding.of(ADAM, 2, 2, stage=stage, micro_batches=2)
    plan, amounts = own.plan, tally(zip(sizes, Way.each(own.plan.placements), strict=True))
    stay = sum(sizes[s] for s in chosen(engine))
    before, told = (held.bytes(amounts, plan.staging_slots, plan.host_slots, summed=n) for n in (0, stay))
    # They are copied from their own memory, so the limit for gradients under way concerns the others only.
    assert sum(sizes) * 2 < GRADIENTS_UNDER_WAY_BYTES
    assert told["device"] == before["device"]
    assert held_bytes(engine) == 2 * stay
    train(engine, 4)
    assert told["host"] == own.host_bytes()
    layers = tuple(Layer(params=n, forward_s=1.0, backward_s=1.0) for n in sizes)
    work = Workload(
        name="w",
        layers=layers,
        subgroups=sizes,
        subgroup_size=SUBGROUP,
        zero_stage=stage,
        gradient_accumulation_steps=2,
    )
    assert footprint(work, plan)["host"] == told["host"]
    engine.destroy()


def test_a_device_that_is_full_keeps_as_many_as_it_can_and_says_so_once(caplog):
    class Full(DEVICES[DEVICE]):
        left = 2

        def device_empty(self, elements, dtype):
            if dtype is torch.bfloat16:
                self.left -= 1
                if self.left < 0:
                    raise torch.OutOfMemoryError
            return super().device_empty(elements, dtype)

    options = {"stage": 3, "accumulation": 2, "clipping": 0.05}
    engine, device = start(**options), Full()
    with caplog.at_level(logging.WARNING, "ebbtide"):
        plan = plan_for(engine, ["host", "stored"], device_sums=99)
        device.left = 2
        ebbtide.runtime.attach(engine, plan, device=device)
    said = [r.getMessage() for r in caplog.records if "plan.ways: sum_on_device" in r.getMessage()]
    assert len(said) == 1
    assert "memory for only 0 of" not in said[0]
    assert sum(session_of(engine).plan.summed_on_device) == len(chosen(engine)) < plan.subgroup_count
    assert_same(outcome(engine, 4), stock(2, **options))


@pytest.mark.parametrize(
    ("device", "options"),
    [
        ("unified", {"accumulation": 2}),
        (DEVICE, {}),
        (DEVICE, {"accumulation": 2, "stage": 1}),
        (DEVICE, {"accumulation": 2, "stage": 2, "extra": FP32_SUMS}),
    ],
)
def test_where_no_sum_would_leave_the_device_none_is_kept(device, options):
    if device not in DEVICES:
        pytest.skip("this device's memory is not the host's")
    engine = attached(start(**options), ["host"], device, device_sums=99)
    assert not any(session_of(engine).plan.summed_on_device)
    assert held_bytes(engine) == 0
    engine.destroy()
