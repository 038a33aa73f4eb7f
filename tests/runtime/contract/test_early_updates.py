"""Tests of early updates, which start before the gradient norm is known: the results equal stock DeepSpeed's,
bit for bit, whether the early updates are kept or rolled back.

The plans update DeepSpeed's own subgroups, or parts of them. What only plans with parts have is tested in
`test_early_pieces.py`.
"""

import functools

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_grad, safe_set_full_fp32_param, safe_set_full_grad
from ebbtide.runtime import session_of
from ebbtide.runtime.zero.flat_partitions import FlatState

from studies.bench.bits import differences, state_of
from studies.bench.byte_gpt import SIZES, Batches
from tests.runtime.contract import test_bits
from tests.runtime.contract.test_pieces import LARGE, dropping
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
)

pytestmark = [
    pytest.mark.usefixtures("only_rank"),
    pytest.mark.skipif("emulated" not in DEVICES, reason="counts early updates on emulated streams"),
]
DEVICE = "emulated"
SCALED_STEPS = 8  # the first of these steps overflow
OVERFLOWS = {"enabled": True, "initial_scale_power": 20, "hysteresis": 1}
CASES = {
    **test_bits.CASES,
    "dropout": {"model": dropping},
    "offloaded": {"offload_param": {"device": "cpu"}, "accumulation": 2},
    "overflows": {"precision": "fp16", "extra": {"fp16": OVERFLOWS}},
}
ALL = {"speculate": 99, "speculate_visits": 99, "host_slots": 9}
MIXED = ["host", "device", "resident", "device"]
PATTERNS = {
    "host": ["host"],
    "staged": ["device"],
    "mixed": MIXED,
    "beside stored": ["stored", "host", "device"],
    "all": [*MIXED, "stored"],
}
PIECES = {f"pieces {name}": PATTERNS[name] for name in ("host", "staged", "mixed")}
# ZeRO-1 and 2 have flat partitions, which plans cut as they like.
FLAT = {f"ZeRO-{stage} {name}": PATTERNS[name] for stage in (1, 2) for name in ("host", "staged", "mixed")}
PLANS = PATTERNS | PIECES | FLAT


def engine_for(name, case="no_clipping", **options):
    """Return an engine without a plan, and without gradient clipping unless the case or an option sets it.

    Args:
        name: Name of the plan in `PLANS` that the engine may get. If the plan cuts DeepSpeed's subgroups, these are
            large.
    """
    options = {"clipping": 0.0, "subgroup_size": LARGE if name in PIECES else SUBGROUP, **CASES[case], **options}
    if name in FLAT:
        options["stage"] = int(name[5])
    if "model" in options:
        options["model"] = options["model"]()
    return start(**options)


@functools.cache
def trained(train, name, *args, **options):
    """Train an engine without a plan, and return the result of ``train``, which gets the engine and ``args``."""
    return train(engine_for(name, **options), *args)


def stock(train, name, *args, **options):
    """Return stock DeepSpeed's result, which is trained once for all plans with subgroups of the same size."""
    like = "pieces mixed" if name in PIECES else f"{name[:6]} mixed" if name in FLAT else "mixed"
    return trained(train, like, *args, **options)


def pausing(name, options=None, **fields):
    """Return an engine under a plan with early updates and a list.

    Each step appends to the list the number of early updates that were begun, and the number that were kept.

    Args:
        name: Name of the plan in `PLANS`.
        options: Arguments of `engine_for`.
        fields: Further fields of the plan.
    """
    engine = engine_for(name, **(options or {}))
    attached(engine, PLANS[name], DEVICE, pieces=name in PIECES, **(ALL | fields))
    session, counts = session_of(engine), []
    if name not in FLAT:
        assert (len(session.plan.placements) > len(engine.optimizer.fp16_groups)) == (name in PIECES)
    assert updated_early(engine)
    settle = session.executor.settle

    def counted(jobs):
        begun = len(session.executor.early_updates.begun)
        counts.append((begun, len(settled := settle(jobs))))
        return settled

    session.executor.settle = counted
    return engine, counts


def never_pause(engine):
    session_of(engine).pausing.stepped = lambda right: None


def updated_early(engine):
    return sum(session_of(engine).plan.updated_early)


RIGHT = ["no_clipping", "accumulation", "fp32", "parameter_groups"]
RIGHT_PIECES = [*RIGHT, "one_subgroup", "fp32_accumulation", "l2_adam", "small_buckets", "frozen_parameters", "dropout"]


@pytest.mark.parametrize(
    ("name", "case", "fields"),
    [
        *((name, "no_clipping", {}) for name in PATTERNS),
        ("mixed", "no_clipping", {"overlap_forward": False}),
        *(("mixed", case, {}) for case in (*RIGHT[1:], "learning_rate_schedule")),
        *(("pieces mixed", case, {}) for case in RIGHT_PIECES),
        *((name, "accumulation", {"device_sums": True}) for name in PIECES),
        *((name, "no_clipping", {}) for name in FLAT),
        *((f"ZeRO-{stage} mixed", "no_clipping", {"overlap_forward": False}) for stage in (1, 2)),
        *(("ZeRO-2 mixed", case, {}) for case in (*RIGHT[1:], "fp32_accumulation", "small_buckets", "dropout")),
        ("ZeRO-1 mixed", "accumulation", {}),
    ],
)
def test_right_early_updates(name, case, fields):
    engine, counts = pausing(name, {"case": case}, **fields)
    count = updated_early(engine)
    assert_same(outcome(engine), stock(outcome, name, case=case))
    assert counts == [(count, count)] * len(counts)
    assert counts


NEVER, ALWAYS, UNTIL_PAUSED = [0] * 4, [1] * 4, [1, 1, 0, 0]


@pytest.mark.parametrize(
    ("name", "begun"),
    [
        *((name, NEVER) for name in ("mixed", "pieces mixed")),
        *((name, UNTIL_PAUSED) for name in ("mixed", "beside stored", "all")),
        ("pieces mixed", ALWAYS),
        ("ZeRO-2 mixed", ALWAYS),
        ("ZeRO-1 mixed", NEVER),
    ],
)
def test_wrong_early_updates_are_redone_and_then_left_out(name, begun):
    # Every step of this test clips. With the runtime's own check of the first gradients' norms, no early update starts,
    # because these norms show that the step will clip. Without this check, early updates start in the first two steps.
    # Then the runtime pauses early updates, so the later steps have none, unless the test keeps it from that.
    # Each subgroup has several gradients, because the norm of a single gradient would be known only after it.
    options = {"case": "clips_hard"} | ({} if name in PIECES else {"subgroup_size": 17_000})
    engine, counts = pausing(name, options, subgroup=17_000)
    count = updated_early(engine)
    if begun != NEVER:
        engine.optimizer.early_updates_allowed = lambda: True
    if begun == ALWAYS:
        never_pause(engine)
    assert_same(outcome(engine), stock(outcome, name, **options))
    assert counts == [(count * n, 0) for n in begun]


@functools.cache
def at_a_bound_that_some_steps_reach():
    norms = sorted(stock(outcome, "mixed")[2])
    return (norms[1] + norms[2]) / 2


@pytest.mark.parametrize(
    ("name", "fields", "accumulation"),
    [
        ("host", {}, 1),
        ("staged", {"staging_slots": 1}, 1),
        ("staged", {"staging_slots": 9, "prefetch": 9}, 1),
        *(("all", fields, 1) for fields in ({"order_seed": 3}, {"speculate_visits": 2}, {"host_slots": 1})),
        ("all", {"host_slots": 2}, 1),
        ("pieces host", {}, 2),
        ("pieces staged", {"staging_slots": 1}, 1),
        ("pieces staged", {"staging_slots": 9, "prefetch": 9}, 1),
        ("pieces mixed", {"order_seed": 3}, 1),
        ("pieces mixed", {"speculate_visits": 2}, 1),
        ("pieces mixed", {}, 2),
        *((f"ZeRO-{stage} {name}", {}, 1) for stage in (1, 2) for name in ("host", "staged")),
        *((f"ZeRO-{stage} mixed", {"order_seed": 3}, 2) for stage in (1, 2)),
    ],
)
def test_some_steps_clip(name, fields, accumulation):
    options = {"clipping": at_a_bound_that_some_steps_reach(), "accumulation": accumulation}
    engine, counts = pausing(name, options, **fields)
    never_pause(engine)
    engine.optimizer.early_updates_allowed = lambda: True  # as on a GPU, where norms are not read in backward
    assert_same(outcome(engine), stock(outcome, name, **options))
    assert accumulation > 1 or {right > 0 for begun, right in counts if begun} == {True, False}


@pytest.mark.parametrize("name", ["all", "pieces mixed", "ZeRO-1 mixed", "ZeRO-2 mixed"])
def test_overflows(monkeypatch, name):
    # In the steps that do not overflow, some early updates (begun before the gradient norm is known) must be kept.
    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: True)
    engine, counts = pausing(name, {"case": "overflows"})
    never_pause(engine)
    assert_same(outcome(engine, SCALED_STEPS), stock(outcome, name, SCALED_STEPS, case="overflows"))
    assert any(right for _, right in counts)
    assert len(counts) < SCALED_STEPS, "some step must have overflowed"


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


@pytest.mark.parametrize("name", ["all", "pieces mixed", "ZeRO-2 mixed"])
def test_staged_updates_of_a_skipped_step_without_early_updates(name):
    engine, counts = pausing(name, {"clipping": 50.0}, staging_slots=1, prefetch=1)
    count = updated_early(engine)
    assert_same(with_a_skipped_step(engine), stock(with_a_skipped_step, name, clipping=50.0))
    assert counts == [(count, count)] * 4


def another_rate(engine, number):
    if number != 1:
        engine.optimizer.param_groups[0]["lr"] = 1e-3 / (1 + number)


def another_gradient(engine, number):
    for param in list(engine.module.parameters())[number::3]:
        safe_set_full_grad(param, safe_get_full_grad(param) * 0.5)


def another_master(engine, number):
    for param in list(engine.module.parameters())[number::3]:
        safe_set_full_fp32_param(param, torch.full(getattr(param, "ds_shape", param.shape), 0.01 * (number + 1)))


def masters_of(engine):
    names = "fp32_partitioned_groups_flat", "single_partition_of_fp32_groups"
    return getattr(engine.optimizer, names[engine.zero_optimization_stage() < 3])


def another_master_in_place(engine, number):
    masters = masters_of(engine)
    masters[number % len(masters)].data.mul_(0.5)


def another_moment_in_place(engine, number):
    master = masters_of(engine)[0]
    if "exp_avg" in engine.optimizer.state[master]:
        engine.optimizer.state[master]["exp_avg"].mul_(0.5 + number)


def again(engine, number):
    engine.backward(engine(*Batches(2, SIZES["tiny"].sequence).at(90 + number, engine.device)))


SAID = [another_rate, another_gradient, another_master, again]
IN_PLACE = [another_master_in_place, another_moment_in_place]  # writes to a view of stored state have no effect


@pytest.mark.parametrize(
    ("name", "change"),
    [
        *((name, change) for name in ("all", "pieces mixed", "ZeRO-2 mixed") for change in SAID),
        *((name, change) for name in ("mixed", "pieces mixed", "ZeRO-2 mixed") for change in IN_PLACE),
    ],
)
def test_what_changes_between_backward_and_step(name, change):
    engine, counts = pausing(name)
    assert_same(steps(engine, change, 5), stock(steps, name, change, 5))
    assert change is again or any(right < begun or begun == 0 for begun, right in counts)


@pytest.mark.parametrize("change", IN_PLACE)
def test_what_has_come_in_already_comes_again_when_it_is_changed(change):
    engine = attached(engine_for("staged"), ["device"], DEVICE, prefetch=2)
    assert_same(steps(engine, change, 5), stock(steps, "staged", change, 5))


@pytest.mark.parametrize("placement", ["device", "resident"])
def test_what_is_changed_in_place_below_stage_3(placement, monkeypatch):
    # The runtime must use the changed values. If it has already copied the state to a staging buffer on the GPU, it
    # copies the state again. If the state lives on the GPU, the runtime overwrites this state with the values of
    # DeepSpeed's tensors, but only in steps with a change.
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


def nothing(engine, number):
    pass


@pytest.mark.parametrize("name", ["mixed", "beside stored", "pieces mixed", "pieces host", "ZeRO-2 mixed"])
def test_a_checkpoint_in_flight(tmp_path, name, small_blocks):
    saved = (1, 2, 4)  # early updates of parts write to DeepSpeed's own tensors in every second step

    def save(engine, number):
        if number in saved:
            engine.save_checkpoint(str(tmp_path), tag=f"{number}")

    slow = {"checkpoint": {"write_bytes_per_s": 1e6, "dir": str(tmp_path)}}
    if name == "beside stored":
        slow["checkpoint"]["keep"] = len(saved)
        slow["storage_dir"] = str(tmp_path / "state")
    engine, counts = pausing(name, **slow)
    steps(engine, nothing, 6, save)
    assert all(begun == right > 0 for begun, right in counts)
    for number in saved:
        expected = stock(steps, name, nothing, number + 1)[0]
        resumed = [pausing(name, **slow)[0]]
        if name != "beside stored":  # stock DeepSpeed has no state on a drive
            resumed.append(engine_for(name))
        for ours in resumed:
            ours.load_checkpoint(str(tmp_path), tag=f"{number}")
            assert not differences(all_state(ours), expected)
            ours.destroy()


@pytest.mark.parametrize(("placement", "name"), [("host", "speculate"), ("device", "speculate_visits")])
def test_another_plan_gives_the_memory_back_and_takes_it_again(placement, name):
    engine, _ = pausing({"host": "host", "device": "staged"}[placement], **{name: 2})
    session = session_of(engine)

    def switch(engine, number):
        held = session.executor.early_updates.nbytes
        fields = {name: number % 3, "speculate_among": number}
        session.switch(plan_for(engine, [placement], **{**ALL, "speculate": 0, "speculate_visits": 0, **fields}))
        both = zip(engine.optimizer.sizes(), session.plan.updated_early, strict=True)
        sizes = [size for size, updated_early in both if updated_early]
        assert len(sizes) == number % 3
        assert session.executor.early_updates.nbytes == 14 * sum(sizes) != held

    assert_same(steps(engine, nothing, 5, switch), stock(steps, "mixed", nothing, 5))
