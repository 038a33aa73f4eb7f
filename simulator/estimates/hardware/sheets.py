"""Speeds and memory sizes of machines, from data sheets and publications, for `ebbtide.simulator.estimates.presets`."""

from collections.abc import Mapping
from typing import Any

from ebbtide.simulator.estimates.hardware.sheet import Sheet

DOS = "Deep Optimizer States, arXiv 2410.21316, and its published logs"
_SAPPHIRE_RAPIDS = "a Sapphire Rapids core"


Fields = Mapping[str, Any]
_DRIVE: Fields = {"storage": (4e9, "assumed", "one PCIe 4 NVMe drive")}
# Desktop computers of 2020 and 2023, and the PCIe link of most cards.
_AM4: Fields = {
    "gpus": 1,
    "cores": 16,
    "host_gib": 128,
    "dram_kind": "DDR4",
    "dram_bytes_per_s": 51.2e9,
    "dram_detail": "two channels of DDR4-3200 (51.2 GB/s)",
    "core": (30e9, "a desktop's Zen 3 core"),
    "alone": 1.0,
    **_DRIVE,
}
_AM5: Fields = {
    "gpus": 1,
    "cores": 16,
    "host_gib": 128,
    "dram_kind": "DDR5",
    "dram_bytes_per_s": 89.6e9,
    "dram_detail": "two channels of DDR5-5600 (89.6 GB/s)",
    "core": (35e9, "a desktop's core"),
    "alone": 1.0,
    **_DRIVE,
}
# Rates of DeepSpeed's CPU update per rank if ranks share a socket of eight DDR4-3200 channels. Two rates are published
# for four ranks, probably because ranks were bound to cores and memory in different ways. We take their geometric mean.
# The interval between the two rates should contain eight cases in ten.
_SOCKET = {
    1: (1.4e9, 1.4e9, "1.4 G params/s with one rank"),
    2: (0.95e9, 0.95e9, "1.9 G params/s with two ranks together"),
    4: (0.475e9, 0.75e9, "1.9 G params/s with four ranks together, and 0.75 for each of four"),
}
# Two such sockets. With two ranks, an iteration without computation and copies took 2.9 s unbound (Qwen2.5-3B) and 1.37
# s bound (1.5B).
_TWO_SOCKETS = {
    1: (1.4e9, 2.8e9, "1.4 G params/s with one rank on one socket, and twice as many on both"),
    2: (
        0.72e9,
        0.89e9,
        "0.72 (unbound) and 0.89 G params/s (bound) for each of two: DeepSpeed, blogs/zenflow-corebinding",
    ),
    8: _SOCKET[4],
}
_ROME: Fields = {
    "dram_kind": "DDR4",
    "numa_nodes": 2,
    "dram_bytes_per_s": 409.6e9,
    "dram_detail": "two sockets of 8 channels DDR4-3200 (409.6 GB/s)",
    "stock_update": _TWO_SOCKETS,
    "stock_source": "assumed",
}
# Hosts of four cards on one socket and of eight cards on two sockets, each card with 16 lanes (data sheets of AMD EPYC
# 7003 and 9004: a socket has 128 lanes. Of two sockets, each uses 48 to 64 of them for the link to the other one).
_MILAN: Mapping[int, Fields] = {
    4: {
        "cores": 32,
        "host_gib": 256,
        "dram_kind": "DDR4",
        "dram_bytes_per_s": 204.8e9,
        "dram_detail": "one socket, 8 channels of DDR4-3200 (204.8 GB/s)",
        "core": (20e9, "a Zen 3 core"),
        "stock_update": _SOCKET,
        "stock_source": "assumed",
        **_DRIVE,
    },
    8: {"cores": 64, "host_gib": 512, "core": (20e9, "a Zen 3 core"), **_ROME, **_DRIVE},
}
_GENOA: Mapping[int, Fields] = {
    4: {
        "cores": 32,
        "host_gib": 384,
        "dram_kind": "DDR5",
        "dram_bytes_per_s": 460.8e9,
        "dram_detail": "one socket, 12 channels of DDR5-4800 (460.8 GB/s)",
        "core": (25e9, "a Zen 4 core"),
        **_DRIVE,
    },
    8: {
        "cores": 64,
        "host_gib": 768,
        "dram_kind": "DDR5",
        "numa_nodes": 2,
        "dram_bytes_per_s": 921.6e9,
        "dram_detail": "two sockets of 12 channels DDR5-4800 (921.6 GB/s)",
        "core": (25e9, "a Zen 4 core"),
        **_DRIVE,
    },
}
_PCIE4: Fields = {"link_raw_bytes_per_s": 31.5e9, "link": (25e9, "assumed", "PCIe 4 x16, 31.5 GB/s raw")}
_PCIE5: Fields = {"link_raw_bytes_per_s": 63e9, "link": (52e9, "assumed", "PCIe 5 x16, 63 GB/s raw")}
# Two cards in a desktop share its 16 lanes (AMD X570 and X670E: the processor has 24 usable lanes, and 8 of them are
# for drives and the chipset).
_PCIE4_X8: Fields = {
    "link_raw_bytes_per_s": 15.8e9,
    "link": (12.5e9, "assumed", "PCIe 4 x8, 15.8 GB/s raw: two cards divide a desktop's 16 lanes"),
}
_PCIE5_X8: Fields = {
    "link_raw_bytes_per_s": 31.5e9,
    "link": (26e9, "assumed", "PCIe 5 x8, 31.5 GB/s raw: two cards divide a desktop's 16 lanes"),
}
# Eight cards connected by NVSwitch, in hosts with two sockets.
_EIGHT_A100: Fields = {
    "flops": 312e12,
    "gpus": 8,
    "cores": 128,
    **_ROME,
    "ranks_per_uplink": 2,
    **_PCIE4,
    "link": (25e9, "assumed", "as on the A100 node: PCIe 4 x16"),
    **_DRIVE,
    "core": (20e9, "a Zen 2 core"),
    "network": (200e9, "datasheet", "eight 200 Gbit/s ports"),
    "nvlink": (300e9, "NVLink 3 through NVSwitch, one direction"),
}
_TWO_XEONS: Fields = {
    "gpus": 8,
    "cores": 112,
    "host_gib": 2048,
    "dram_kind": "DDR5",
    "numa_nodes": 2,
    **_PCIE5,
    "link": (52e9, "assumed", "as on the H100 node: PCIe 5 x16"),
    "storage": (5e9, "assumed", "one PCIe 4 NVMe drive"),
    "core": (12e9, _SAPPHIRE_RAPIDS),
    "network": (400e9, "datasheet", "eight 400 Gbit/s ports"),
}
# The host memory is that of the H100 node. Eight ranks together reach the DRAM bandwidth that four ranks reached.
_EIGHT_HOPPERS: Fields = {
    **_TWO_XEONS,
    "flops": 989e12,
    "dram_bytes_per_s": 614.4e9,
    "dram_detail": "two sockets of 8 channels DDR5-4800 (614.4 GB/s)",
    "stock_update": {
        4: (
            1.7e9,
            1.7e9,
            "as on the H100 node, which has the same channels: 1.7 G params/s for each of four ranks, 46 threads each",
        )
    },
    "stock_source": "assumed",
    "nvlink": (450e9, "NVLink 4 through NVSwitch, one direction"),
}
_RTX3090: Fields = {
    "peer": False,
    "device_name": "NVIDIA GeForce RTX 3090",
    "flops": 71e12,
    "hbm_bytes_per_s": 0.936e12,
    "device_gib": 23.7,
}
_RTX4090: Fields = {
    "peer": False,
    "device_name": "NVIDIA GeForce RTX 4090",
    "flops": 165e12,
    "hbm_bytes_per_s": 1.008e12,
    "device_gib": 23.6,
}
_RTX5090: Fields = {
    "peer": False,
    "device_name": "NVIDIA GeForce RTX 5090",
    "flops": 209.5e12,
    "hbm_bytes_per_s": 1.792e12,
    "device_gib": 31.4,
}


def _several(
    name: str, card: Fields, desktop: Fields, servers: Mapping[int, Fields], halved: Fields, full: Fields
) -> dict[str, Sheet]:
    two = Sheet(**{**card, **desktop, **halved, "gpus": 2})
    more = {gpus: Sheet(**{**card, **server, **full, "gpus": gpus}) for gpus, server in servers.items()}
    return {f"{name}-x2": two, **{f"{name}-x{gpus}": sheet for gpus, sheet in more.items()}}


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
        stock_update=_SOCKET,
        network=(
            8.3e9,
            "assumed",
            "NCCL over TCP sockets, as on Slingshot 11 without its plug-in: a third of two 100 Gbit/s ports",
        ),
        nvlink=(300e9, "NVLink 3, 12 links of 25 GB/s, one direction"),
        nvlink_pair=(100e9, "four links between each pair of the four GPUs"),
    ),
    "a100-80gb": Sheet(
        device_name="NVIDIA A100-SXM4-80GB", hbm_bytes_per_s=2.039e12, device_gib=79.2, host_gib=2048, **_EIGHT_A100
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
    "h200": Sheet(device_name="NVIDIA H200", hbm_bytes_per_s=4.8e12, device_gib=139.8, **_EIGHT_HOPPERS),
    "rtx4090": Sheet(**{**_RTX4090, **_AM5, **_PCIE4}),
    "rtx4080": Sheet(
        device_name="NVIDIA GeForce RTX 4080",
        flops=97.5e12,
        hbm_bytes_per_s=0.7168e12,
        device_gib=15.7,
        **_AM5,
        **_PCIE4,
    ),
    "rtx3090": Sheet(**{**_RTX3090, **_AM4, **_PCIE4}),
    "rtx5090": Sheet(**{**_RTX5090, **_AM5, **_PCIE5}),
    "a6000": Sheet(
        device_name="NVIDIA RTX A6000",
        flops=154.8e12,
        hbm_bytes_per_s=0.768e12,
        device_gib=47.5,
        gpus=4,
        **_MILAN[4],
        **_PCIE4,
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
        **_TWO_XEONS,
        device_name="NVIDIA B200",
        flops=2.25e15,
        hbm_bytes_per_s=8e12,
        device_gib=178.4,
        dram_bytes_per_s=716.8e9,
        dram_detail="two sockets of 8 channels DDR5-5600 (716.8 GB/s)",
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
        link_raw_bytes_per_s=450e9,
        link=(297e9, "published", "pinned, over NVLink-C2C: 297 GB/s to the host, 375 to the GPU, arXiv 2407.07850"),
        # Over C2C the GPU reads unpinned memory itself, without a staging buffer. No rate of such copies is known to
        # us: it lies between that of a few cores, which fault the fresh pages in, and half of the pinned rate.
        pageable=(
            60e9,
            "assumed",
            "the GPU reads unpinned memory itself, no measured rate is published: 24 to 150 GB/s",
            (0.69, 1.46),
        ),
        storage=(5e9, "assumed", "one PCIe 5 NVMe drive"),
        core=(30e9, "a Neoverse V2 core"),
        alone=1.0,  # SuperOffload, arXiv 2509.21271: DeepSpeedCPUAdam takes 0.1 s for a billion parameters
        network=(50e9, "datasheet", "one 400 Gbit/s port"),
    ),
    "a100-40gb": Sheet(
        device_name="NVIDIA A100-SXM4-40GB", hbm_bytes_per_s=1.555e12, device_gib=39.4, host_gib=1024, **_EIGHT_A100
    ),
    "a100-pcie": Sheet(
        device_name="NVIDIA A100 80GB PCIe",
        flops=312e12,
        hbm_bytes_per_s=1.935e12,
        device_gib=79.2,
        gpus=4,
        **_MILAN[8],
        **_PCIE4,
    ),
    "h100": Sheet(device_name="NVIDIA H100 80GB HBM3", hbm_bytes_per_s=3.35e12, device_gib=79.1, **_EIGHT_HOPPERS),
    **_several("rtx3090", _RTX3090, _AM4, _MILAN, _PCIE4_X8, _PCIE4),
    **_several("rtx4090", _RTX4090, _AM5, _MILAN, _PCIE4_X8, _PCIE4),
    **_several("rtx5090", _RTX5090, _AM5, _GENOA, _PCIE5_X8, _PCIE5),
}
