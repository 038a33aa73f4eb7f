"""Tests of the machine presets: each value has a source, and no rate exceeds what the hardware can do."""

import dataclasses
import math

import pytest
from ebbtide.simulator import Machine, preset, preset_names
from ebbtide.simulator.engines.reference import rank_share
from ebbtide.simulator.estimates.collectives import Links
from ebbtide.simulator.estimates.presets import FUSED_UPDATE_BYTES, SHEETS, STOCK_UPDATE_BYTES

from tests.simulator.hardware_limits import offences, sheet_offences

RATES = (
    "h2d_bytes_per_s",
    "d2h_bytes_per_s",
    "pageable_h2d_bytes_per_s",
    "pageable_d2h_bytes_per_s",
    "dram_bytes_per_s",
    "host_adam_params_per_s",
    "stock_host_adam_params_per_s",
    "device_adam_params_per_s",
    "device_flops_per_s",
    "attention_flops_per_s",
    "device_memory_bytes_per_s",
    "storage_write_bytes_per_s",
    "layer_issue_s",
)


@pytest.fixture(params=preset_names())
def named(request):
    return preset(request.param), SHEETS[request.param]


def test_every_value_tells_its_source_and_has_a_spread(named):
    machine, _ = named
    assert Machine.model_validate_json(machine.model_dump_json()) == machine
    shares = [q for parts in machine.rank_shares.values() for q in parts.values()]
    values = [getattr(machine, name) for name in RATES]
    for quantity in (*values, *machine.other_rates.values(), *shares):
        assert quantity.source in ("published", "datasheet", "assumed")
        assert quantity.detail
        assert quantity.q1 < quantity.q3, "an estimate has a spread"


def test_no_rate_exceeds_its_physical_limit(named):
    machine, sheet = named
    assert offences(machine) == []
    assert sheet_offences(sheet, machine.name) == []
    assert machine.rate("pageable_d2h_bytes_per_s") <= machine.rate("d2h_bytes_per_s")
    assert machine.rate("h2d_bytes_per_s") <= machine.rate("dram_bytes_per_s")


SLIPS = [  # a wrong digit or unit in one preset after the other
    ("h200", {"hbm_bytes_per_s": 4.8e13}, "device_memory_bytes_per_s must lie in"),
    ("h200", {"flops": 9.89e15}, "device_flops_per_s must lie in"),
    ("h200", {"dram_bytes_per_s": 6.1e12}, "dram_bytes_per_s must lie in"),
    ("h200", {"host_gib": 204800}, "host_memory_bytes must lie in"),
    ("h200", {"storage": (5e12, "assumed", "x")}, "storage_write_bytes_per_s must lie in"),
    ("h200", {"network": (4e13, "assumed", "x")}, "network_bytes_per_s must lie in"),
    ("h200", {"cores": 1120}, "cpu_cores must lie in"),
    ("h100-node", {"nvlink": (4.5e12, "x")}, "nvlink_bytes_per_s must lie in"),
    ("h100-node", {"nvlink_pair": (1.5e12, "x")}, "nvlink_pair_bytes_per_s must lie in"),
    ("h100-node", {"gpus": 8}, "gpus_per_node must lie in"),
    ("rtx4090", {"link": (80e9, "assumed", "x")}, "h2d_bytes_per_s must lie in"),
    ("rtx4090", {"link_raw_bytes_per_s": 315e9}, "link_raw_bytes_per_s must be"),
    ("gh200", {"device_gib": 780.0}, "device_memory_bytes must lie in"),
    ("gh200", {"device_gib": 9.45}, "device_memory_bytes must lie in"),
    ("a100-node", {"flops": 624e12}, "flops must be"),  # with sparsity
    ("a100-node", {"dram_bytes_per_s": 20.48e9}, "dram_bytes_per_s must lie in"),
]


@pytest.mark.parametrize(("name", "slip", "message"), SLIPS)
def test_a_slip_in_a_sheet_is_seen(monkeypatch, name, slip, message):
    wrong = dataclasses.replace(SHEETS[name], **slip)
    monkeypatch.setitem(SHEETS, name, wrong)
    told = offences(preset(name)) + sheet_offences(wrong, name)
    assert any(one.startswith(message) for one in told), told


def test_no_update_draws_more_than_one_numa_node_or_a_ranks_share(named):
    machine, sheet = named
    one_node = machine.rate("dram_bytes_per_s") / sheet.numa_nodes
    for name, moved in (
        ("stock_host_adam_params_per_s", STOCK_UPDATE_BYTES),
        ("host_adam_params_per_s", FUSED_UPDATE_BYTES),
    ):
        assert machine.rate(name) * moved <= one_node * (1 + 1e-9)
    for ranks, parts in machine.rank_shares.items():
        if "dram" in parts:
            assert parts["dram"].q3 * ranks <= 1 + 1e-9


def test_published_updates_are_what_four_ranks_reach():
    # The published rate includes the copy of new parameters to the GPU.
    machine = preset("h100-node")
    drawn = machine.rate("dram_bytes_per_s") * rank_share(machine, "dram", 4)
    passes = min(machine.rate("stock_host_adam_params_per_s"), drawn / STOCK_UPDATE_BYTES)
    copied = machine.rate("pageable_h2d_bytes_per_s") / 2
    assert 1 / (1 / passes + 1 / copied) == pytest.approx(1.7e9, rel=0.05)


def test_hosts_with_the_same_memory_update_alike():
    four, eight = preset("h100-node"), preset("h200")
    for name in ("dram_bytes_per_s", "stock_host_adam_params_per_s", "host_adam_params_per_s"):
        assert four.rate(name) == eight.rate(name)
    for ranks in range(1, 9):
        assert rank_share(four, "dram", ranks) == rank_share(eight, "dram", ranks)


def test_a_servers_update_by_one_rank_leaves_half_of_the_channels_and_a_desktops_none():
    # For the A100 node, 85 of 164 GB/s are published.
    for name in preset_names():
        machine, sheet = preset(name), SHEETS[name]
        node = machine.rate("dram_bytes_per_s") / sheet.numa_nodes
        share = machine.rate("stock_host_adam_params_per_s") * STOCK_UPDATE_BYTES / node
        desktop = sheet.dram_bytes_per_s < 100e9
        assert share == pytest.approx(1.0) if desktop or name.startswith("gh200") else 0.45 <= share < 0.9, name


def test_one_thread_on_two_sockets_is_slower_than_on_one():
    one, two = preset("rtx4090-x4"), preset("rtx4090-x8")
    assert one.rate("stock_host_adam_params_per_s") < two.rate("stock_host_adam_params_per_s")
    threads = [m.stock_host_adam_thread_params_per_s.median for m in (one, two)]
    assert threads[0] == pytest.approx(1.25 * threads[1])


def test_what_several_ranks_reached_is_not_published_of_one_alone():
    for name in preset_names():
        alone, known = preset(name).stock_host_adam_params_per_s, SHEETS[name].stock_update
        of_this_host = SHEETS[name].stock_source == "published"
        assert (alone.source == "published") == (1 in known and of_this_host)
        if known and 1 not in known:
            assert "of one rank alone nothing is published" in alone.detail
    assert preset("h200").rank_shares[4]["dram"].source == "assumed"
    assert preset("h100-node").rank_shares[4]["dram"].source == "published"


def test_memory_is_what_the_device_reports():
    assert preset("h200").device_memory_bytes / 2**30 == pytest.approx(139.8)
    assert preset("gh200").rate("dram_bytes_per_s") < 384e9
    assert preset("a100-node").rate("dram_bytes_per_s") == pytest.approx(164e9, rel=0.01)


def test_pairs_of_gpus_without_a_switch_have_the_pairs_wires():
    four, eight = Links.of(preset("a100-node")), Links.of(preset("h200"))
    assert four.share(2) * four.gather_bytes_per_s == pytest.approx(0.8 * 100e9)
    assert four.share(4) * four.reduce_bytes_per_s == pytest.approx(0.8 * 300e9)
    assert eight.share(2) == eight.share(8) == 1.0
    assert eight.gather_bytes_per_s == pytest.approx(0.8 * 450e9)
    assert four.gather_s(1e9, 1) == 0.0
    assert four.gather_s(1e9, 4) == pytest.approx(2e-5 + 0.75e9 / 240e9)


def test_collectives_without_nvlink_are_slower_without_peer_access_and_with_more_cards():
    rates = [Links.of(preset(name)) for name in ("a6000", "rtx4090-x4", "rtx4090-x8")]
    assert rates[0].gather_bytes_per_s == rates[0].reduce_bytes_per_s == 15e9
    gathers, reductions = ([getattr(one, f"{n}_bytes_per_s") for one in rates] for n in ("gather", "reduce"))
    assert gathers == sorted(gathers, reverse=True)
    assert reductions == sorted(reductions, reverse=True)
    eight = preset("rtx3090-x8")
    for name, seen in (("gather", (3.7e9, 6e9)), ("reduce", (1.3e9, 6e9))):
        rate = getattr(eight, f"{name}_bytes_per_s")
        most = math.exp(1.645 * rate.log_sigma)
        assert all(rate.median / most <= one <= rate.median * most for one in seen)
        assert 2 < most < 3


def test_a_superchip_copies_unpinned_memory_without_a_staging_buffer():
    rate = preset("gh200").pageable_h2d_bytes_per_s
    most = math.exp(1.645 * rate.log_sigma)
    assert rate.median / most <= 25e9 < 145e9 <= rate.median * most
    assert preset("h100").pageable_h2d_bytes_per_s.median == 10e9


def test_four_superchips_on_a_board_are_joined_by_nvlink_and_keep_their_own_memory():
    one, four = preset("gh200"), preset("gh200-x4")
    assert (one.gather_bytes_per_s, four.gpus_per_node, four.numa_nodes) == (None, 4, 4)
    links = Links.of(four)
    assert links.share(2) * links.gather_bytes_per_s == pytest.approx(0.8 * 150e9)
    assert links.share(4) * links.reduce_bytes_per_s == pytest.approx(0.8 * 450e9)
    assert rank_share(four, "dram", 4) * four.rate("dram_bytes_per_s") == pytest.approx(0.8 * 512e9)
    assert rank_share(four, "h2d", 4) == 1.0


def test_two_gpus_of_an_hgx_a100_share_their_switchs_uplink():
    # With two or more ranks on an HGX A100 preset, each rank has half the bandwidth of a PCIe link, because two GPUs
    # share an uplink.
    for name, share in (("a100-80gb", 0.5), ("a100-40gb", 0.5), ("a100-node", 1.0), ("rtx4090-x8", 1.0)):
        machine = preset(name)
        assert [rank_share(machine, "h2d", n) for n in (2, machine.gpus_per_node)] == [share, share], name
        assert rank_share(machine, "d2h", machine.gpus_per_node) == share
        assert rank_share(machine, "h2d", 1) == 1.0


@pytest.mark.parametrize("card", ["rtx3090", "rtx4090", "rtx5090"])
def test_cards_on_one_host_divide_its_lanes_and_its_memory(card):
    one, two, four, eight = (preset(f"{card}{suffix}") for suffix in ("", "-x2", "-x4", "-x8"))
    assert [m.gpus_per_node for m in (one, two, four, eight)] == [1, 2, 4, 8]
    assert two.rate("h2d_bytes_per_s") == pytest.approx(0.5 * one.rate("h2d_bytes_per_s"))
    assert two.rate("dram_bytes_per_s") == one.rate("dram_bytes_per_s"), "a desktop has two channels"
    assert rank_share(two, "dram", 2) == 0.5, "all ranks update in the same DRAM"
    assert eight.rate("dram_bytes_per_s") == pytest.approx(2 * four.rate("dram_bytes_per_s"))
    assert {m.rate("device_flops_per_s") for m in (two, four, eight)} == {one.rate("device_flops_per_s")}


def test_products_run_at_a_share_of_the_sheet_that_is_the_devices_own(named):
    machine, sheet = named
    assert machine.rate("device_flops_per_s") == pytest.approx(sheet.compute.products * sheet.flops)
    assert machine.rate("attention_flops_per_s") == pytest.approx(sheet.compute.attention * sheet.flops)
    assert sheet.compute.runs in machine.device_flops_per_s.detail, "names no runs for this rate"
    assert sheet.compute.attention <= sheet.compute.products
    if sheet.device_name.startswith("NVIDIA A100-SXM4"):
        assert sheet.compute.products > 1.15 * SHEETS["h100"].compute.products


def test_an_unknown_preset_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"preset 'cray'.* a100-node, .*gh200, gh200-x4, h100, .* rtx4090"):
        preset("cray")
