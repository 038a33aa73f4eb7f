"""What several ranks leave each other: measured shares, or equal ones."""

import pytest

from simulator.engines.reference import capacities
from simulator.machine import Machine
from simulator.quantity import Quantity
from tests.machines import node


def machine(**changes):
    rates = {
        "h2d_bytes_per_s": 20e9, "d2h_bytes_per_s": 20e9, "dram_bytes_per_s": 80e9,
        "storage_write_bytes_per_s": 8e9, "host_adam_params_per_s": 2e9,
        "stock_host_adam_params_per_s": 2e9, "device_adam_params_per_s": 2e9,
    }  # fmt: skip
    return node(device_memory_bytes=2**34, **rates, **changes)


SHARES = {4: {"h2d": Quantity.exact(0.6), "dram": Quantity.exact(0.3)}}


def test_unmeasured_ranks_divide_memory_and_storage_and_keep_their_links():
    have = capacities(machine(), 4)
    assert (have["dram"], have["storage"], have["h2d"]) == (20e9, 2e9, 20e9)


def test_cores_are_divided_only_where_they_compute_the_model_too():
    """An update is bound by DRAM: its share of that is counted, not its cores besides."""
    assert capacities(machine(), 4)["cores"] == 16
    assert capacities(machine(device_shares_host_cores=True), 4)["cores"] == 4


def test_measured_shares_replace_equal_ones_for_that_number_of_ranks():
    have = capacities(machine(rank_shares=SHARES), 4)
    assert have["h2d"] == pytest.approx(12e9)
    assert have["dram"] == pytest.approx(24e9)
    assert (have["d2h"], have["storage"]) == (20e9, 2e9)
    assert capacities(machine(rank_shares=SHARES), 2)["dram"] == 40e9


def test_what_ifs_keep_the_shares():
    faster = machine(rank_shares=SHARES).with_rates(h2d_bytes_per_s=40e9)
    assert capacities(faster, 4)["h2d"] == pytest.approx(24e9)


def test_shares_survive_a_file_and_bad_ones_are_refused(tmp_path):
    machine(rank_shares=SHARES).save(tmp_path / "m.json")
    assert Machine.load(tmp_path / "m.json").rank_share("h2d", 4) == 0.6
    with pytest.raises(ValueError, match="by >= 1 ranks, but got"):
        machine(rank_shares={0: {"h2d": Quantity.exact(1.0)}})
    with pytest.raises(ValueError, match="rank_shares"):
        machine(rank_shares={2: {"pcie": Quantity.exact(1.0)}})
