"""Tests of the study that trains with optimizer state on a drive: its training runs, the share of the state that is on
the drive, and how the study compares measured times with lower bounds.
"""

import pytest
from ebbtide.profiler.rates.storage import duplex_factor
from ebbtide.simulator.machine import StorageRates
from ebbtide.simulator.plan import Plan
from ebbtide.simulator.quantity import Quantity

from studies.storage_tier.__main__ import DURABLE, _plan, _together, run
from studies.storage_tier.disk_bound import disk_figures, floor_parts_s, mixed_floor_s

pytestmark = pytest.mark.usefixtures("only_rank")


def test_a_share_of_the_state_is_stored_and_the_bits_are_those_of_stock_in_memory(tmp_path):
    stock = run("stock in memory", "tiny", 2, tmp_path)
    assert list(tmp_path.iterdir()) == []
    ours = run("ebbtide, half in memory", "tiny", 2, tmp_path)
    assert list(tmp_path.iterdir()) != []
    assert (ours["state"], ours["losses"]) == (stock["state"], stock["losses"])
    assert len(ours["losses"]) == 4
    assert ours["updates_s"] > 0
    assert ours["host_peak_bytes"] > 2**20
    assert ours["update_s"] > 0
    assert ours["resume_identical"] is True
    assert ours["extra_state_bytes_per_checkpoint"] == 0
    assert 0 < ours["resume_read_bytes"] < 12 * ours["params"]
    assert abs(ours["host_bytes_predicted_over_measured"] - 1) < 0.03
    assert set(DURABLE) <= set(ours)


@pytest.mark.parametrize(("share", "hosted"), [(0.0, 0), (0.5, 6), (0.9, 11)])
def test_shares_are_even(share, hosted, tmp_path, monkeypatch):
    monkeypatch.setattr("ebbtide.runtime.zero.flat_partitions.subgroups_of", lambda *_: [1] * 12)

    class Optimizer:
        sub_group_size = 1

    class Engine:
        optimizer = Optimizer()

    plan = _plan(Engine(), share, tmp_path)
    assert plan.count("host") == hosted
    assert plan.count("stored") == 12 - hosted


def test_a_plan_that_the_tuner_has_made_is_trained(tmp_path):
    share = run("ebbtide, half in memory", "tiny", 1, tmp_path / "a")
    made = Plan(
        subgroup_size=20_000,
        placement=Plan.runs(["stored"] + ["host"] * 4),
        staging_slots=0,
        host_slots=1,
        storage_dir="elsewhere",
    )
    few = run("ebbtide, within stock's memory", "tiny", 1, tmp_path / "b", made.model_dump())
    assert few["state"] == share["state"]
    assert 0 < few["write_bytes"] < share["write_bytes"]


def test_the_floor_is_what_was_measured_of_both_at_once():
    alone = {"read_bytes_per_s": Quantity.exact(1e9), "write_bytes_per_s": Quantity.exact(4e9)}
    disk = StorageRates(**alone, duplex_factor=Quantity.exact(duplex_factor(5.0, [1.0], [4.0])))
    assert floor_parts_s(disk, 4e9) == {"read_s": 4.0, "write_s": 1.0, "both_s": 5.0}
    assert mixed_floor_s(disk, 4e9) == pytest.approx(8 / 2.5)


def test_runs_of_one_variant_are_told_by_their_medians_and_must_have_the_same_bits():
    first = {"iteration_s": 3.0, "losses": [1.0], "state": "a", "host_peak_bytes": 5, "resume_identical": True}
    second = {**first, "iteration_s": 1.0, "host_peak_bytes": 7, "resume_identical": False}
    row = _together([first, second])
    assert (row["iteration_s"], row["iterations_s"]) == (2.0, [3.0, 1.0])
    assert (row["host_peak_bytes"], row["resume_identical"]) == (7, False)
    with pytest.raises(RuntimeError, match="same state"):
        _together([first, {**first, "state": "b"}])


def test_each_run_is_judged_by_the_disk_that_it_had():
    # In the main case, the drive becomes three times slower over three runs, and the updates of each run take 1.1 times
    # their lower bound. The reported quotient for updates must be 1.1.
    def disk(rate):
        rates = {"read_bytes_per_s": Quantity.exact(rate), "write_bytes_per_s": Quantity.exact(rate)}
        return StorageRates(**rates, duplex_factor=Quantity.exact(1.0))

    ours = {
        "params": 1e9,
        "updates_s": 0.1,
        "update_s": 26.4,
        "iteration_s": 27.6,
        "updates_of_runs_s": [13.2, 26.4, 39.6],
        "iterations_s": [14.4, 27.6, 40.8],
        "write_bytes": 12e9,
    }
    told = disk_figures([disk(1e9), disk(0.5e9), disk(1e9 / 3)], ours, passes_s=1.0)
    assert told["disk_floors_s"] == pytest.approx([12, 24, 36])
    assert told["update_over_floor"] == pytest.approx(1.1)
    assert told["iteration_over_floor"] == pytest.approx(27.6 / 24)
    slow = disk_figures([disk(0.5e9)] * 3, ours, passes_s=1.0)
    assert slow["update_over_floor"] == pytest.approx(1.1)
    first = disk_figures([disk(1e9), disk(1e9), disk(0.5e9)], ours, passes_s=1.0)
    assert first["update_over_floor"] == pytest.approx(39.6 / 24)
