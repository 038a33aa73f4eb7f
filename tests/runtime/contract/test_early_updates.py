"""Tests of early updates, which start before the gradient norm is known: the results equal stock DeepSpeed's,
bit for bit, whether the early updates are kept or rolled back.
"""

import functools

import ebbtide.runtime
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_grad, safe_set_full_fp32_param, safe_set_full_grad
from ebbtide.runtime.zero.flat_partitions import FlatState
from ebbtide.simulator import PlanError

from studies.bench.bits import state_of
from studies.bench.byte_gpt import SIZES, Batches
from tests.runtime.contract.test_bits import engine_for, stock
from tests.runtime.contract.training import DEVICES, assert_same, attached, outcome, plan_for, start, steps

pytestmark = [
    pytest.mark.usefixtures("only_rank"),
    pytest.mark.skipif("emulated" not in DEVICES, reason="counts early updates on emulated streams"),
]
DEVICE = "emulated"
SCALED_STEPS = 8  # the first of these steps overflow
OVERFLOWS = {"enabled": True, "initial_scale_power": 20, "hysteresis": 1}


ALL = {"speculate": 99, "speculate_visits": 99, "host_slots": 9}
PATTERNS = {
    "host": ["host"],
    "staged": ["device"],
    "both": ["host", "device", "resident", "device"],
    "beside stored": ["stored", "host", "device"],
}


@pytest.fixture(params=["both", "beside stored"])
def pattern(request):
    return PATTERNS[request.param]


def pausing(engine, pattern=("host",), **fields):
    """Attach a plan with early updates, which may start before the gradient norm is known. Return the engine
    and a list.

    Each step appends to the list the number of early updates that were begun, and the number that were kept.
    """
    attached(engine, list(pattern), DEVICE, **(ALL | fields))
    session, counts = engine.optimizer._ebbtide, []
    settle = session.executor.settle

    def counted(jobs):
        begun = len(session.executor.early_updates.begun)
        counts.append((begun, len(settled := settle(jobs))))
        return settled

    session.executor.settle = counted
    return engine, counts


def never_pause(engine):
    engine.optimizer._ebbtide.pausing.stepped = lambda right: None


def updated_early(engine):
    return sum(engine.optimizer._ebbtide.plan.updated_early)


@pytest.mark.parametrize(
    ("case", "name", "overlap"),
    [
        *(("no_clipping", name, True) for name in PATTERNS),
        ("no_clipping", "both", False),
        *((case, "both", True) for case in ("accumulation", "fp32", "parameter_groups", "learning_rate_schedule")),
    ],
)
def test_right_early_updates(case, name, overlap):
    engine, counts = pausing(engine_for(case), PATTERNS[name], overlap_forward=overlap)
    count = updated_early(engine)
    assert_same(outcome(engine), stock(case))
    assert case != "no_clipping" or counts == [(count, count)] * 4


def clipping_hard():
    # Each subgroup has several gradients, because the norm of a single gradient would be known only after it.
    return start(clipping=0.01, subgroup_size=17_000)


@functools.cache
def stock_clipping_hard():
    return outcome(clipping_hard())


@pytest.mark.parametrize(("name", "proved"), [("both", True), *((name, False) for name in PATTERNS)])
def test_wrong_early_updates_are_redone_and_then_left_out(name, proved):
    """Check that early updates, which start before the gradient norm is known, are rolled back and redone if the
    step clips. Every step of this test clips.

    The test runs twice. With the runtime's own check of the first gradients' norms, no early update starts,
    because these norms show that the step will clip. Without this check, early updates start in the first two
    steps. Then the runtime pauses early updates, so the later steps have none.
    """
    engine, counts = pausing(clipping_hard(), PATTERNS[name])
    count = updated_early(engine)
    if not proved:
        engine.optimizer.early_updates_allowed = lambda: True
    assert_same(outcome(engine), stock_clipping_hard())
    begun = [0] * 4 if proved else [count, count, 0, 0]
    assert counts == [(n, 0) for n in begun]


@functools.cache
def at_a_bound_that_some_steps_reach():
    norms = sorted(stock("no_clipping")[2])
    return (norms[1] + norms[2]) / 2


@functools.cache
def stock_where_some_steps_clip():
    return outcome(start(clipping=at_a_bound_that_some_steps_reach()))


MIXED = ["host", "device", "resident", "device", "stored"]
ACTING = [
    (["host"], {}),
    (["device"], {"staging_slots": 1}),
    (["device"], {"staging_slots": 9, "prefetch": 9}),
    *((MIXED, fields) for fields in ({"order_seed": 3}, {"speculate_visits": 2}, {"host_slots": 1}, {"host_slots": 2})),
]


@pytest.mark.parametrize(("mixed", "fields"), ACTING)
def test_some_steps_clip(mixed, fields):
    clipping = at_a_bound_that_some_steps_reach()
    engine, counts = pausing(start(clipping=clipping), mixed, **fields)
    never_pause(engine)
    assert_same(outcome(engine), stock_where_some_steps_clip())
    assert {right > 0 for begun, right in counts if begun} == {True, False}


def overflowing():
    return start(precision="fp16", clipping=0.0, extra={"fp16": OVERFLOWS})


@functools.cache
def stock_where_some_steps_overflow():
    return outcome(overflowing(), SCALED_STEPS)


def test_overflows(monkeypatch, pattern):
    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: True)
    assert_overflows_are_redone(*pausing(overflowing(), pattern), stock_where_some_steps_overflow())


def assert_overflows_are_redone(engine, counts, stock):
    """Check that training steps with early updates, some of which overflow, have stock DeepSpeed's results.

    In the steps that do not overflow, some early updates (begun before the gradient norm is known) must be kept.
    """
    never_pause(engine)
    assert_same(outcome(engine, SCALED_STEPS), stock)
    assert any(right for _, right in counts)
    assert len(counts) < SCALED_STEPS, "some step must have overflowed"


@functools.cache
def stock_steps(change, count=4):
    return steps(start(clipping=0.0), change, count)


def with_a_skipped_step(engine):
    losses = []
    for number in range(5):
        loss = engine(*Batches(2, SIZES["tiny"].sequence).at(number, engine.device))
        engine.backward(loss * float("nan" if number == 1 else "1"))
        engine.step()
        losses.append(loss.detach())
    assert engine.skipped_steps == 1
    state = state_of(engine)
    engine.destroy()
    return state, torch.stack(losses), None


@functools.cache
def stock_with_a_skipped_step():
    return with_a_skipped_step(start(clipping=50.0))


def test_staged_updates_of_a_skipped_step_without_early_updates(pattern):
    """Check that optimizer state that was copied to the GPU for an update stays there for the next step if
    this step is skipped.

    The NaN in the first gradients already shows that the step will be skipped, so no update starts before
    the gradient norm is known.
    """
    engine, counts = pausing(start(clipping=50.0), pattern, staging_slots=1, prefetch=1)
    count = updated_early(engine)
    assert_same(with_a_skipped_step(engine), stock_with_a_skipped_step())
    assert counts == [(count, count)] * 4


def another_rate(engine, number):
    if number != 1:
        engine.optimizer.param_groups[0]["lr"] = 1e-3 / (1 + number)


def another_gradient(engine, number):
    for param in list(engine.module.parameters())[number::3]:
        safe_set_full_grad(param, safe_get_full_grad(param) * 0.5)


def another_master(engine, number):
    for param in list(engine.module.parameters())[number::3]:
        safe_set_full_fp32_param(param, torch.full(param.ds_shape, 0.01 * (number + 1)))


def another_master_in_place(engine, number):
    engine.optimizer.fp32_partitioned_groups_flat[number % 2].data.mul_(0.5)


def another_moment_in_place(engine, number):
    master = engine.optimizer.fp32_partitioned_groups_flat[0]
    if "exp_avg" in engine.optimizer.state[master]:
        engine.optimizer.state[master]["exp_avg"].mul_(0.5 + number)


SAID = [another_rate, another_gradient, another_master]
IN_PLACE = [another_master_in_place, another_moment_in_place]  # writes to a view of stored state have no effect


@pytest.mark.parametrize(
    ("change", "name"),
    [
        *((change, "both") for change in (*SAID, *IN_PLACE)),
        *((change, "beside stored") for change in SAID),
        *((change, name) for change in IN_PLACE for name in ("host", "staged")),
    ],
)
def test_what_changes_between_backward_and_step(change, name):
    engine, counts = pausing(start(clipping=0.0), PATTERNS[name])
    assert_same(steps(engine, change), stock_steps(change))
    assert any(right < subgroups_begun for subgroups_begun, right in counts) or any(begun == 0 for begun, _ in counts)


@pytest.mark.parametrize("change", IN_PLACE)
def test_what_has_come_in_already_comes_again_when_it_is_changed(change):
    """Check that state is copied to the GPU again if a script changes it after its copy and before the step."""
    engine = attached(start(clipping=0.0), ["device"], DEVICE, prefetch=2)
    assert_same(steps(engine, change), stock_steps(change))


@pytest.mark.parametrize("placement", ["device", "resident"])
def test_what_is_changed_in_place_below_stage_3(placement, monkeypatch):
    """Check that a script's in-place changes of DeepSpeed's fp32 tensors between backward and step have the same
    effect under a plan as with stock DeepSpeed, under ZeRO-2.

    The runtime must use the changed values. If it has already copied the state to a staging buffer on the GPU,
    it copies the state again. If the state lives on the GPU, the runtime overwrites this state with the values
    of DeepSpeed's tensors, but only in steps with a change.
    """

    def change(engine, number):
        if number < 3:
            engine.optimizer.single_partition_of_fp32_groups[0].data.mul_(0.5 + number)

    taken = []
    take_back = FlatState._copy_back
    monkeypatch.setattr(FlatState, "_copy_back", lambda *given: (taken.append(0), take_back(*given)))
    options = {"clipping": 0.0, "stage": 2}
    engine = attached(start(**options), [placement], DEVICE, prefetch=2)
    assert_same(steps(engine, change, 6), steps(start(**options), change, 6))
    assert len(taken) == (3 if placement == "resident" else 0), "state must be copied back in changed steps only"


def again(engine, number):
    engine.backward(engine(*Batches(2, SIZES["tiny"].sequence).at(90 + number, engine.device)))


def test_a_second_backward_before_the_step(pattern):
    """Check that early updates are discarded if a second backward adds to their gradients."""
    engine, _ = pausing(start(clipping=0.0), pattern)
    assert_same(steps(engine, again), stock_steps(again))


def nothing(engine, number):
    pass


def test_a_checkpoint_in_flight(tmp_path, pattern, small_blocks):
    """Check that an early update does not write to memory from which a checkpoint is still being written."""

    def save(engine, number):
        if number in (1, 3):
            engine.save_checkpoint(str(tmp_path), tag=f"{number}")

    slow = {"checkpoint": {"write_bytes_per_s": 1e6, "dir": str(tmp_path)}}
    if "stored" in pattern:
        slow["checkpoint"]["keep"] = 2
        slow["storage_dir"] = str(tmp_path / "state")
    engine, counts = pausing(start(clipping=0.0), pattern, **slow)
    steps(engine, nothing, 6, save)
    assert all(begun == right > 0 for begun, right in counts)
    for number in (1, 3):
        expected = stock_steps(nothing, number + 1)[0]
        ours = start(clipping=0.0)
        if "stored" in pattern:
            attached(ours, pattern, DEVICE, **slow)
        ours.load_checkpoint(str(tmp_path), tag=f"{number}")
        assert_same((state_of(ours), torch.zeros(1), 0), (expected, torch.zeros(1), 0))
        ours.destroy()


@pytest.mark.parametrize(("placement", "name"), [("host", "speculate"), ("device", "speculate_visits")])
def test_another_plan_gives_the_memory_back_and_takes_it_again(placement, name):
    engine, _ = pausing(start(clipping=0.0), [placement], **{name: 2})
    session = engine.optimizer._ebbtide

    def switch(engine, number):
        held = session.executor.early_updates.nbytes
        fields = {name: number % 3, "speculate_among": number}
        session.switch(plan_for(engine, [placement], **{**ALL, "speculate": 0, "speculate_visits": 0, **fields}))
        both = zip(engine.optimizer.sizes(), session.plan.updated_early, strict=True)
        sizes = [size for size, updated_early in both if updated_early]
        assert len(sizes) == number % 3
        assert session.executor.early_updates.nbytes == 14 * sum(sizes) != held

    assert_same(steps(engine, nothing, 5, switch), stock_steps(nothing, 5))


@pytest.mark.parametrize("placement", ["host", "device"])
def test_flat_partitions_are_refused(placement):
    engine = start(stage=2)
    plan = plan_for(engine, [placement], overlap_forward=False).with_bits(early=True)
    with pytest.raises(PlanError, match=r"plan\.ways sets early updates .* but training uses ZeRO-2"):
        ebbtide.runtime.attach(engine, plan, device="cpu")
    engine.destroy()
