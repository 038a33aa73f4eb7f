"""The DAG that is executed at every step: its waits, against hand-written ones."""

from runtime.execution.step_template import step_template
from simulator import Plan
from simulator.schedule import OpKind

SIZES = (100, 100, 100, 100)


def template_of(placements, slots=1, prefetch=0, **fields):
    plan = Plan(
        subgroup_size=100, placement=Plan.runs(placements), staging_slots=slots,
        prefetch=prefetch, **fields,
    )  # fmt: skip
    return step_template(SIZES, "bf16", plan)


def named(template):
    """(kind, subgroup) -> the same of what it waits for, this step's and the previous one's."""
    keys = [(t.op.kind, t.op.subgroup) for t in template]
    return {
        key: ({keys[i] for i in t.now}, {keys[i] for i in t.before})
        for key, t in zip(keys, template, strict=True)
    }


def test_a_visit_waits_for_its_slots_write_back():
    waits = named(template_of(["device", "device", "host", "host"], slots=1))
    h2d, d2h = OpKind.STATE_H2D, OpKind.STATE_D2H
    assert (d2h, 0) in waits[h2d, 1][0], "the second visit takes the first one's slot"
    assert (d2h, 1) in waits[h2d, 0][1], "the first one takes the slot of the last step's second"


def test_with_two_slots_a_visit_waits_for_the_one_before_the_last():
    waits = named(template_of(["device"] * 4, slots=2))
    h2d, d2h = OpKind.STATE_H2D, OpKind.STATE_D2H
    assert (d2h, 0) in waits[h2d, 2][0]
    assert (d2h, 1) in waits[h2d, 3][0]
    assert (d2h, 2) in waits[h2d, 0][1]
    assert (d2h, 0) not in waits[h2d, 1][0]


def test_updates_wait_for_their_state_and_copies_for_their_updates():
    waits = named(template_of(["device", "host", "resident", "host"]))
    assert (OpKind.STATE_H2D, 0) in waits[OpKind.UPDATE_DEVICE, 0][0]
    assert (OpKind.UPDATE_DEVICE, 0) in waits[OpKind.STATE_D2H, 0][0]
    assert (OpKind.UPDATE_HOST, 1) in waits[OpKind.PARAMETER_H2D, 1][0]
    assert waits[OpKind.UPDATE_DEVICE, 2] == (set(), set()), "a resident needs no copy"


def test_only_prefetched_visits_may_start_before_the_norm():
    template = template_of(["device"] * 3 + ["host"], slots=3, prefetch=2)
    assert [t.op.subgroup for t in template if t.early] == [0, 1]
    assert all(t.op.kind == OpKind.STATE_H2D and not t.needs_norm for t in template if t.early)
    late = [t for t in template if not t.early and not t.now]
    assert late
    assert all(t.needs_norm for t in late)


def test_updates_read_gradients_and_copies_do_not():
    for item in template_of(["device", "host", "resident", "host"]):
        reads = item.op.kind in (OpKind.UPDATE_HOST, OpKind.UPDATE_DEVICE)
        assert item.needs_gradient == reads
