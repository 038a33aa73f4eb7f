"""Presets: sources, and no rate above what the hardware can do."""

import pytest

from simulator import Machine, preset, preset_names
from simulator.estimates.collectives import Links
from simulator.estimates.presets import FUSED_UPDATE_BYTES, SHEETS, STOCK_UPDATE_BYTES
from simulator.machine import DEVICE_UPDATE_BYTES

RATES = (
    "h2d_bytes_per_s", "d2h_bytes_per_s", "pageable_h2d_bytes_per_s", "pageable_d2h_bytes_per_s",
    "dram_bytes_per_s", "host_adam_params_per_s", "stock_host_adam_params_per_s",
    "device_adam_params_per_s", "device_flops_per_s", "device_memory_bytes_per_s",
    "storage_write_bytes_per_s", "layer_issue_s",
)  # fmt: skip


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
    assert machine.rate("h2d_bytes_per_s") < sheet.link_raw_bytes_per_s
    assert machine.rate("d2h_bytes_per_s") < sheet.link_raw_bytes_per_s
    assert machine.rate("pageable_d2h_bytes_per_s") <= machine.rate("d2h_bytes_per_s")
    assert machine.rate("h2d_bytes_per_s") <= sheet.dram_bytes_per_s
    assert machine.rate("dram_bytes_per_s") < sheet.dram_bytes_per_s
    assert machine.rate("device_flops_per_s") < sheet.flops
    assert machine.rate("device_memory_bytes_per_s") < sheet.hbm_bytes_per_s
    traffic = machine.rate("device_adam_params_per_s") * DEVICE_UPDATE_BYTES
    assert traffic < sheet.hbm_bytes_per_s


def test_no_update_draws_more_than_one_numa_node_or_a_ranks_share(named):
    machine, sheet = named
    one_node = machine.rate("dram_bytes_per_s") / sheet.numa_nodes
    for name, moved in (("stock_host_adam_params_per_s", STOCK_UPDATE_BYTES),
                        ("host_adam_params_per_s", FUSED_UPDATE_BYTES)):  # fmt: skip
        assert machine.rate(name) * moved <= one_node * (1 + 1e-9)
    for ranks, parts in machine.rank_shares.items():
        assert parts["dram"].q3 * ranks <= 1 + 1e-9


def test_published_updates_are_what_four_ranks_reach():
    """1.7 G params/s a rank on the H100 node includes the new parameters' way to the device."""
    machine = preset("h100-node")
    drawn = machine.rate("dram_bytes_per_s") * machine.rank_share("dram", 4)
    passes = min(machine.rate("stock_host_adam_params_per_s"), drawn / STOCK_UPDATE_BYTES)
    copied = machine.rate("pageable_h2d_bytes_per_s") / 2
    assert 1 / (1 / passes + 1 / copied) == pytest.approx(1.7e9, rel=0.05)


def test_memory_is_what_the_device_reports():
    assert preset("h200").device_memory_bytes / 2**30 == pytest.approx(139.8)
    assert preset("gh200").rate("dram_bytes_per_s") < 384e9
    assert preset("a100-node").rate("dram_bytes_per_s") == pytest.approx(164e9, rel=0.01)


def test_pairs_of_gpus_without_a_switch_have_the_pairs_wires():
    four, eight = Links.of(preset("a100-node")), Links.of(preset("h200"))
    assert four.bytes_per_s(2) == pytest.approx(0.8 * 100e9)
    assert four.bytes_per_s(4) == pytest.approx(0.8 * 300e9)
    assert eight.bytes_per_s(2) == eight.bytes_per_s(8) == pytest.approx(0.8 * 450e9)
    assert four.gather_s(1e9, 1) == 0.0
    assert four.gather_s(1e9, 4) == pytest.approx(2e-5 + 0.75e9 / 240e9)


def test_without_nvlink_collectives_go_over_pcie():
    assert Links.of(preset("rtx4090")).bytes_per_s(2) == 25e9


def test_an_unknown_preset_lists_the_known_ones():
    with pytest.raises(ValueError, match="a100-node, h100-node, h200, rtx4090, gh200, but got"):
        preset("cray")
