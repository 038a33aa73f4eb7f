"""Tests of the search for a plan's checkpoint settings: interval, and host memory for copies of state being saved."""

import ebbtide.tuner
import pytest
from click.testing import CliRunner
from ebbtide.simulator import CheckpointPlan, Plan
from ebbtide.simulator.analysis.goodput import CheckpointPrice, Failures
from ebbtide.simulator.limits import UNKNOWN_MARGIN
from ebbtide.simulator.plan import BLOCK_BYTES, READY_BLOCKS
from ebbtide.tuner.cli import main
from ebbtide.tuner.placements.checkpointing import (
    BUDGET_SHARES,
    SAME,
    best_checkpointing,
    blocks,
    planned_failures,
    rated,
    rules_of_thumb,
)
from ebbtide.tuner.placements.planning import predicted_anew
from ebbtide.tuner.quantities import rate_bytes_per_s
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tuner.test_search import GIB, machine, workload


def simulation(have=None, work=None, placed=("host",) * 6):
    work = work or workload(len(placed), size=10**8)
    made = Plan(
        subgroup_size=work.subgroup_size, placement=Plan.runs(placed), staging_slots=min(2, placed.count("device"))
    )
    return CheckpointPrice(work, made, have or machine())


TWO_WRITERS = (2 + READY_BLOCKS) * BLOCK_BYTES  # the least budget


@settings(max_examples=6, deadline=None)
@given(storage=st.floats(2e8, 2e10), dram=st.floats(4e10, 4e11), mtbf_s=st.floats(300, 1e5), spare_gib=st.floats(0, 12))
def test_no_budget_is_better_than_the_chosen_one(storage, dram, mtbf_s, spare_gib):
    have = machine(storage_write_bytes_per_s=storage, dram_bytes_per_s=dram)
    simulated, failures = simulation(have), Failures(mtbf_s, 60.0)
    spare = int(spare_gib * GIB)
    found = best_checkpointing(simulated, failures, spare)
    assert found.cost.reserved_bytes <= max(spare, TWO_WRITERS)
    size = simulated.workload.checkpoint_bytes
    budgets = (min(blocks(size * budget), max(0, spare - TWO_WRITERS)) for budget in BUDGET_SHARES)
    best = max(rated(simulated, CheckpointPlan(copy_budget_bytes=n), failures).goodput for n in budgets)
    assert found.goodput >= best * (1 - SAME)


def test_memory_that_brings_nothing_is_not_taken():
    quick = machine(storage_write_bytes_per_s=2e12)
    found = best_checkpointing(simulation(quick), Failures(3600.0, 60.0), 64 * GIB)
    assert found.saving.copy_budget_bytes == 0  # everything is on disk before the first update


def test_a_plan_s_stall_is_the_predicted_one_and_its_memory_counts_the_budget():
    work, have = workload(4), machine()
    found = ebbtide.tuner.plan(work, have, mtbf_s=3600.0)
    simulated = CheckpointPrice(work, found, have)
    cost = simulated.cost(found.checkpoint)
    assert found.prediction.stall_s == pytest.approx(cost.stall_s, rel=1e-9)
    without = ebbtide.tuner.plan(work, have)
    reserved = found.checkpoint.reserved_bytes
    assert found.prediction.host_peak_bytes == without.prediction.host_peak_bytes + reserved
    assert without.checkpoint.interval_steps == 0
    assert without.prediction.stall_s == 0
    assert any("expected goodput" in reason for reason in found.reasons)


def test_the_budget_stays_within_the_host_memory_that_is_left():
    work, have = workload(4), machine()
    needed = ebbtide.tuner.plan(work, have).prediction.host_peak_bytes
    limit = int((needed + 64 * 2**20) / (1 - UNKNOWN_MARGIN))
    found = ebbtide.tuner.plan(work, have, mtbf_s=3600.0, host_memory_bytes=limit)
    assert found.prediction.host_peak_bytes <= limit * (1 - UNKNOWN_MARGIN)


def test_rules_of_thumb_are_never_below_what_a_commit_needs():
    slow = simulation(machine(storage_write_bytes_per_s=1e8))
    cost = slow.cost(CheckpointPlan(copy_budget_bytes=2**40))
    rules = rules_of_thumb(slow.iteration_s, cost, Failures(10.0, 0.0))
    for steps in rules.values():
        assert steps * slow.iteration_s + cost.cost_s >= cost.persist_s * (1 - 1e-9)


@pytest.mark.parametrize("times", [(0.0, 1.0), (-1.0, 1.0), (float("nan"), 1.0), (60.0, -1.0)])
def test_failures_that_cannot_be_are_refused(times):
    with pytest.raises(ValueError, match="mtbf_s must be > 0"):
        planned_failures(*times)


def test_the_command_takes_the_storage_s_rate(tmp_path):
    machine().save(tmp_path / "machine.json")
    workload(6).save(tmp_path / "workload.json")
    inputs = ["--machine", f"{tmp_path}/machine.json", "--workload", f"{tmp_path}/workload.json"]
    steps = {}
    for storage in ("200MB/s", "20GB/s"):
        out = tmp_path / "plan.json"
        arguments = ["plan", *inputs, "--mtbf", "4h", "--checkpoint-rate", storage, "-o", str(out)]
        told = CliRunner().invoke(main, arguments)
        assert told.exit_code == 0, told.output
        assert "rules of thumb for this checkpoint cost: Young every" in told.output
        steps[storage] = Plan.load(out).checkpoint.interval_steps
    assert steps["200MB/s"] > steps["20GB/s"] > 0
    for bad in ("0", "-1GB/s", "fast", "1e30GB/s"):
        told = CliRunner().invoke(main, ["plan", *inputs, "--checkpoint-rate", bad])
        assert told.exit_code == 2, bad
        assert "Traceback" not in told.output


def test_rates_as_people_write_them():
    assert rate_bytes_per_s("2GB/s") == 2e9
    assert rate_bytes_per_s(" 500 MB ") == 5e8
    with pytest.raises(ValueError, match="a rate such as"):
        rate_bytes_per_s("2GB/h")


def test_a_plan_that_is_predicted_again_has_the_same_stall_and_memory():
    slow = machine(storage_write_bytes_per_s=1e8)
    made = ebbtide.tuner.plan(workload(6), slow, mtbf_s=36_000.0, effort=0.05)
    told, again = made.prediction, predicted_anew(made, workload(6), slow).prediction
    assert told.stall_s > 0
    assert (again.stall_s, again.host_peak_bytes) == (pytest.approx(told.stall_s, rel=0.01), told.host_peak_bytes)
