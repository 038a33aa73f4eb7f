"""Tests of plans under ZeRO-1 and ZeRO-2, where DeepSpeed's flat partitions are cut into the plan's subgroups."""

import pytest
import torch
from ebbtide.runtime import session_of
from ebbtide.runtime.checkpoint.format.skeleton import lay_out

from studies.bench.bits import differences, state_of
from studies.bench.byte_gpt import SIZES, Batches
from tests.runtime.checkpoint.conftest import bytes_of_tensors
from tests.runtime.contract.test_bits import MIX, stock
from tests.runtime.contract.training import DEVICES, all_state, assert_same, attached, outcome, start, train

pytestmark = pytest.mark.usefixtures("only_rank")
DEVICE = list(DEVICES)[-1]


@pytest.mark.parametrize("subgroup", [1_003, 77_777, 10**9])
def test_borders_of_subgroups_do_not_show(subgroup):
    # The borders matter because DeepSpeedCPUAdam computes the elements after a tensor's last whole vector in a
    # different way.
    ours = attached(start(stage=2), MIX, DEVICE, subgroup=subgroup)
    assert_same(outcome(ours), stock("clipping", 2))


@pytest.mark.parametrize("pattern", [["host"], MIX])
def test_a_checkpoint_streams_state_from_where_it_is(pattern):
    ours = attached(start(stage=2), pattern, DEVICE)
    train(ours, 2)
    layout = lay_out(ours.optimizer.state_dict(), ours.checkpoint_engine._live, stream_device=True)
    subgroups = session_of(ours).executor.states
    assert {e.source.subgroup for e in layout.extents} >= set(range(len(subgroups)))
    assert bytes_of_tensors(layout)[1] < 1_000
    ours.destroy()


def test_deepspeed_loads_what_was_saved_under_a_plan(tmp_path):
    saving = attached(start(stage=2), MIX, DEVICE)
    train(saving, 4)
    saving.save_checkpoint(str(tmp_path))
    expected = state_of(saving)
    saving.destroy()
    loading = start(stage=2)
    loading.load_checkpoint(str(tmp_path))
    assert not differences(all_state(loading), expected)
    loading.destroy()


def set_state(engine):
    """Write the fp32 masters and first moments of three parameters with DeepSpeed's public setters."""
    from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

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


def test_state_is_shown_while_it_is_away():
    from deepspeed.utils import safe_get_full_fp32_param

    ours = attached(start(stage=2), MIX, DEVICE)
    ours.offload_states()
    train(ours, 2)
    for parameter in ours.module.parameters():
        shown = safe_get_full_fp32_param(parameter)
        assert torch.equal(shown.to(parameter.dtype), parameter)
    ours.destroy()


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


def test_the_gradient_that_stock_shows_under_round_robin_is_shown():
    # With ``round_robin_gradients`` and several ranks, DeepSpeed may list gradients in another order than parameters.
    from deepspeed.utils import safe_get_full_grad

    shown = []
    for ours in (False, True):
        engine = start(stage=2)
        if ours:
            attached(engine, MIX, DEVICE)
        first, second = engine.module.second.widen, engine.module.head.weight
        places = first._index_in_param_group, second._index_in_param_group
        second._index_in_param_group, first._index_in_param_group = places
        engine.backward(engine(*Batches(2, SIZES["tiny"].sequence).at(0)))
        shown.append(safe_get_full_grad(first).clone())
        engine.step()
        engine.destroy()
    assert torch.equal(*shown)


def test_the_device_is_asked_once_whether_a_shared_gradient_overflowed():
    # Overflows of shared gradients are read from the GPU once per step, so that backward goes on.
    engine = attached(start(stage=2), MIX, DEVICE, None)
    optimizer = engine.optimizer
    for value in (1.0, float("inf"), 2.0):
        optimizer.update_offload_overflow_tracker(torch.tensor([value]))
    assert not optimizer.local_overflow
    assert optimizer.has_overflow()
    optimizer.reset_cpu_buffers()
    assert not optimizer.has_overflow()
    engine.destroy()
