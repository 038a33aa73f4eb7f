"""ZeRO-1 and ZeRO-2: whatever the plan, the bits are stock DeepSpeed's."""

import functools

import pytest
import torch

import runtime
from runtime.checkpoint.skeleton import lay_out
from runtime.replan.switch import switch_plan
from studies.bench.bits import differences, state_of
from tests.runtime.contract.test_bits import MIX, Switching, l2_adam, two_groups, warm_up
from tests.runtime.contract.training import (
    DEVICES,
    EMULATED,
    assert_same,
    attached,
    outcome,
    plan_for,
    same,
    slowed,
    start,
    train,
)
from tests.runtime.test_live import machine

pytestmark = pytest.mark.usefixtures("only_rank")
DEVICE = list(DEVICES)[-1]

CASES = {
    "clipping": {},
    "clips_hard": {"clipping": 0.01},
    "no_clipping": {"clipping": 0.0},
    "accumulation": {"accumulation": 3},
    "fp32": {"precision": "fp32"},
    "fp32_accumulation": {
        "accumulation": 2, "extra": {"data_types": {"grad_accum_dtype": "fp32"}},
    },
    "small_buckets": {"reduce_bucket_size": 5_000},
    "no_overlap": {"overlap_comm": False},
    "l2_adam": {"extra": l2_adam()},
    "learning_rate_schedule": {"extra": warm_up()},
    "parameter_groups": {"parameters": two_groups},
}  # fmt: skip


def stock_state(engine):
    """DeepSpeed links moments to parameters once, after the first group's first step: those of
    the other groups, and those of an engine that has just loaded, are not to be had otherwise.
    """
    engine.optimizer._hp_optimizer_states_linked = False
    engine.optimizer._lazy_init_hp_params_optimizer_state()
    return state_of(engine)


@functools.cache
def stock(case, stage=2):
    engine = start(stage=stage, **CASES[case])
    losses, norms = train(engine)
    state = stock_state(engine)
    engine.destroy()
    return state, torch.stack(losses), norms


@pytest.mark.parametrize("case", list(CASES))
def test_every_configuration(case):
    ours = attached(start(stage=2, **CASES[case]), MIX, DEVICE)
    assert len(ours.optimizer._ebbtide.executor.states) >= 4
    assert_same(outcome(ours), stock(case))


@pytest.mark.parametrize("case", ["clipping", "accumulation"])
def test_without_copies_between_memories(case):
    ours = attached(start(stage=2, **CASES[case]), MIX, next(iter(DEVICES)))
    assert_same(outcome(ours), stock(case))


@pytest.mark.parametrize("case", ["clipping", "accumulation", "fp32_accumulation"])
def test_stage_1(case):
    ours = attached(start(stage=1, **CASES[case]), MIX, DEVICE)
    assert_same(outcome(ours), stock(case, stage=1))


@pytest.mark.parametrize("subgroup", [1_003, 77_777, 10**9])
def test_borders_of_subgroups_do_not_show(subgroup):
    """DeepSpeedCPUAdam treats the last (length mod 16) elements of a tensor in another way."""
    ours = attached(start(stage=2), MIX, DEVICE, subgroup=subgroup)
    assert_same(outcome(ours), stock("clipping"))


def test_fp16_skips_the_step_on_overflow_and_goes_on(monkeypatch):
    from deepspeed.accelerator import get_accelerator

    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: True)
    options = {"stage": 2, "precision": "fp16",
               "extra": {"fp16": {"enabled": True, "initial_scale_power": 32,
                                  "hysteresis": 1}}}  # fmt: skip
    reference = start(**options)
    losses, norms = train(reference, 24)
    skipped = reference.skipped_steps
    expected = state_of(reference), torch.stack(losses), norms
    reference.destroy()
    assert 0 < skipped < 24, "the test needs both kinds of step"
    ours = attached(start(**options), MIX, DEVICE)
    losses, norms = train(ours, 24)
    assert ours.skipped_steps == skipped
    assert_same((state_of(ours), torch.stack(losses), norms), expected)
    ours.destroy()


@pytest.mark.parametrize("clipping", [0.05, 0.0])
def test_unused_parameters_get_what_stock_gives_them(clipping):
    def new():
        return start(model=Switching(), clipping=clipping, stage=2)

    expected = outcome(new(), 9)
    ours = attached(new(), MIX, DEVICE, subgroup=5_000)
    assert_same(outcome(ours, 9), expected)


def test_save_and_resume_in_another_placement(tmp_path):
    expected = outcome(start(stage=2), 12)
    saving = attached(start(stage=2), MIX, DEVICE)
    train(saving, 7)
    saving.save_checkpoint(str(tmp_path))
    train(saving, 1, first=7)  # the checkpoint is of before, whatever is overwritten meanwhile
    saving.destroy()
    resumed = attached(start(stage=2), ["resident", "host"], DEVICE)
    path, _ = resumed.load_checkpoint(str(tmp_path))
    assert path is not None
    ours = outcome(resumed, 5, first=7)
    assert_same(ours, (expected[0], expected[1][7:], expected[2][7:]))


@pytest.mark.parametrize("pattern", [["host"], MIX])
def test_a_checkpoint_streams_state_from_where_it_is(pattern):
    ours = attached(start(stage=2), pattern, DEVICE)
    train(ours, 2)
    layout = lay_out(ours.optimizer.state_dict(), ours.checkpoint_engine._live, stream_device=True)
    subgroups = ours.optimizer._ebbtide.executor.states
    assert {e.source.subgroup for e in layout.extents} >= set(range(len(subgroups)))
    assert layout.copied_bytes < 1_000
    ours.destroy()


def test_deepspeed_loads_what_was_saved_under_a_plan(tmp_path):
    saving = attached(start(stage=2), MIX, DEVICE)
    train(saving, 4)
    saving.save_checkpoint(str(tmp_path))
    expected = state_of(saving)
    saving.destroy()
    loading = start(stage=2)
    loading.load_checkpoint(str(tmp_path))
    assert not differences(stock_state(loading), expected)
    loading.destroy()


def test_another_plan_in_the_middle_changes_no_bit():
    ours = attached(start(stage=2), ["host"], DEVICE)
    losses, norms = train(ours, 3)
    switch_plan(ours, plan_for(ours, MIX))
    more = train(ours, 3, first=3)
    result = state_of(ours), torch.stack(losses + more[0]), norms + more[1]
    ours.destroy()
    assert_same(result, stock("clipping"))


def set_state(engine):
    """Through DeepSpeed's setters, from outside."""
    from deepspeed.utils import (
        safe_set_full_fp32_param,
        safe_set_full_optimizer_state,
    )

    for parameter in list(engine.module.parameters())[:3]:
        value = torch.full(parameter.shape, 0.01)
        safe_set_full_fp32_param(parameter, value)
        safe_set_full_optimizer_state(parameter, value * 2, "exp_avg")


@pytest.mark.parametrize("pattern", [["resident"], MIX])
def test_what_users_write_counts(pattern):
    results = []
    for ours in (False, True):
        engine = start(stage=2)
        if ours:
            attached(engine, pattern, DEVICE)
        train(engine, 2)
        set_state(engine)
        results.append(outcome(engine, 3, first=2))
    assert_same(results[1], results[0])


def test_gradients_are_shown_as_stock_shows_them():
    from deepspeed.utils import safe_get_full_grad

    shown = []
    for ours in (False, True):
        engine = start(stage=2)
        if ours:
            attached(engine, MIX, DEVICE)
        seen = []

        def look(engine, number, seen=seen):
            del number
            seen += [safe_get_full_grad(p).clone() for p in engine.module.parameters()]

        train(engine, 2, each=look)
        shown.append(seen)
        engine.destroy()
    assert len(shown[0]) == len(shown[1]) > 10
    assert all(torch.equal(a, b) for a, b in zip(*shown, strict=True))


def test_a_planted_race_is_caught():
    """The update before its gradient and state have come: the comparison must see it."""
    import dataclasses
    import time

    ours = attached(start(stage=2), ["device"], DEVICE, staging_slots=1, prefetch=1)
    executor = ours.optimizer._ebbtide.executor
    executor.template[:] = [
        dataclasses.replace(t, now=(), before=()) if t.op.kind.value == "update device" else t
        for t in executor.template
    ]
    executor.before_op = lambda op: time.sleep(0.02 * (op.kind.value == "state H2D"))
    assert not same(outcome(ours), stock("clipping"))


def test_automatic_plans(monkeypatch):
    """Watches some steps, plans for what it saw, and goes on with the same bits."""
    monkeypatch.setattr("runtime.replan.auto._free_device_bytes", lambda device: 10**9)
    ours = start(stage=2)
    runtime.attach(ours, "auto", device=slowed(1e9, 1e9, 1e9), machine=machine())
    first = ours.optimizer._ebbtide.plan
    assert set(first.placements) == {"host"}
    assert first.subgroup_count > 4
    losses, norms = train(ours)
    assert not EMULATED or set(ours.optimizer._ebbtide.plan.placements) != {"host"}
    result = state_of(ours), torch.stack(losses), norms
    ours.destroy()
    assert_same(result, stock("clipping"))
