"""Tests of plans that cut DeepSpeed's subgroups into parts and update some parts early (before the
gradient norm is known).

DeepSpeed's fp32 tensors stay whole. The results equal stock DeepSpeed's, bit for bit. What plans with whole subgroups
have too is tested in `test_early_updates.py`.
"""

import functools
import time

import pytest
import torch
from ebbtide.runtime import session_of
from ebbtide.simulator.schedules.footprint import footprint
from ebbtide.simulator.workload import Layer, Workload

from studies.bench.bits import differences
from tests.runtime.contract.test_early_updates import (
    ALL,
    IN_PLACE,
    PIECES,
    PLANS,
    another_master,
    engine_for,
    nothing,
    pausing,
    stock,
)
from tests.runtime.contract.test_footprint import allocated_device_bytes
from tests.runtime.contract.test_pieces import look
from tests.runtime.contract.training import DEVICES, assert_same, outcome, plan_for, steps, train

pytestmark = [
    pytest.mark.usefixtures("only_rank"),
    pytest.mark.skipif("emulated" not in DEVICES, reason="counts early updates on emulated streams"),
]
MIXED = "pieces mixed"


def under(*names):
    """Run a test under the plans of these names in `PLANS`, which cut DeepSpeed's subgroups."""
    return pytest.mark.parametrize("name", names)


def away(engine):
    """Return the number of the plan's subgroups whose current optimizer state is in a spare buffer of early
    updates, so that the state in DeepSpeed's tensors is outdated.
    """
    executor = session_of(engine).executor
    return len(executor.early_updates.away(executor.states))


@pytest.mark.parametrize("locations", [["host", "device"], ["device", "host", "host"]])
def test_parameters_on_the_host(locations):
    engine, counts = pausing(MIXED, {"case": "offloaded"}, locations=locations)
    assert_same(outcome(engine), stock(outcome, MIXED, case="offloaded"))
    assert all(begun == right > 0 for begun, right in counts)


@functools.cache
def every_second(change):
    """Return a function that calls ``change``, which changes the optimizer state, in every second step.

    In training under a plan, the returned function first checks that early updates have left some state outside of
    DeepSpeed's tensors. Otherwise the test would not show that the change reaches this state.
    """

    def changes(engine, number):
        if number % 2:
            assert not hasattr(engine.optimizer, "_ebbtide") or away(engine), (
                "some state must be outside DeepSpeed's tensors"
            )
            change(engine, number)

    return changes


def publish_alone(engine, number):
    """Copy all optimizer state of an engine under a plan to DeepSpeed's tensors, as the runtime does for a script
    that reads this state. The runtime is not told that the script may also write to these tensors.
    """
    if hasattr(engine.optimizer, "_ebbtide"):
        engine.optimizer._flat.publish(session_of(engine))
        assert not away(engine)


@pytest.mark.parametrize(
    ("change", "name"),
    [*((change, MIXED) for change in IN_PLACE), (publish_alone, "pieces host"), (publish_alone, "pieces staged")],
)
def test_what_changes_under_an_early_update_that_writes_where_deepspeed_looks(change, name, monkeypatch):
    # A script may change optimizer state in DeepSpeed's tensors while an early update writes to the same tensors. They
    # write to DeepSpeed's tensors in every second step, and to spare buffers in the other steps. This test slows them
    # down, so that the script's change comes before they end.
    engine, _ = pausing(name)
    rule, device = type(engine.optimizer._rule), type(session_of(engine).device)
    for owner in (rule, device):

        def slowly(*args, update=owner.update):
            time.sleep(0.01)
            update(*args)

        monkeypatch.setattr(owner, "update", slowly)
    session_of(engine).executor.gradients.before_op = None
    assert_same(steps(engine, every_second(change), 6), stock(steps, MIXED, every_second(change), 6))


@pytest.mark.parametrize("change", IN_PLACE)
def test_what_changes_while_state_waits_in_a_slot_for_the_norm(change):
    # The script makes the change while the update waits for the gradient norm. Before the change, the latest state is
    # in a spare buffer in host memory, because the previous step's update started before its gradient norm was known.
    # When the script accesses DeepSpeed's tensor, the runtime first copies the state from the spare buffer to this
    # tensor.
    engine, _ = pausing("pieces staged")
    backwards = []
    engine.optimizer.early_updates_allowed = lambda: len(backwards) % 2 == 0

    def changed(engine, number):
        every_second(change)(engine, number)
        backwards.append(number)

    assert_same(steps(engine, changed, 6), stock(steps, MIXED, every_second(change), 6))


@pytest.mark.parametrize("change", [another_master, *IN_PLACE])
def test_what_changes_while_state_is_away_from_deepspeeds_tensors(change):
    engine, _ = pausing(MIXED)
    assert_same(changed_behind_steps(engine, change), stock(changed_behind_steps, MIXED, change))


def changed_behind_steps(engine, change):
    ours = hasattr(engine.optimizer, "_ebbtide")

    def behind(engine, number):
        if number % 3 == 2:
            assert not ours or away(engine), "some state must be outside DeepSpeed's tensors"
            change(engine, number)

    return steps(engine, nothing, 8, behind)


def test_who_looks_between_steps_sees_stocks_state_and_stops_no_early_update():
    # For the read, the runtime moves the state to DeepSpeed's tensors. Early updates, which start before the gradient
    # norm is known, must still start in the next step. None of them may be rolled back because of the read.
    (engine, counts), stocks = pausing(MIXED), engine_for(MIXED)
    assert_same(outcome(engine, 5, each=look), outcome(stocks, 5, each=look))
    assert all(not differences(a, b) for a, b in zip(engine.seen, stocks.seen, strict=True))
    assert all(begun == right == counts[0][0] > 0 for begun, right in counts)


def test_a_checkpoint_is_loaded_while_state_is_away(tmp_path):
    saving = engine_for(MIXED)
    train(saving, 2)
    saving.save_checkpoint(str(tmp_path))
    saving.destroy()
    engine, _ = pausing(MIXED, locations=["device", "host"])
    train(engine, 3, first=7)
    assert away(engine)
    engine.load_checkpoint(str(tmp_path))
    assert not any(w.numel() for w in engine.optimizer.__dict__["fp16_partitioned_groups_flat"])
    state, losses, norms = stock(outcome, MIXED)
    assert_same(outcome(engine, 2, first=2), (state, losses[2:], norms[2:]))


@under(MIXED, "pieces staged")
def test_another_plan_while_state_is_away(name):
    # Early updates, which start before the gradient norm is known, write to the spare buffers in one step and to
    # DeepSpeed's tensors in the next.
    engine, _ = pausing(name)
    session, released, moved = session_of(engine), [], []
    flats = {t.data_ptr() for flat in engine.optimizer._flat._flats for t in flat}
    session.device.host_release = released.append

    def switch(engine, number):
        moved.append(away(engine))
        fields = {"speculate": (0, 99)[number % 2], "speculate_visits": number}
        session.switch(plan_for(engine, PLANS[name], pieces=True, **{**ALL, **fields}))

    assert_same(steps(engine, nothing, 6, switch), stock(steps, MIXED, nothing, 6))
    assert any(moved)
    assert released
    assert not flats.intersection(tensor.data_ptr() for tensor in released)


@under("pieces host", MIXED)
def test_what_is_left_behind_is_whole(name):
    for count in (1, 2):
        engine, stocks = pausing(name)[0], engine_for(name)
        for one in (engine, stocks):
            train(one, count)
        flats = [*engine.optimizer.__dict__["fp32_partitioned_groups_flat"]]
        released = []  # the tensors themselves, because the address of a freed tensor may be reused
        session_of(engine).device.host_release = released.append
        engine.destroy()
        assert released
        assert not {flat.data.data_ptr() for flat in flats}.intersection(one.data_ptr() for one in released)
        expected = stocks.optimizer.fp32_partitioned_groups_flat
        assert all(torch.equal(a.data.cpu(), b.data) for a, b in zip(flats, expected, strict=True))
        stocks.destroy()


@under(*PIECES)
def test_their_memory_is_predicted_to_the_byte(name):
    engine, _ = pausing(name)
    own = session_of(engine)
    sizes = own.engine.sizes()
    layers = tuple(Layer(params=n, forward_s=1.0, backward_s=1.0) for n in sizes)
    work = Workload(name="w", layers=layers, subgroups=sizes, state_stays=own.engine.shares_state)
    told = footprint(work, own.plan)
    for _ in range(3):
        train(engine, 1)
        assert told["host"] == session_of(engine).host_bytes()
        sent = sum(n for n, p in zip(sizes, own.plan.placements, strict=True) if p == "host")
        assert told["device"] == allocated_device_bytes(own.executor) + 2 * sent
    engine.destroy()
