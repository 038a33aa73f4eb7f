"""Machines that need not be measured first: published nodes and data sheets, a source per value.

Estimates for what-if questions. A plan to train by comes from a machine that was measured
(`tune profile`), or from a preset that the user's own runs have corrected (`tune calibrate`). No
value here was fitted to iteration times.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ebbtide.simulator.estimates.collectives import LINK, PAIR
from ebbtide.simulator.limits import GIB
from ebbtide.simulator.machine import BUILDERS, DEVICE_UPDATE_BYTES, Machine, ShareName
from ebbtide.simulator.quantity import EIGHTY_PERCENT, QUARTILE, Quantity, Source
from ebbtide.simulator.schedules.peers import FRESH_PASSES
from ebbtide.simulator.spelling import spelled

# Quartiles over the median, by how a value was obtained: one run says less than many, a data sheet
# tells what cannot be exceeded. Whether intervals from them hold is judged on published runs.
_SPREAD: dict[Source, tuple[float, float]] = {
    "published": (0.96, 1.04),
    "datasheet": (0.9, 1.0),
    "assumed": (0.86, 1.14),
}
# DRAM traffic of an update, per parameter. Stock's three passes: unscale reads and writes the fp32
# gradient (8), Adam reads four values and writes three (28), the downcast reads 4, and writes 2
# after reading the line that it writes to (8). One fused pass: three values both ways, the 16-bit
# gradient and parameter (28).
STOCK_UPDATE_BYTES, FUSED_UPDATE_BYTES = 44, 28
_WIRE_BYTES = 2
_TRIAD = {"DDR4": 0.8, "DDR5": 0.75, "LPDDR5X": 0.8}  # of the data sheet's, what a triad reaches
_HBM = 0.8  # likewise of device memory
# Of the data sheet's dense 16-bit flops, what products sustain in training: Megatron-LM (Narayanan
# et al., SC 2021, table 1) reaches 52% end to end with its largest layers, communication included.
_PRODUCTS = 0.57
# Unpinned copies pass one core and the link, one after the other (17 GB/s is what one core copies
# here): 10 GB/s over PCIe 4. The reference of the published runs says "a few GB/s", DeepSpeed's
# pull request 5301 a fourth to a sixth of pinned ones.
_PAGEABLE = 10e9
# Into fresh unpinned memory on two sockets: for some of the ranks, which nobody binds, core,
# staging buffer and pages lie apart; all wait for the slowest. Binding alone gives 1.16 to 1.29.
_UNBOUND = 1.25
# What one core draws of DRAM: its outstanding lines over their latency, whatever the channels give.
# A server core is far from its socket's latency, a desktop's near. No run tells it: so the values
# are those of the core's kind, and may be a third off either way. That one thread of stock's Adam
# draws what one thread of a triad does, is measured here (41 to 47 GB/s beside 37 to 44, Zen 5).
_CORE_SPREAD = 0.75, 1.33
_SAPPHIRE_RAPIDS = "a Sapphire Rapids core"
_LAYER_ISSUE_S = 3.5e-3  # DeepSpeed's hooks: 2.0 to 2.7 ms here without, plus six gathers a layer
_CONTEXT_BYTES, _NCCL_BYTES = 600 * 2**20, 400 * 2**20
_QUARTILE_OF_EIGHTY_PERCENT = round(QUARTILE / EIGHTY_PERCENT, 3)
PRESET = "preset"  # what such a machine was measured with
DOS = "Deep Optimizer States, arXiv 2410.21316, and its published logs"


@dataclass(frozen=True)
class Sheet:
    """What data sheets and publications say of one machine; the rest follows.

    Attributes:
        dram_bytes_per_s: of the sockets that a run uses, by the number of channels.
        link_raw_bytes_per_s: one direction, before protocol; ``link``: what pinned copies reach.
        core: bytes/s of DRAM that a single core draws, and which core that is.
        stock_update: parameters/s of a rank's update as published, with the new parameters' way
            to the device, by ranks that work at once: lowest and highest figure, and what they
            are; empty: as DRAM allows.
        stock_source: ``assumed`` where those figures are of another node with such a host.
    """

    device_name: str
    flops: float
    hbm_bytes_per_s: float
    device_gib: float
    gpus: int
    cores: int
    host_gib: int
    dram_kind: str
    dram_bytes_per_s: float
    dram_detail: str
    link_raw_bytes_per_s: float
    link: tuple[float, Source, str]
    storage: tuple[float, Source, str]
    core: tuple[float, str]
    numa_nodes: int = 1
    stock_update: Mapping[int, tuple[float, float, str]] = field(default_factory=dict)
    stock_source: Source = "published"
    network: tuple[float, Source, str] | None = None
    nvlink: tuple[float, str] | None = None
    nvlink_pair: tuple[float, str] | None = None

    @property
    def triad_bytes_per_s(self) -> float:
        return _TRIAD[self.dram_kind] * self.dram_bytes_per_s


# A desktop of 2023, and the link of most cards.
_AM5: Mapping[str, Any] = {
    "gpus": 1,
    "cores": 16,
    "host_gib": 128,
    "dram_kind": "DDR5",
    "dram_bytes_per_s": 89.6e9,
    "dram_detail": "two channels of DDR5-5600 (89.6 GB/s)",
    "storage": (4e9, "assumed", "one PCIe 4 NVMe drive"),
    "core": (35e9, "a desktop's core"),
}
_PCIE4: Mapping[str, Any] = {"link_raw_bytes_per_s": 31.5e9, "link": (25e9, "assumed", "PCIe 4 x16, 31.5 GB/s raw")}

SHEETS: Mapping[str, Sheet] = {
    "a100-node": Sheet(
        device_name="NVIDIA A100-SXM4-40GB",
        flops=312e12,
        hbm_bytes_per_s=1.555e12,
        device_gib=39.4,
        gpus=4,
        cores=32,
        host_gib=512,
        dram_kind="DDR4",
        dram_bytes_per_s=204.8e9,
        dram_detail="one socket, 8 channels of DDR4-3200 (204.8 GB/s)",
        link_raw_bytes_per_s=31.5e9,
        link=(25e9, "published", f"pinned, PCIe 4: {DOS}"),
        storage=(2e9, "assumed", "one NVMe drive"),
        core=(20e9, "a Zen 3 core"),
        # Two figures are published for four ranks: how they were bound to cores and memory
        # differs. Their geometric mean is taken; between both lie eight cases in ten.
        stock_update={
            1: (1.4e9, 1.4e9, "1.4 G params/s with one rank"),
            2: (0.95e9, 0.95e9, "1.9 G params/s with two ranks together"),
            4: (0.475e9, 0.75e9, "1.9 G params/s with four ranks together, and 0.75 for each of four"),
        },
        network=(
            8.3e9,
            "assumed",
            "NCCL over TCP sockets, as on Slingshot 11 without its plug-in: a third of two 100 Gbit/s ports",
        ),
        nvlink=(300e9, "NVLink 3, 12 links of 25 GB/s, one direction"),
        nvlink_pair=(100e9, "four links between each pair of the four GPUs"),
    ),
    "a100-80gb": Sheet(
        device_name="NVIDIA A100-SXM4-80GB",
        flops=312e12,
        hbm_bytes_per_s=2.039e12,
        device_gib=79.2,
        gpus=8,
        cores=128,
        host_gib=2048,
        dram_kind="DDR4",
        numa_nodes=2,
        dram_bytes_per_s=409.6e9,
        dram_detail="two sockets of 8 channels DDR4-3200 (409.6 GB/s)",
        link_raw_bytes_per_s=31.5e9,
        link=(25e9, "assumed", "as on the A100 node: PCIe 4 x16"),
        storage=(4e9, "assumed", "one PCIe 4 NVMe drive"),
        core=(20e9, "a Zen 2 core"),
        network=(200e9, "datasheet", "eight 200 Gbit/s ports"),
        nvlink=(300e9, "NVLink 3 through NVSwitch, one direction"),
    ),
    "h100-node": Sheet(
        device_name="NVIDIA H100 80GB HBM3",
        flops=989e12,
        hbm_bytes_per_s=3.35e12,
        device_gib=79.1,
        gpus=4,
        cores=96,
        host_gib=512,
        dram_kind="DDR5",
        numa_nodes=2,
        dram_bytes_per_s=614.4e9,
        dram_detail="two sockets of 8 channels DDR5-4800 (614.4 GB/s)",
        link_raw_bytes_per_s=63e9,
        link=(52e9, "published", f"pinned, PCIe 5, 50 to 55 GB/s: {DOS}"),
        storage=(5e9, "assumed", "one PCIe 4 NVMe drive"),
        core=(12e9, _SAPPHIRE_RAPIDS),
        stock_update={4: (1.7e9, 1.7e9, "1.7 G params/s for each of four ranks, 46 threads each")},
        network=(50e9, "assumed", "one 400 Gbit/s port"),
        nvlink=(450e9, "NVLink 4, 18 links of 25 GB/s, one direction"),
        nvlink_pair=(150e9, "six links between each pair of the four GPUs"),
    ),
    "h200": Sheet(
        device_name="NVIDIA H200",
        flops=989e12,
        hbm_bytes_per_s=4.8e12,
        device_gib=139.8,
        gpus=8,
        cores=112,
        host_gib=2048,
        dram_kind="DDR5",
        numa_nodes=2,
        dram_bytes_per_s=614.4e9,
        dram_detail="two sockets of 8 channels DDR5-4800 (614.4 GB/s)",
        link_raw_bytes_per_s=63e9,
        link=(52e9, "assumed", "as on the H100 node: PCIe 5 x16"),
        storage=(5e9, "assumed", "one PCIe 4 NVMe drive"),
        core=(12e9, _SAPPHIRE_RAPIDS),
        # The host's memory is that of the H100 node; eight ranks have what four drew together.
        stock_update={
            4: (
                1.7e9,
                1.7e9,
                "as on the H100 node, which has the same channels: 1.7 G "
                "params/s for each of four ranks, 46 threads each",
            )
        },
        stock_source="assumed",
        network=(400e9, "datasheet", "eight 400 Gbit/s ports"),
        nvlink=(450e9, "NVLink 4 through NVSwitch, one direction"),
    ),
    "rtx4090": Sheet(
        device_name="NVIDIA GeForce RTX 4090", flops=165e12, hbm_bytes_per_s=1.008e12, device_gib=23.6, **_AM5, **_PCIE4
    ),
    "rtx4080": Sheet(
        device_name="NVIDIA GeForce RTX 4080",
        flops=97.5e12,
        hbm_bytes_per_s=0.7168e12,
        device_gib=15.7,
        **_AM5,
        **_PCIE4,
    ),
    "rtx3090": Sheet(
        device_name="NVIDIA GeForce RTX 3090",
        flops=71e12,
        hbm_bytes_per_s=0.936e12,
        device_gib=23.7,
        gpus=1,
        cores=16,
        host_gib=128,
        dram_kind="DDR4",
        dram_bytes_per_s=51.2e9,
        dram_detail="two channels of DDR4-3200 (51.2 GB/s)",
        **_PCIE4,
        storage=(4e9, "assumed", "one PCIe 4 NVMe drive"),
        core=(30e9, "a desktop's Zen 3 core"),
    ),
    "rtx5090": Sheet(
        device_name="NVIDIA GeForce RTX 5090",
        flops=209.5e12,
        hbm_bytes_per_s=1.792e12,
        device_gib=31.4,
        **_AM5,
        link_raw_bytes_per_s=63e9,
        link=(52e9, "assumed", "PCIe 5 x16, 63 GB/s raw"),
    ),
    "a6000": Sheet(
        device_name="NVIDIA RTX A6000",
        flops=154.8e12,
        hbm_bytes_per_s=0.768e12,
        device_gib=47.5,
        gpus=4,
        cores=32,
        host_gib=256,
        dram_kind="DDR4",
        dram_bytes_per_s=204.8e9,
        dram_detail="one socket, 8 channels of DDR4-3200 (204.8 GB/s)",
        **_PCIE4,
        storage=(4e9, "assumed", "one PCIe 4 NVMe drive"),
        core=(20e9, "a Zen 3 core"),
    ),
    "rtxpro6000": Sheet(
        device_name="NVIDIA RTX PRO 6000 Blackwell",
        flops=503.8e12,
        hbm_bytes_per_s=1.792e12,
        device_gib=95.0,
        gpus=4,
        cores=32,
        host_gib=512,
        dram_kind="DDR5",
        dram_bytes_per_s=332.8e9,
        dram_detail="one socket, 8 channels of DDR5-5200 (332.8 GB/s)",
        link_raw_bytes_per_s=63e9,
        link=(52e9, "assumed", "PCIe 5 x16, 63 GB/s raw"),
        storage=(5e9, "assumed", "one PCIe 5 NVMe drive"),
        core=(25e9, "a Zen 4 core"),
    ),
    "l40s": Sheet(
        device_name="NVIDIA L40S",
        flops=362e12,
        hbm_bytes_per_s=0.864e12,
        device_gib=44.5,
        gpus=8,
        cores=64,
        host_gib=1024,
        dram_kind="DDR5",
        numa_nodes=2,
        dram_bytes_per_s=614.4e9,
        dram_detail="two sockets of 8 channels DDR5-4800 (614.4 GB/s)",
        **_PCIE4,
        storage=(5e9, "assumed", "one PCIe 4 NVMe drive"),
        core=(12e9, _SAPPHIRE_RAPIDS),
        network=(25e9, "assumed", "one 200 Gbit/s port"),
    ),
    "b200": Sheet(
        device_name="NVIDIA B200",
        flops=2.25e15,
        hbm_bytes_per_s=8e12,
        device_gib=178.4,
        gpus=8,
        cores=112,
        host_gib=2048,
        dram_kind="DDR5",
        numa_nodes=2,
        dram_bytes_per_s=716.8e9,
        dram_detail="two sockets of 8 channels DDR5-5600 (716.8 GB/s)",
        link_raw_bytes_per_s=63e9,
        link=(52e9, "assumed", "as on the H100 node: PCIe 5 x16"),
        storage=(5e9, "assumed", "one PCIe 4 NVMe drive"),
        core=(12e9, _SAPPHIRE_RAPIDS),
        network=(400e9, "datasheet", "eight 400 Gbit/s ports"),
        nvlink=(900e9, "NVLink 5 through NVSwitch, one direction"),
    ),
    "gh200": Sheet(
        device_name="NVIDIA GH200 96GB",
        flops=989e12,
        hbm_bytes_per_s=4.0e12,
        device_gib=94.5,
        gpus=1,
        cores=72,
        host_gib=480,
        dram_kind="LPDDR5X",
        dram_bytes_per_s=384e9,
        dram_detail="480 GB of LPDDR5X (384 GB/s; 512 with 120 or 240 GB)",
        # Faster than host memory, which is then what a copy reaches.
        link_raw_bytes_per_s=450e9,
        link=(0.8 * 384e9, "datasheet", "NVLink-C2C's 450 GB/s a way, bound by 80% of LPDDR5X"),
        storage=(5e9, "assumed", "one PCIe 5 NVMe drive"),
        core=(30e9, "a Neoverse V2 core"),
        network=(50e9, "datasheet", "one 400 Gbit/s port"),
    ),
}
PRESETS = SHEETS


def preset(name: str) -> Machine:
    """A machine by name.

    >>> round(preset("h200").device_memory_bytes / 2**30, 1)
    139.8

    Raises:
        ValueError: no such preset; lists all.
    """
    name = spelled(name, SHEETS, "machine preset", key="machine")
    sheet = SHEETS[name]
    return Machine(
        name=name,
        device_kind="cuda",
        device_name=sheet.device_name,
        gpus_per_node=sheet.gpus,
        cpu_cores=sheet.cores,
        numa_nodes=sheet.numa_nodes,
        host_memory_bytes=sheet.host_gib * GIB,
        device_memory_bytes=int(sheet.device_gib * GIB),
        device_reserved_bytes=_CONTEXT_BYTES + (_NCCL_BYTES if sheet.gpus > 1 else 0),
        **_link_rates(sheet),
        **_device_rates(sheet),
        **_host_rates(sheet),
        rank_shares=_dram_shares(sheet),
        storage_write_bytes_per_s=_value(*sheet.storage),
        network_bytes_per_s=_value(*sheet.network) if sheet.network else None,
        layer_issue_s=_value(
            _LAYER_ISSUE_S,
            "assumed",
            "DeepSpeed's ZeRO-3 hooks of one transformer layer, measured on "
            "another CPU, with the launches of its gathers",
        ),
        other_rates=_wires(sheet),
        measured_with=PRESET,
    )


def sheet_limits(device_name: str) -> dict[str, float]:
    """What a device's data sheet says that no rate of it exceeds, by a `Machine`'s fields.

    Empty for a device without a sheet here.
    """
    for sheet in SHEETS.values():
        if sheet.device_name == device_name:
            link = sheet.link_raw_bytes_per_s
            return {"h2d_bytes_per_s": link, "d2h_bytes_per_s": link, "device_flops_per_s": sheet.flops}
    return {}


def preset_names() -> tuple[str, ...]:
    """All names, in alphabetical order."""
    return tuple(sorted(SHEETS))


def _value(median: float, source: Source, detail: str, spread: tuple[float, float] | None = None) -> Quantity:
    """``spread``: of its quartiles over it; None: that of its source."""
    low, high = spread or _SPREAD[source]
    return Quantity(median=median, q1=low * median, q3=high * median, n=1, source=source, detail=detail)


def _link_rates(sheet: Sheet) -> dict[str, Quantity]:
    detail = "one core's copy through the driver's staging buffer: a few GB/s"
    pageable = min(_PAGEABLE, sheet.link[0])
    out = pageable / (_UNBOUND if sheet.numa_nodes > 1 else 1)
    return {
        "h2d_bytes_per_s": _value(*sheet.link),
        "d2h_bytes_per_s": _value(*sheet.link),
        "pageable_h2d_bytes_per_s": _value(pageable, "assumed", detail),
        "pageable_d2h_bytes_per_s": _value(out, "assumed", detail),
    }


def _device_rates(sheet: Sheet) -> dict[str, Quantity]:
    hbm, device = sheet.hbm_bytes_per_s, sheet.device_name
    return {
        "device_flops_per_s": _value(
            _PRODUCTS * sheet.flops,
            "assumed",
            f"{_PRODUCTS:.0%} of {device}'s {sheet.flops / 1e12:g} dense bf16 Tflop/s: "
            "Megatron-LM, SC 2021, table 1, without its communication",
        ),
        "device_memory_bytes_per_s": _value(_HBM * hbm, "datasheet", f"{_HBM:.0%} of {device}'s {hbm / 1e12:g} TB/s"),
        "device_adam_params_per_s": _value(
            _HBM * hbm / DEVICE_UPDATE_BYTES,
            "datasheet",
            f"{_HBM:.0%} of {device}'s {hbm / 1e12:g} TB/s at {DEVICE_UPDATE_BYTES} bytes per parameter",
        ),
    }


def _host_rates(sheet: Sheet) -> dict[str, Quantity]:
    """One rank alone on the node; the fused kernel draws as much of DRAM as stock's passes do."""
    drawn = _drawn_bytes_per_s(sheet)
    return {
        "dram_bytes_per_s": _value(
            sheet.triad_bytes_per_s, "datasheet", f"{_TRIAD[sheet.dram_kind]:.0%} of {sheet.dram_detail}"
        ),
        "stock_host_adam_params_per_s": drawn.scaled(1 / STOCK_UPDATE_BYTES),
        "stock_host_adam_thread_params_per_s": _one_thread(sheet, drawn.median),
        "host_adam_params_per_s": _value(
            drawn.median / FUSED_UPDATE_BYTES,
            "assumed",
            f"the same DRAM traffic a second as stock's passes, at {FUSED_UPDATE_BYTES} bytes per "
            f"parameter instead of {STOCK_UPDATE_BYTES}",
        ),
    }


def _one_thread(sheet: Sheet, drawn_bytes_per_s: float) -> Quantity:
    """Stock's passes on one core, which draws no more than all of them."""
    core, whose = sheet.core
    said = f"{core / 1e9:g} GB/s of DRAM for {whose}, {STOCK_UPDATE_BYTES} bytes a parameter"
    rate = min(core, drawn_bytes_per_s) / STOCK_UPDATE_BYTES
    return _value(rate, "assumed", said, _CORE_SPREAD)


def _passes_bytes_per_s(rate: float) -> float:
    """DRAM traffic of a published update, less the time of its unpinned parameter copy: one
    core's, or what DRAM allows where the ranks leave little of it.
    """
    copied = FRESH_PASSES * _WIRE_BYTES
    bound_by_core = STOCK_UPDATE_BYTES / (1 / rate - _WIRE_BYTES / _PAGEABLE)
    return max(bound_by_core, (STOCK_UPDATE_BYTES + copied) * rate)


def _drawn_bytes_per_s(sheet: Sheet) -> Quantity:
    """What one rank's update draws of DRAM: as published, else as one NUMA node has it.

    Of several ranks at once each one's figure is the least that it would draw alone. On the H100
    node that is half of what a NUMA node gives, and half of its socket's is what the only rank
    drew that was published alone (A100): so it is taken, though not as published.
    """
    node = sheet.triad_bytes_per_s / sheet.numa_nodes
    if not sheet.stock_update:
        return _value(node, "assumed", f"one NUMA node's DRAM at {STOCK_UPDATE_BYTES} bytes per parameter")
    ranks = min(sheet.stock_update)
    low, high, said = sheet.stock_update[ranks]
    drawn = min(_passes_bytes_per_s(math.sqrt(low * high)), node)
    detail = f"{said}, less the new parameters' way to the device: {DOS}"
    if ranks == 1:
        return _value(drawn, sheet.stock_source, detail)
    return Quantity(
        median=drawn,
        q1=_SPREAD["published"][0] * drawn,
        q3=_SPREAD["assumed"][1] * drawn,
        detail=f"{detail}; of one rank alone nothing is published: it has at least as much, and at "
        f"most a NUMA node's DRAM, {node / drawn:.1f} times that",
    )


def _dram_shares(sheet: Sheet) -> dict[int, dict[ShareName, Quantity]]:
    """Of the triad rate, for each of several ranks: as their published updates drew it."""
    shares: dict[int, dict[ShareName, Quantity]] = {}
    for ranks, (low, high, said) in sheet.stock_update.items():
        if ranks > 1:
            middle = math.sqrt(low * high)
            apart = max(1.04, (high / middle) ** _QUARTILE_OF_EIGHTY_PERCENT)
            parts = [
                min(1 / ranks, _passes_bytes_per_s(rate) / sheet.triad_bytes_per_s)
                for rate in (middle / apart, middle, middle * apart)
            ]
            shares[ranks] = {
                "dram": Quantity(
                    q1=parts[0],
                    median=parts[1],
                    q3=parts[2],
                    source=sheet.stock_source,
                    detail=f"{said}, less the new parameters' way to the device: {DOS}",
                )
            }
    return shares


def _wires(sheet: Sheet) -> dict[str, Quantity]:
    wires = {LINK: sheet.nvlink, PAIR: sheet.nvlink_pair}
    return {name: _value(rate, "datasheet", detail) for name, wire in wires.items() if wire for rate, detail in [wire]}


BUILDERS.update({name: partial(preset, name) for name in SHEETS})  # for `Machine.preset`
