"""Tests of the predicted cost of a checkpoint.

In small cases it equals the time worked out by hand. For the jobs in recorded_checkpoint_costs.json, the interval that
follows from it is as good as the one from an earlier simulation of each write.
"""

import json
from pathlib import Path

import pytest
from ebbtide.simulator import (
    CheckpointPlan,
    Layer,
    Plan,
    Quantity,
    Workload,
    build_schedule,
    preset,
    workload_from_model,
)
from ebbtide.simulator.analysis.goodput import (
    SAVE_S,
    CheckpointCost,
    CheckpointPrice,
    Failures,
    best_interval_steps,
    expected_goodput,
    gathered_seconds,
    save_seconds,
    streamed_bytes,
)
from ebbtide.simulator.analysis.many_plans import PlanSweep
from ebbtide.simulator.plan import Way

from studies.checkpoint_interval.kills import paid_at
from tests.machines import GIB, node
from tests.machines import workload as toy

GIGA = 10**9
ALL = 2**40  # a budget that is large enough for everything


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
    return CheckpointPrice(work, made, have, save_s=0.0).cost(CheckpointPlan(**saving))


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


def test_a_synchronous_checkpoint_stalls_for_all_of_it():
    found = cost(workload(), HOST, machine(), mode="sync")
    assert found.stall_s == pytest.approx(4, rel=1e-3)
    assert found.interference_s == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("mode", ["lazy", "sync"])
@pytest.mark.parametrize(("placements", "streamed"), [("host", 24), ("mixed", 12), ("stored", 0)])
def test_a_checkpoint_writes_no_byte_of_what_is_stored(mode, placements, streamed):
    made = plan(*{"mixed": ["stored", "host"]}.get(placements, [placements] * 2))
    have = machine(storage_read_bytes_per_s=Quantity.exact(6e9))
    simulation = CheckpointPrice(workload(), made, have, save_s=0.0)
    saving = CheckpointPlan(mode=mode, copy_budget_bytes=0)
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


def test_a_cap_makes_it_longer_and_an_update_in_need_ignores_it():
    free = cost(workload(), HOST, machine(), copy_budget_bytes=0)
    capped = cost(workload(), HOST, machine(), copy_budget_bytes=0, write_bytes_per_s=3e9)
    assert capped.persist_s > free.persist_s
    # 9 GB in 3 s, and 15 GB urgently in 2.5 s.
    assert capped.persist_s == pytest.approx(5.5, rel=0.02)


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


def test_a_save_of_pieces_waits_for_what_is_not_in_deepspeeds_tensors():
    # The save copies all state that stays in GPU memory to DeepSpeed's tensors on the host. Early updates write
    # alternately to DeepSpeed's tensors and to spare buffers, so on average half of their state is in spare buffers.
    # The save copies this half to DeepSpeed's tensors too.
    have = machine(d2h_bytes_per_s=4e9)
    made = Plan(subgroup_size=GIGA, ways=(Way("resident"), Way("host", early=True), Way("host")), staging_slots=0)
    whole, pieces = workload(3), workload(3, state_stays=True)
    assert gathered_seconds(whole, made, have) == 0
    assert gathered_seconds(pieces, made, have) == 12 / 4 + 12 / 2 / 8
    simulated = [CheckpointPrice(work, made, have).save_s for work in (pieces, whole)]
    assert simulated[0] - simulated[1] == pytest.approx(3.75)


def test_a_save_takes_its_time_by_the_tensor():
    plain = node()
    work = toy((10, 10), parameters=((4, 3, 3, 10),))
    assert save_seconds(work, plain) == SAVE_S
    told = node(save_s_per_tensor=Quantity.exact(0.5))
    assert save_seconds(work, told) == 0.5 * (4 + 3 * 2)
    assert save_seconds(toy((10, 10)), told) == SAVE_S  # there is no information about the tensors


JOBS = json.loads(Path(__file__).with_name("recorded_checkpoint_costs.json").read_text())


@pytest.mark.parametrize("row", JOBS, ids=lambda row: f"{row['job'][0]} {row['early']} {row['gib']}")
def test_its_interval_is_as_good_as_that_of_a_simulation_of_each_write(row):
    model, name, ranks, sequence, accumulation = row["job"]
    have = preset(name)
    work = workload_from_model(
        model, have, sequence=sequence, data_parallel=ranks, gradient_accumulation_steps=accumulation
    ).recut(10**8)
    price = CheckpointPrice(work, even(work, row["early"]), have)
    told = price.cost(CheckpointPlan(copy_budget_bytes=int(row["gib"] * GIB)))
    true = CheckpointCost(row["stall_s"], row["interference_s"], row["persist_s"])
    for mtbf_s in (3600.0, 14400.0, 86400.0):
        failures, step_s = Failures(mtbf_s, 60.0), row["iteration_s"]
        steps = max(best_interval_steps(step_s, told, failures), true.fewest_steps(step_s))
        best = best_interval_steps(step_s, true, failures)
        lost = expected_goodput(step_s, true, failures, best) - expected_goodput(step_s, true, failures, steps)
        assert lost < 5e-4


def even(work, early):
    """Return a plan with an eighth of the subgroups on the GPU, a quarter staged, and the others on the host."""
    count = len(work.subgroups)
    ways = [
        Way("resident")
        if i < count // 8
        else Way("device")
        if i % 4 == 3
        else Way("host", early=early and i > count // 2)
        for i in range(count)
    ]
    return Plan(
        subgroup_size=work.subgroup_size, subgroups=work.subgroups, ways=tuple(ways), staging_slots=2, prefetch=2
    )
