"""Tests of the model of the optimizer's update that simulator and runtime share.

It consists of the order of updates, the optimizer state, the ops of an update for each placement, and the memory that a
plan needs.
"""

import random
from itertools import pairwise

import pytest
from ebbtide.simulator import OpKind, Plan, PlanError, build_schedule, build_strategy, simulate
from ebbtide.simulator.optimizer import ADAM, OPTIMIZERS
from ebbtide.simulator.schedules.footprint import footprint
from ebbtide.simulator.update.order import UpdateOrder, compact, issue_order, order_of
from ebbtide.simulator.update.recipes import RECIPES
from ebbtide.simulator.update.steps import Queue
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.machines import machine, workload


@given(st.integers(0, 10**9))
def test_any_order_survives_its_compact_form(seed):
    rng = random.Random(seed)
    placements = rng.choices(list(RECIPES), k=rng.randint(1, 30))
    wanted = rng.sample(range(len(placements)), len(placements))
    order = order_of(wanted, placements)
    back = UpdateOrder.model_validate_json(order.model_dump_json())
    for queue in Queue:
        members = [i for i, p in enumerate(placements) if RECIPES[p].queue == queue]
        assert back.of(queue, members) == [i for i in wanted if i in members]
    assert order_of(issue_order(placements, back), placements) == order


def test_orders_are_short_where_they_can_be():
    assert compact([0, 2, 5]) == "forward"
    assert compact([5, 2, 0]) == "arrival"
    assert compact([]) == "forward"
    # Subgroups 3 and 4 belong to the other queue, so a span may contain them.
    assert compact([2, 5, 6, 7, 1, 0]) == ((2, 7), (1, 0))
    assert UpdateOrder(host=((2, 7), (1, 0))).of(Queue.HOST, [0, 1, 2, 5, 6, 7]) == [2, 5, 6, 7, 1, 0]


def test_an_order_that_misses_a_subgroup_is_refused_by_the_plan():
    fields = {"subgroup_size": 1, "placement": [{"placement": "host", "count": 3}]}
    with pytest.raises(
        PlanError, match=r"plan\.order\.host must name exactly once each .* CPU .* leave out the subgroups \[2\]"
    ):
        Plan.from_fields({**fields, "order": {"host": [[0, 1]]}})
    with pytest.raises(PlanError, match=r"name the subgroups \[1\] more than once"):
        Plan.from_fields({**fields, "order": {"host": [[0, 1], [1, 2]]}})


def test_a_queue_is_updated_in_its_order_and_the_other_one_is_not_touched():
    placements = ["host", "device", "host", "resident", "host"]
    plan = Plan(
        subgroup_size=10,
        placement=Plan.runs(placements),
        staging_slots=1,
        order=UpdateOrder(host="arrival", device=((3, 1),)),
    )
    assert plan.issue_order == (4, 3, 2, 1, 0)
    timeline = simulate(build_schedule(workload((10,) * 5), plan), machine())
    last = [s for s in timeline.spans if s.iteration == 2]
    for lane, expected in (("host compute", [4, 2, 0]), ("device update", [3, 1])):
        spans = sorted((s for s in last if s.lane == lane), key=lambda s: s.start_s)
        assert [s.subgroup for s in spans] == expected
        assert all(a.end_s <= b.start_s + 1e-9 for a, b in pairwise(spans))


def test_subgroups_that_change_their_placement_keep_their_turn():
    plan = Plan(
        subgroup_size=10, placement=Plan.runs(["host", "device", "host", "device"]), order=UpdateOrder(host="arrival")
    )
    moved = plan.placed(["host"] * 4, staging_slots=0)
    assert plan.issue_order == (2, 1, 0, 3)
    assert moved.issue_order == (2, 1, 0, 3)


def test_a_plan_of_the_first_schema_is_read_without_what_nobody_executed():
    fields = {
        "schema_version": 1,
        "subgroup_size": 1,
        "prefetch_after_layer": 3,
        "split_master": False,
        "placement": [{"placement": "host", "count": 3}],
    }
    plan = Plan.from_fields(fields)
    assert plan.schema_version == 3
    assert plan.issue_order == (0, 1, 2)
    with pytest.raises(PlanError, match="split_master must be false, but got true"):
        Plan.from_fields({**fields, "split_master": True})
    with pytest.raises(PlanError, match="prefetch_after_layer"):
        Plan.from_fields({**fields, "schema_version": 2})


def test_the_recipes_reach_every_byte_of_adam():
    assert (ADAM.state_bytes, ADAM.host_traffic_bytes(2, 2)) == (12, 28)


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_less_state_moves_less(name):
    plan = Plan(subgroup_size=10, placement=Plan.runs(["device", "host", "resident"]))
    made = workload((10, 10, 10), optimizer=name)
    ops = build_schedule(made, plan).ops
    state = OPTIMIZERS[name]
    assert {op.work for op in ops if op.kind.value == "state H2D"} == {10 * state.state_bytes}
    traffic = {op.dram_bytes for op in ops if op.kind.value == "update host"}
    assert traffic == {10 * (2 * state.state_bytes + 4)}
    held = footprint(made, plan)
    assert held["host"] == 20 * state.state_bytes + 10 * 2 + 10 * 2
    assert held["device"] == (10 + 64) * state.state_bytes + 2 * 20 + 2 * 10


def test_an_unknown_optimizer_is_refused():
    with pytest.raises(ValidationError, match=r"optimizer must be one of adam, .* got 'sgd'"):
        workload(optimizer="sgd")


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
@pytest.mark.parametrize("placement", ["host", "device", "resident"])
def test_an_update_lasts_as_long_as_its_traffic(placement, name):
    made = workload((10, 10), forward_s=0.0, backward_s=0.0, optimizer=name)
    plan = Plan(subgroup_size=10, placement=Plan.runs([placement] * 2), staging_slots=2)
    spans = simulate(build_schedule(made, plan), machine(dram_bytes_per_s=1e9)).spans
    updates = [s for s in spans if s.kind in (OpKind.UPDATE_HOST, OpKind.UPDATE_DEVICE)]
    moved = (2 * OPTIMIZERS[name].state_bytes + 4) / 28
    assert {round(s.end_s - s.start_s, 9) for s in updates} == {round(10 * moved, 9)}


def test_stock_too_is_faster_where_the_state_is_smaller():
    adam, lion = (
        simulate(build_strategy("zero3_offload", workload(optimizer=name)), machine()).iteration_s
        for name in ("adam", "lion")
    )
    assert lion < adam
