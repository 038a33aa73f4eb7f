"""Tests of plans that cut DeepSpeed's subgroups into parts and update some parts early (before the
gradient norm is known).

DeepSpeed's fp32 tensors stay whole. The results equal stock DeepSpeed's, bit for bit.
"""

import functools
import time

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from ebbtide.simulator.layer import Layer
from ebbtide.simulator.update.footprint import footprint
from ebbtide.simulator.workload import Workload

from studies.bench.bits import differences, state_of
from tests.runtime.contract.test_early_updates import (
    ALL,
    OVERFLOWS,
    SCALED_STEPS,
    again,
    another_gradient,
    another_master,
    another_master_in_place,
    another_moment_in_place,
    another_rate,
    assert_overflows_are_redone,
    never_pause,
    nothing,
    pausing,
    with_a_skipped_step,
)
from tests.runtime.contract.test_footprint import allocated_device_bytes
from tests.runtime.contract.test_pieces import CUT, LARGE, dropping, look
from tests.runtime.contract.training import DEVICES, assert_same, outcome, plan_for, start, steps, train

pytestmark = [
    pytest.mark.usefixtures("only_rank"),
    pytest.mark.skipif("emulated" not in DEVICES, reason="counts early updates on emulated streams"),
]
PATTERNS = {"host": ["host"], "staged": ["device"], "mixed": ["host", "device", "resident", "device"]}


@pytest.fixture
def pattern(request):
    return PATTERNS[getattr(request, "param", "mixed")]


def under(*names):
    """Run a test under the patterns of these names, and not under the mixed one alone."""
    return pytest.mark.parametrize("pattern", names, indirect=True)


def whole(**options):
    return start(**{"subgroup_size": LARGE, "clipping": 0.0, **options})


def updating_early(engine, pattern, **fields):
    """Attach a plan that cuts DeepSpeed's subgroups and updates some parts early, before the gradient norm is known.

    Return the engine and a list, to which each step appends the number of early updates that were begun,
    and the number that were kept.
    """
    engine, counts = pausing(engine, pattern, pieces=True, **fields)
    assert len(engine.optimizer.sizes()) > len(engine.optimizer.fp16_groups)
    assert early(engine), "the plan must update pieces early"
    return engine, counts


def early(engine):
    return sum(engine.optimizer._ebbtide.plan.updated_early)


def away(engine):
    """Return the number of the plan's subgroups whose current optimizer state is in a spare buffer of early
    updates, so that the state in DeepSpeed's tensors is outdated.
    """
    executor = engine.optimizer._ebbtide.executor
    return len(executor.early_updates.away(executor.states))


OFFLOADED = {"offload_param": {"device": "cpu"}, "accumulation": 2}
CASES = {**CUT, "dropout": {"model": dropping}, "offloaded": OFFLOADED}
RIGHT = ["subgroups", "one", "groups", "sums", "wide sums", "fp32", "l2", "buckets", "frozen", "dropout"]


def made(options):
    return whole(**options | ({"model": options["model"]()} if "model" in options else {}))


@functools.cache
def stock(case):
    return outcome(made({"clipping": 0.0, **CASES[case]}))


@functools.cache
def stock_with(steps=None, **options):
    return outcome(whole(**options), steps)


@pytest.mark.parametrize(("case", "name"), [*((case, "mixed") for case in RIGHT), ("sums", "host"), ("sums", "staged")])
def test_right_early_updates(case, name):
    options = {"clipping": 0.0, **CASES[case]}
    engine, counts = updating_early(made(options), PATTERNS[name], device_sums=case == "sums")
    assert_same(outcome(engine), stock(case))
    count = counts[0][0]
    assert count > 0
    assert counts == [(count, count)] * len(counts)


@pytest.mark.parametrize("locations", [["host", "device"], ["device", "host", "host"]])
def test_parameters_on_the_host(locations, pattern):
    engine, counts = updating_early(whole(**OFFLOADED), pattern, locations=locations)
    assert_same(outcome(engine), stock("offloaded"))
    assert all(begun == right > 0 for begun, right in counts)


@pytest.mark.parametrize(
    ("proved", "pattern"), [(True, "mixed"), *((False, name) for name in PATTERNS)], indirect=["pattern"]
)
def test_wrong_early_updates_are_redone(proved, pattern):
    # Each part has several gradients, because the norm of a single gradient would be known only after it.
    engine, counts = updating_early(whole(clipping=0.001), pattern, subgroup=17_000)
    if not proved:
        engine.optimizer.early_updates_allowed = lambda: True
    never_pause(engine)
    assert_same(outcome(engine), stock_with(clipping=0.001))
    assert counts == [(0 if proved else early_of(counts), 0)] * 4


def early_of(counts):
    return max(1, counts[0][0])


@functools.cache
def bound():
    norms = sorted(stock_with()[2])
    return (norms[1] + norms[2]) / 2


def stock_where_some_steps_clip(accumulation):
    return stock_with(clipping=bound(), accumulation=accumulation)


ACTING = [
    ("host", {}, 2),
    ("mixed", {"order_seed": 3}, 1),
    ("mixed", {}, 2),
    ("mixed", {"speculate_visits": 2}, 1),
    ("staged", {"staging_slots": 1}, 1),
    ("staged", {"staging_slots": 9, "prefetch": 9}, 1),
]


@pytest.mark.parametrize(("pattern", "fields", "accumulation"), ACTING, indirect=["pattern"])
def test_some_steps_clip(pattern, fields, accumulation):
    engine, counts = updating_early(whole(clipping=bound(), accumulation=accumulation), pattern, **fields)
    never_pause(engine)
    assert_same(outcome(engine), stock_where_some_steps_clip(accumulation))
    assert accumulation > 1 or {right > 0 for begun, right in counts if begun} == {True, False}


def overflowing():
    return whole(precision="fp16", extra={"fp16": OVERFLOWS})


@functools.cache
def stock_where_some_steps_overflow():
    return outcome(overflowing(), SCALED_STEPS)


def test_overflows(monkeypatch, pattern):
    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: True)
    assert_overflows_are_redone(*updating_early(overflowing(), pattern), stock_where_some_steps_overflow())


@functools.cache
def stock_with_a_skipped_step():
    return with_a_skipped_step(whole(clipping=50.0))


def test_a_skipped_step(pattern):
    engine, counts = updating_early(whole(clipping=50.0), pattern, staging_slots=1, prefetch=1)
    assert_same(with_a_skipped_step(engine), stock_with_a_skipped_step())
    assert all(begun == right > 0 for begun, right in counts)


@functools.cache
def stock_steps(change, count=5):
    return steps(whole(), change, count)


CHANGES = [another_rate, another_gradient, another_master, another_master_in_place, another_moment_in_place, again]


@pytest.mark.parametrize(
    ("change", "pattern"),
    [*((change, "mixed") for change in CHANGES), *((c, name) for c in CHANGES[3:5] for name in ("host", "staged"))],
    indirect=["pattern"],
)
def test_what_changes_between_backward_and_step(change, pattern):
    engine, counts = updating_early(whole(), pattern)
    assert_same(steps(engine, change, 5), stock_steps(change))
    assert change is again or any(right < begun or begun == 0 for begun, right in counts)


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
        engine.optimizer._flat.publish(engine.optimizer._ebbtide)
        assert not away(engine)


@pytest.mark.parametrize(
    ("change", "pattern"),
    [*((change, "mixed") for change in CHANGES[3:5]), (publish_alone, "host"), (publish_alone, "staged")],
    indirect=["pattern"],
)
def test_what_changes_under_an_early_update_that_writes_where_deepspeed_looks(change, pattern, monkeypatch):
    """Check that a script may change optimizer state in DeepSpeed's tensors while an early update writes to the
    same tensors.

    Early updates start before the gradient norm is known. They write to DeepSpeed's tensors in every second step, and
    to spare buffers in the other steps. This test slows them down, so that the script's change comes before they end.
    """
    engine, _ = updating_early(whole(), pattern)
    rule, device = type(engine.optimizer._rule), type(engine.optimizer._ebbtide.device)
    for owner in (rule, device):

        def slowly(*args, update=owner.update):
            time.sleep(0.01)
            update(*args)

        monkeypatch.setattr(owner, "update", slowly)
    engine.optimizer._ebbtide.executor.gradients.before_op = None
    assert_same(steps(engine, every_second(change), 6), stock_steps(every_second(change), 6))


@pytest.mark.parametrize("change", CHANGES[3:5])
def test_what_changes_while_state_waits_in_a_slot_for_the_norm(change):
    """Check that an update uses a script's change to the optimizer state in host memory, although the state was copied
    to the GPU before the change. The script makes the change while the update waits for the gradient norm.

    Before the change, the latest state is in a spare buffer in host memory, because the previous step's update started
    before its gradient norm was known. When the script accesses DeepSpeed's tensor, the runtime first copies the state
    from the spare buffer to this tensor.
    """
    engine, _ = updating_early(whole(), ["device"])
    backwards = []
    engine.optimizer.early_updates_allowed = lambda: len(backwards) % 2 == 0

    def changed(engine, number):
        every_second(change)(engine, number)
        backwards.append(number)

    assert_same(steps(engine, changed, 6), stock_steps(every_second(change), 6))


@pytest.mark.parametrize("change", CHANGES[2:5])
def test_what_changes_while_state_is_away_from_deepspeeds_tensors(change, pattern):
    """Check that a script may change state between two steps while early updates have left it elsewhere."""
    engine, _ = updating_early(whole(), pattern)
    assert_same(changed_behind_steps(engine, change), stock_changed_behind_steps(change))


@functools.cache
def stock_changed_behind_steps(change):
    return changed_behind_steps(whole(), change)


def changed_behind_steps(engine, change):
    ours = hasattr(engine.optimizer, "_ebbtide")

    def behind(engine, number):
        if number % 3 == 2:
            assert not ours or away(engine), "some state must be outside DeepSpeed's tensors"
            change(engine, number)

    return steps(engine, nothing, 8, behind)


@functools.cache
def stock_looked_at():
    stock = whole()
    return outcome(stock, 5, each=look), stock.seen


def test_who_looks_between_steps_sees_stocks_state_and_stops_no_early_update(pattern):
    """Check that a script that reads optimizer state between two steps sees stock DeepSpeed's values, bit for bit.

    For the read, the runtime moves the state to DeepSpeed's tensors. Early updates, which start before the gradient
    norm is known, must still start in the next step. None of them may be rolled back because of the read.
    """
    stock, seen = stock_looked_at()
    engine, counts = updating_early(whole(), pattern)
    assert_same(outcome(engine, 5, each=look), stock)
    assert all(not differences(a, b) for a, b in zip(engine.seen, seen, strict=True))
    assert all(begun == right == counts[0][0] > 0 for begun, right in counts)


@under("mixed", "host")
def test_checkpoints_between_steps(tmp_path, pattern, small_blocks):
    """Check that early updates after a save do not change the checkpoint that is still being written."""

    def save(engine, number):
        if number in (1, 2, 4):
            engine.save_checkpoint(str(tmp_path), tag=f"{number}")

    slow = {"checkpoint": {"write_bytes_per_s": 1e6, "dir": str(tmp_path)}}
    engine, counts = updating_early(whole(), pattern, **slow)
    steps(engine, nothing, 6, save)
    assert all(begun == right == counts[0][0] > 0 for begun, right in counts)
    for number in (1, 2, 4):
        expected = stock_steps(nothing, number + 1)[0]
        for resumed in (whole(), updating_early(whole(), pattern)[0]):
            resumed.load_checkpoint(str(tmp_path), tag=f"{number}")
            assert not differences(state_of(resumed), expected)
            resumed.destroy()


def test_a_checkpoint_is_loaded_while_state_is_away(tmp_path, pattern):
    saving = whole()
    train(saving, 2)
    saving.save_checkpoint(str(tmp_path))
    saving.destroy()
    engine, _ = updating_early(whole(), pattern)
    train(engine, 3, first=7)
    assert away(engine)
    engine.load_checkpoint(str(tmp_path))
    state, losses, norms = stock_with()
    assert_same(outcome(engine, 2, first=2), (state, losses[2:], norms[2:]))


@under("mixed", "staged")
def test_another_plan_while_state_is_away(pattern):
    """Check that a change of the plan releases the spare buffers of early updates, and never DeepSpeed's own tensors.

    Early updates, which start before the gradient norm is known, write to the spare buffers in one step and to
    DeepSpeed's tensors in the next. So the current state may be in either of them when the plan changes.
    """
    engine, _ = updating_early(whole(), pattern)
    session, released, moved = engine.optimizer._ebbtide, [], []
    flats = {t.data_ptr() for flat in engine.optimizer._flat._flats for t in flat}
    session.device.host_release = released.append

    def switch(engine, number):
        moved.append(away(engine))
        fields = {"speculate": (0, 99)[number % 2], "speculate_visits": number}
        session.switch(plan_for(engine, pattern, pieces=True, **{**ALL, **fields}))

    assert_same(steps(engine, nothing, 6, switch), stock_steps(nothing, 6))
    assert any(moved)
    assert released
    assert not flats.intersection(tensor.data_ptr() for tensor in released)


@under("host", "mixed")
def test_what_is_left_behind_is_whole(pattern):
    """Check that DeepSpeed's tensors hold the whole state after the end, also if it was in spare buffers."""
    for count in (1, 2):
        engine, stock = updating_early(whole(), pattern)[0], whole()
        for one in (engine, stock):
            train(one, count)
        flats = [*engine.optimizer.__dict__["fp32_partitioned_groups_flat"]]
        released = []  # the tensors themselves, because the address of a freed tensor may be reused
        engine.optimizer._ebbtide.device.host_release = released.append
        engine.destroy()
        assert released
        assert not {flat.data.data_ptr() for flat in flats}.intersection(one.data_ptr() for one in released)
        expected = stock.optimizer.fp32_partitioned_groups_flat
        assert all(torch.equal(a.data.cpu(), b.data) for a, b in zip(flats, expected, strict=True))
        stock.destroy()


@under(*PATTERNS)
def test_their_memory_is_predicted_to_the_byte(pattern):
    engine, _ = updating_early(whole(), pattern)
    own = engine.optimizer._ebbtide
    sizes = own.engine.sizes()
    layers = tuple(Layer(params=n, forward_s=1.0, backward_s=1.0) for n in sizes)
    work = Workload(name="w", layers=layers, subgroups=sizes, state_stays=own.engine.shares_state)
    told = footprint(work, own.plan)
    for _ in range(3):
        train(engine, 1)
        assert told["host"] == engine.optimizer._ebbtide.host_bytes()
        sent = sum(n for n, p in zip(sizes, own.plan.placements, strict=True) if p == "host")
        assert told["device"] == allocated_device_bytes(own.executor) + 2 * sent
    engine.destroy()
