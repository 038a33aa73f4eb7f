"""The DAG that is executed at every step: its waits, against hand-written ones."""

from ebbtide.runtime.execution.step_template import step_template
from ebbtide.simulator import Plan
from ebbtide.simulator.schedule import OpKind

SIZES = (100, 100, 100, 100)


def template_of(placements, slots=1, prefetch=0, **fields):
    plan = Plan(subgroup_size=100, placement=Plan.runs(placements), staging_slots=slots, prefetch=prefetch, **fields)
    return step_template(SIZES, "bf16", plan)


def named(template):
    """(kind, subgroup) -> the same of what it waits for, this step's and the previous one's."""
    keys = [(t.op.kind, t.op.subgroup) for t in template]
    return {key: ({keys[i] for i in t.now}, {keys[i] for i in t.before}) for key, t in zip(keys, template, strict=True)}


def test_who_takes_a_slot_waits_for_whom_visits_know_of():
    waits = named(template_of(["device"] * 4, slots=2))
    assert all(waits[OpKind.STATE_H2D, s] == (set(), set()) for s in range(4))


def test_what_is_guessed_is_all_that_comes_before_the_norm():
    template = template_of(["device", "device", "host", "host"], speculate=1, speculate_visits=1)
    guessed = [(t.op.kind, t.op.subgroup) for t in template if t.guessed]
    assert set(guessed) == {
        (OpKind.STATE_H2D, 1),
        (OpKind.VISIT_GUESSED, 1),
        (OpKind.STATE_D2H, 1),
        (OpKind.UPDATE_GUESSED, 3),
    }
    assert guessed.index((OpKind.STATE_H2D, 1)) < guessed.index((OpKind.VISIT_GUESSED, 1))
    assert named(template)[OpKind.PARAMETER_H2D, 1][0] == {(OpKind.STATE_D2H, 1)}
    assert not any(t.needs_norm for t in template if t.guessed)


def test_updates_wait_for_their_state_and_copies_for_their_updates():
    waits = named(template_of(["device", "host", "resident", "host"]))
    assert (OpKind.STATE_H2D, 0) in waits[OpKind.UPDATE_DEVICE, 0][0]
    assert (OpKind.UPDATE_DEVICE, 0) in waits[OpKind.STATE_D2H, 0][0]
    assert (OpKind.UPDATE_HOST, 1) in waits[OpKind.PARAMETER_H2D, 1][0]
    assert waits[OpKind.UPDATE_DEVICE, 2] == (set(), set()), "a resident needs no copy"


def test_only_prefetched_visits_may_start_before_the_norm():
    template = template_of(["device"] * 3 + ["host"], slots=3, prefetch=2)
    fetches = [t for t in template if t.op.kind == OpKind.STATE_H2D]
    assert [t.op.subgroup for t in fetches if not t.needs_norm] == [0, 1]
    late = [t for t in template if t not in fetches and not t.now]
    assert late
    assert all(t.needs_norm for t in late)


def test_updates_read_gradients_and_copies_do_not():
    for item in template_of(["device", "host", "resident", "host"]):
        reads = item.op.kind in (OpKind.UPDATE_HOST, OpKind.UPDATE_DEVICE)
        assert item.needs_gradient == reads
