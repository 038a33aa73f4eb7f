"""Tests of how the simulated ranks of a node share links, DRAM and storage: by measured shares, or equally."""

from itertools import pairwise

import pytest
from ebbtide.simulator import preset
from ebbtide.simulator.engines.reference import capacities, rank_share
from ebbtide.simulator.machine import Machine
from ebbtide.simulator.quantity import Quantity
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.machines import node


def machine(**changes):
    rates = {
        "h2d_bytes_per_s": 20e9,
        "d2h_bytes_per_s": 20e9,
        "dram_bytes_per_s": 80e9,
        "storage_write_bytes_per_s": 8e9,
        "host_adam_params_per_s": 2e9,
        "stock_host_adam_params_per_s": 2e9,
        "device_adam_params_per_s": 2e9,
    }
    return node(device_memory_bytes=2**34, **rates, **changes)


SHARES = {4: {"h2d": Quantity.exact(0.6), "dram": Quantity.exact(0.2)}}


def test_unmeasured_ranks_divide_memory_and_storage_and_keep_their_links():
    have = capacities(machine(), 4)
    assert (have["dram"], have["storage"], have["h2d"]) == (20e9, 2e9, 20e9)


def test_cores_are_divided_only_where_they_compute_the_model_too():
    # The simulator divides this bandwidth among the ranks. If it also divided the cores, the other ranks would count
    # twice.
    assert capacities(machine(), 4)["cores"] == 16
    assert capacities(machine(device_shares_host_cores=True), 4)["cores"] == 4


def test_measured_shares_replace_equal_ones_for_that_number_of_ranks():
    have = capacities(machine(rank_shares=SHARES), 4)
    assert have["h2d"] == pytest.approx(12e9)
    assert have["dram"] == pytest.approx(16e9)
    assert (have["d2h"], have["storage"]) == (20e9, 2e9)


def test_between_known_numbers_of_ranks_their_total_changes_evenly():
    # For DRAM, two ranks reach 0.6 of the bandwidth together, and four ranks reach 0.8. Three ranks reach 0.7, because
    # the bandwidth is interpolated between measured numbers of ranks. Eight ranks reach 0.8, because the bandwidth
    # stays constant above the largest measured number. For links between host and GPU, the bandwidth keeps growing
    # above the largest measured number. Each further rank adds as much bandwidth as each rank added between the two
    # largest measured numbers.
    shares = {2: {"dram": Quantity.exact(0.3)}, 4: {"dram": Quantity.exact(0.2)}}
    node = machine(rank_shares=shares)
    totals = [n * rank_share(node, "dram", n) for n in (1, 2, 3, 4, 8)]
    assert totals == pytest.approx([1.0, 0.6, 0.7, 0.8, 0.8])
    links = machine(rank_shares=SHARES)  # four ranks together get 2.4 links. Each of the next three adds 0.467
    assert [n * rank_share(links, "h2d", n) for n in (1, 2, 4, 7)] == pytest.approx([1.0, 1 + 1.4 / 3, 2.4, 3.8])
    assert rank_share(links, "d2h", 7) == 1.0


KNOWN = st.dictionaries(st.integers(1, 17), st.floats(0.01, 1.5), max_size=5)


@settings(max_examples=200, deadline=None)
@given(KNOWN, st.sampled_from(["h2d", "d2h", "link", "dram", "storage"]))
def test_no_share_grows_with_the_ranks_and_no_total_exceeds_the_node(known, name):
    """Check the simulated bandwidth of each rank if several ranks of a node run at once, for random measured bandwidths
    in the machine description.

    - The bandwidth of one rank never grows with the number of ranks.
    - The total bandwidth of all ranks never exceeds the DRAM or storage bandwidth of the node. The total bandwidth of
      copies never exceeds the bandwidth of one link times the number of ranks.
    - Between measured numbers of ranks, the total bandwidth is interpolated linearly.
    """
    shares = {ranks: {name: Quantity.exact(share)} for ranks, share in known.items()}
    node = machine(rank_shares=shares)
    each = [rank_share(node, name, ranks) for ranks in range(1, 40)]
    assert each[0] == 1.0
    assert all(b <= a * (1 + 1e-12) for a, b in pairwise(each))
    whole = (1.0 if name in ("dram", "storage") else ranks for ranks in range(1, 40))
    totals = [ranks * share for ranks, share in enumerate(each, 1)]
    assert all(t <= most * (1 + 1e-12) for t, most in zip(totals, whole, strict=True))
    corners = {n for n in known if n > 1} | {1}
    for n in set(range(2, 39)) - corners:  # linear between the known values
        assert totals[n] - totals[n - 1] == pytest.approx(totals[n - 1] - totals[n - 2])


@pytest.mark.parametrize("name", ["a100-node", "h100-node", "h200"])
def test_presets_give_no_rank_more_because_there_are_more(name):
    each = [rank_share(preset(name), "dram", n) for n in range(1, 17)]
    assert each == sorted(each, reverse=True)


def test_what_ifs_keep_the_shares():
    faster = machine(rank_shares=SHARES).with_rates(h2d_bytes_per_s=40e9)
    assert capacities(faster, 4)["h2d"] == pytest.approx(24e9)


def test_shares_survive_a_file_and_bad_ones_are_refused(tmp_path):
    machine(rank_shares=SHARES).save(tmp_path / "m.json")
    assert rank_share(Machine.load(tmp_path / "m.json"), "h2d", 4) == 0.6
    with pytest.raises(ValueError, match="numbers of ranks >= 1 as keys, but got"):
        machine(rank_shares={0: {"h2d": Quantity.exact(1.0)}})
    with pytest.raises(ValueError, match="rank_shares"):
        machine(rank_shares={2: {"pcie": Quantity.exact(1.0)}})
