"""Tests of checkpoint saves in the simulator.

In small cases the time that training waits for a save equals the time worked out by hand. The reference simulator and
the compiled one agree. No update overwrites optimizer state before the save has written or copied this state.
"""

import pytest
from ebbtide.simulator import CheckpointPlan, Lane, Layer, OpKind, Plan, Quantity, Workload, build_schedule, simulate
from ebbtide.simulator.analysis.checkpoint_cost import (
    LEAD_IN,
    SAVE_S,
    CheckpointSimulation,
    gathered_seconds,
    save_seconds,
    streamed_bytes,
)
from ebbtide.simulator.analysis.goodput import CheckpointCost
from ebbtide.simulator.analysis.many_plans import PlanSweep
from ebbtide.simulator.engines.compiled import simulate_fast
from ebbtide.simulator.plan import BLOCK_BYTES, READY_BLOCKS, Way
from ebbtide.simulator.schedules.checkpointed import CheckpointedLoop
from hypothesis import given, settings
from hypothesis import strategies as st

from studies.checkpoint_interval.kills import paid_at
from tests.machines import node
from tests.machines import workload as toy

GIGA = 10**9
ALL = 2**40  # a budget that is large enough for everything
EARLY = [Way("host", early=True), Way("device", early=True)]


def machine(**changes):
    rates = {
        "h2d_bytes_per_s": 1e13,
        "d2h_bytes_per_s": 1e13,
        "dram_bytes_per_s": 1e15,
        "host_copy_bytes_per_s": 8e9,
        "host_adam_params_per_s": 1e9,
        "stock_host_adam_params_per_s": 1e9,
        "device_adam_params_per_s": 1e13,
        "storage_write_bytes_per_s": 6e9,
    }
    facts = {
        "cpu_cores": 64,
        "host_memory_bytes": 2**40,
        "device_memory_bytes": 2**40,
        "copy_latency_s": 0,
        "launch_latency_s": 0,
        "storage_fsync_s": 0,
    }
    return node(**{**rates, **facts, **changes})


def workload(subgroups=2, layers=1, **changes):
    share = subgroups * GIGA // layers
    layer = Layer(params=share, forward_s=1.0 / layers, backward_s=1.0 / layers)
    return Workload(name="w", layers=(layer,) * layers, subgroups=(GIGA,) * subgroups, **changes)


def plan(*placements, **changes):
    fields = {"staging_slots": min(2, placements.count("device")), "overlap_forward": False}
    return Plan(subgroup_size=GIGA, placement=Plan.runs(placements), **{**fields, **changes})


def cost(work, made, have, **saving):
    return CheckpointSimulation(work, made, have, save_s=0.0).cost(CheckpointPlan(**saving))


HOST = plan("host", "host")  # forward 1 s, backward 1 s, two updates of 1 s each


def test_what_is_on_disk_before_its_update_costs_nothing():
    found = cost(workload(), HOST, machine(storage_write_bytes_per_s=12e9))  # 1 s per subgroup
    assert found.stall_s == pytest.approx(0, abs=2e-2)  # parameters that are copied to the host
    assert found.persist_s == pytest.approx(2, rel=1e-3)
    assert found.copied_bytes == found.waited_bytes == 0


def test_without_a_budget_the_update_waits_for_the_disk():
    # Subgroup 1 must be written after 3 s, and is on disk after 4 s.
    found = cost(workload(), HOST, machine(), copy_budget_bytes=0)
    assert found.stall_s == pytest.approx(1, abs=2e-2)
    assert found.waited_bytes == pytest.approx(6e9, rel=1e-2)
    assert found.persist_s == pytest.approx(4, rel=1e-2)


def test_with_a_budget_it_waits_for_a_copy():
    found = cost(workload(), HOST, machine(), copy_budget_bytes=ALL)  # 6 GB at 8 GB/s
    assert found.stall_s == pytest.approx(0.75, abs=2e-2)
    assert found.copied_bytes == pytest.approx(6e9, rel=1e-2)
    assert found.waited_bytes == 0


@pytest.mark.parametrize("way", EARLY)
def test_with_a_budget_an_early_update_waits_for_a_copy_and_not_for_the_disk(way):
    made = Plan(subgroup_size=GIGA, ways=(way,) * 3, staging_slots=2 * (way.placement == "device"))
    slow = machine(storage_write_bytes_per_s=1e9)  # 36 s for the checkpoint, beside iterations of 5 s at most
    found = cost(workload(3), made, slow, copy_budget_bytes=ALL)
    assert found.waited_bytes == 0
    assert found.copied_bytes > 18e9
    assert 0 < found.stall_s < found.copied_bytes / 8e9 + 0.1


def test_a_synchronous_checkpoint_stalls_for_all_of_it():
    found = cost(workload(), HOST, machine(), mode="sync")
    assert found.stall_s == pytest.approx(4, rel=1e-3)
    assert found.interference_s == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("mode", ["lazy", "sync"])
@pytest.mark.parametrize(("placements", "streamed"), [("host", 24), ("mixed", 12), ("stored", 0)])
def test_a_checkpoint_writes_no_byte_of_what_is_stored(mode, placements, streamed):
    made = plan(*{"mixed": ["stored", "host"]}.get(placements, [placements] * 2))
    have = machine(storage_read_bytes_per_s=Quantity.exact(6e9))
    simulation = CheckpointSimulation(workload(), made, have, save_s=0.0)
    saving = CheckpointPlan(mode=mode, copy_budget_bytes=0)
    persists = [op for op in simulation.schedule(saving).ops if op.kind == OpKind.PERSIST]
    assert sum(op.work for op in persists) == pytest.approx(streamed * GIGA)
    assert persists  # at least the commit
    found = simulation.cost(saving)
    assert streamed_bytes(workload(), made) == streamed * GIGA
    assert found.copied_bytes == 0
    if mode == "sync":
        assert found.stall_s == pytest.approx(streamed / 6, abs=0.1)


def test_a_save_waits_for_updates_that_overlap_forward():
    # Writing takes no time, so only the overlap of this step's updates is lost.
    lost = cost(
        workload(layers=2),
        plan("host", "host", overlap_forward=True),
        machine(storage_write_bytes_per_s=9e13),
        copy_budget_bytes=0,
    )
    assert lost.stall_s > 0.4
    assert lost.waited_bytes == 0


def test_storage_traffic_slows_the_updates_that_dram_binds():
    # 26 bytes of the update's 30 bytes per parameter and 2 x 6 GB/s of writing exceed 30 GB/s.
    busy = machine(dram_bytes_per_s=30e9)
    slow = cost(workload(), HOST, busy, copy_budget_bytes=ALL)
    calm = cost(workload(), HOST, machine(), copy_budget_bytes=ALL)
    assert slow.interference_s > calm.interference_s + 0.1
    assert slow.slowdown > 0.01


def test_a_cap_makes_it_longer_and_an_update_in_need_ignores_it():
    free = cost(workload(), HOST, machine(), copy_budget_bytes=0)
    capped = cost(workload(), HOST, machine(), copy_budget_bytes=0, write_bytes_per_s=3e9)
    assert capped.persist_s > free.persist_s
    # 6 GB in 2 s, 6 GB urgently in 1 s, 3 GB beside the first update, and 9 GB urgently in 1.5 s.
    assert capped.persist_s == pytest.approx(5.5, rel=0.02)


def test_resident_state_is_copied_to_the_host_in_forward_and_backward_only():
    simulation = CheckpointSimulation(
        workload(4, layers=4),
        plan("resident", "host", "resident", "device"),
        machine(storage_write_bytes_per_s=60e9),
        save_s=0.0,
    )
    schedule = simulation.schedule(CheckpointPlan(copy_budget_bytes=0))
    spans = simulate(schedule, simulation.machine).spans
    passes = [s for s in spans if s.iteration == LEAD_IN and s.kind in (OpKind.FORWARD, OpKind.BACKWARD)]
    copies = [s for s in spans if s.kind == OpKind.SNAPSHOT and s.lane == Lane.D2H]
    assert len(copies) > 2
    for copy in copies:
        assert passes[0].start_s <= copy.start_s
        assert copy.end_s <= passes[-1].end_s + 1e-9
    # Subgroup 2 is written during the second and third pass, and is not copied to the host before.
    assert copies[1].start_s >= passes[1].start_s - 1e-9
    assert copies[2].start_s >= passes[2].start_s - 1e-9
    moved = sum(op.work for op in schedule.of_kind(OpKind.SNAPSHOT) if op.lane == Lane.D2H)
    assert moved == pytest.approx(2 * 12 * GIGA)


def test_the_budget_counts_as_host_memory():
    simulation = CheckpointSimulation(workload(), HOST, machine())
    saving = CheckpointPlan(copy_budget_bytes=10 * BLOCK_BYTES, writers=3)
    peak = simulate(simulation.schedule(saving), simulation.machine).host_peak_bytes
    without = simulate(build_schedule(workload(), HOST), machine()).host_peak_bytes
    assert peak == without + (10 + 3 + READY_BLOCKS) * BLOCK_BYTES


def test_an_interval_adds_memory_and_no_ops_to_the_training_schedule():
    saving = CheckpointPlan(interval_steps=3)
    with_interval, without = HOST.model_copy(update={"checkpoint": saving}), build_schedule(workload(), HOST)
    made, sweep = build_schedule(workload(), with_interval), PlanSweep(workload(), machine())
    assert made.ops == without.ops
    more = made.held["host"]["staging"] - without.held["host"]["staging"]
    assert more == saving.reserved_bytes > 0
    assert sweep.result(with_interval).host_peak_bytes == sweep.result(HOST).host_peak_bytes + more
    assert sum(sweep.memory(with_interval)["host"].values()) == sum(sweep.memory(HOST)["host"].values()) + more


def test_a_save_waits_for_the_previous_checkpoint():
    cost = CheckpointCost(0.5, 0.5, 10.0)
    assert paid_at(9, 1.0, cost) == cost  # ends just in time
    assert paid_at(3, 1.0, cost).stall_s == pytest.approx(6.5)  # 3 + 1 s, and 6 of waiting


def test_saves_that_wait_for_each_other_take_what_the_closed_form_says():
    simulation = CheckpointSimulation(workload(), HOST, machine(), save_s=0.1)
    saving = CheckpointPlan(copy_budget_bytes=ALL, write_bytes_per_s=2e9)
    single = simulation.cost(saving)
    assert single.persist_s > simulation.iteration_s
    made = HOST.model_copy(update={"checkpoint": saving})
    loop = CheckpointedLoop(workload(), made, machine(), simulation.writing(saving), saves=range(1, 6), save_s=0.1)
    loop.run(7)
    period_s = simulate(loop.schedule(7), machine()).iteration_s
    spans = simulate(loop.schedule(7), machine()).spans
    saves = [s.end_s for s in spans if s.kind == OpKind.SNAPSHOT and s.lane == Lane.COMPUTE]
    assert saves[-1] - saves[-2] == pytest.approx(single.persist_s, rel=1e-3)
    paid = paid_at(1, simulation.iteration_s, single)
    assert simulation.iteration_s + paid.cost_s == pytest.approx(single.persist_s)
    assert period_s > simulation.iteration_s


PLACED = st.lists(st.sampled_from([*map(Way, ("host", "device", "resident")), *EARLY]), min_size=3, max_size=6)


@settings(max_examples=40, deadline=None)
@given(
    placed=PLACED,
    overlap=st.booleans(),
    storage=st.floats(1e9, 1e11),
    dram=st.floats(5e10, 1e12),
    link=st.floats(1e10, 1e12),
    budget=st.sampled_from([0, 2**30, 2**34, ALL]),
    cap=st.sampled_from([None, 2e9, 2e10]),
    micro=st.integers(1, 2),
    mode=st.sampled_from(["lazy", "lazy", "sync"]),
)
def test_both_engines_agree_and_no_update_overwrites_what_is_still_read(
    placed, overlap, storage, dram, link, budget, cap, micro, mode
):
    have = machine(storage_write_bytes_per_s=storage, dram_bytes_per_s=dram, h2d_bytes_per_s=link, d2h_bytes_per_s=link)
    work = workload(
        len(placed),
        layers=2 if len(placed) % 2 == 0 else 1,
        gradient_accumulation_steps=micro,
        model_checkpoint_bytes=10**8,
    )
    made = Plan(
        subgroup_size=GIGA,
        ways=tuple(placed),
        staging_slots=min(2, sum(way.placement == "device" for way in placed)),
        overlap_forward=overlap,
    )
    simulation = CheckpointSimulation(work, made, have)
    saving = CheckpointPlan(copy_budget_bytes=budget, write_bytes_per_s=cap, mode=mode)
    schedule = simulation.schedule(saving)
    fast, slow = simulate_fast(schedule, have), simulate(schedule, have)
    assert len(slow.spans) == len(schedule.ops)  # no op waits forever
    assert fast.makespan_s == pytest.approx(slow.makespan_s, rel=1e-9)
    assert fast.iteration_s == pytest.approx(slow.iteration_s, rel=1e-9)
    assert fast.host_peak_bytes == slow.host_peak_bytes
    persisted = [op.work for op in schedule.of_kind(OpKind.PERSIST)]
    assert sum(persisted) == pytest.approx(work.checkpoint_bytes, rel=1e-6)
    for subgroup, way in enumerate(placed):
        _not_torn(schedule, fast, subgroup, way)


def _not_torn(schedule, fast, subgroup, way):
    kind = {"host": OpKind.UPDATE_HOST, "device": OpKind.STATE_D2H, "resident": OpKind.UPDATE_DEVICE}[way.placement]
    if way == EARLY[0]:
        kind = OpKind.UPDATE_HOST_EARLY
    overwrites = next(op for op in schedule.of_kind(kind, LEAD_IN) if op.subgroup == subgroup)
    copies = [op for op in schedule.of_kind(OpKind.SNAPSHOT) if op.subgroup == subgroup]
    by_copy = {op.id for op in copies}
    for op in schedule.of_kind(OpKind.PERSIST):
        if op.subgroup == subgroup and not by_copy & set(op.after):
            assert fast.end_s[op.id] <= fast.start_s[overwrites.id] + 1e-9
    for copy in copies:
        assert fast.end_s[copy.id] <= fast.start_s[overwrites.id] + 1e-9


def test_a_save_of_pieces_waits_for_what_is_not_in_deepspeeds_tensors():
    # The save copies all state that stays in GPU memory to DeepSpeed's tensors on the host. Early updates write
    # alternately to DeepSpeed's tensors and to spare buffers, so on average half of their state is in spare buffers.
    # The save copies this half to DeepSpeed's tensors too.
    have = machine(d2h_bytes_per_s=4e9)
    made = Plan(subgroup_size=GIGA, ways=(Way("resident"), Way("host", early=True), Way("host")), staging_slots=0)
    whole, pieces = workload(3), workload(3, state_stays=True)
    assert gathered_seconds(whole, made, have) == 0
    assert gathered_seconds(pieces, made, have) == 12 / 4 + 12 / 2 / 8
    simulated = [CheckpointSimulation(work, made, have).save_s for work in (pieces, whole)]
    assert simulated[0] - simulated[1] == pytest.approx(3.75)


def test_a_save_takes_its_time_by_the_tensor():
    plain = node()
    work = toy((10, 10), parameters=((4, 3, 3, 10),))
    assert save_seconds(work, plain) == SAVE_S
    told = node(save_s_per_tensor=Quantity.exact(0.5))
    assert save_seconds(work, told) == 0.5 * (4 + 3 * 2)
    assert save_seconds(toy((10, 10)), told) == SAVE_S  # there is no information about the tensors
