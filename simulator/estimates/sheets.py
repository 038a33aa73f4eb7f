"""Speeds and memory sizes of machines, from data sheets and publications, for `ebbtide.simulator.estimates.presets`,
and the fractions of a GPU's data sheet speed that training reaches, from published runs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ebbtide.simulator.quantity import Source


@dataclass(frozen=True)
class Compute:
    """The fractions of a GPU's data sheet speed (dense bf16) that training reaches, derived from published runs.

    Attributes:
        found: Fraction that flash attention reached in the published runs, forward and backward, on causal sequences.
        runs: Names of the published runs. If the GPU has none, the name of the similar GPU from which the fractions are
            taken.
        versions: Dict from a major version of FlashAttention to the fraction that the papers about FlashAttention
            report. If empty, ``found`` is taken as the fraction of version 2.
    """

    products: float
    found: float
    runs: str
    versions: Mapping[int, float] = field(default_factory=dict)

    @property
    def attention(self) -> float:
        """Return the fraction of the GPU's data sheet FLOP/s that version 2 of FlashAttention reaches."""
        # PyTorch's own attention calls this version. If the papers about FlashAttention give no fraction for this GPU,
        # return the fraction that published training runs reached.
        return self.versions.get(2, self.found)

    @property
    def attention_source(self) -> str:
        """Return the source of the property `attention`, the fraction of data sheet FLOP/s that attention reaches."""
        # The source is the papers about FlashAttention, published training runs that reached the fraction, or a similar
        # GPU with a known fraction.
        return "FlashAttention 2, arXiv 2307.08691 and 2407.08608" if 2 in self.versions else self.runs

    def attention_gain(self, version: int | None) -> float | None:
        """Return how many times faster a version of FlashAttention is than version 2.

        The result is None if the version does not run on this GPU, or if its speed there is not known.
        """
        if version is None or version == 2:
            return 1.0
        reached = self.versions.get(version)
        return reached / self.attention if reached else None


# Shares of the data sheet's peak that matrix products reach, per device. One share for all devices was wrong by a
# quarter: an A100 reaches more of its sheet's peak than an H100, whose power limit lowers its clock. GeForce cards
# reach nearly all of it or more, because their sheets assume the lowest boost clock (an RTX 5090 ran at 2813 to 2932
# MHz under load, github.com/kekzl/imp/issues/1671, and its sheet assumes 2407). Fitted to the half of
# studies/data/published_training_runs.csv that is marked for fitting.
_MOSAIC = "MosaicML's tables of MPT models"
_LLMQ = "runs of llmq and LLaMA-Factory with Qwen2.5 models"
_TINY = "runs of whyNLP/tinyllama"
# Shares of the sheet's peak that versions of FlashAttention reach on long sequences, from the abstracts of their
# papers. Version 2 on A100: 50 to 73% (Dao, arXiv 2307.08691). On H100: 35%, and version 3 is 1.5 to 2 times as fast,
# up to 75% in forward (Shah et al., arXiv 2407.08608). Version 4 on B200: up to 71% in forward (arXiv 2603.05451). Its
# mean over forward and backward is assumed to be lower by the same factor as that of version 3. MosaicML's runs used
# the Triton kernel of version 1 (llm-foundry, commit b2a43a14, ``--attn_impl``), so version 1 has the speed of their
# runs.
_V2_AMPERE, _V2_HOPPER = 0.6, 0.35
_V3 = 1.75 * _V2_HOPPER
_V1_AMPERE, _V1_HOPPER = 0.36, 0.22
_AMPERE_VERSIONS = {1: _V1_AMPERE, 2: _V2_AMPERE}
_HOPPER_VERSIONS = {1: _V1_HOPPER, 2: _V2_HOPPER, 3: _V3}
_B200_VERSIONS = {4: 0.71 * _V3 / 0.75}
COMPUTE: Mapping[str, Compute] = {
    "NVIDIA A100": Compute(
        0.72, _V1_AMPERE, f"{_MOSAIC}, of IBM's fms-fsdp and torchtitan with Llama models", _AMPERE_VERSIONS
    ),
    "NVIDIA A100 80GB PCIe": Compute(
        0.65,
        0.9 * _V1_AMPERE,
        "nine tenths of the SXM board's: NVIDIA A100 data sheet, top apps",
        {2: 0.9 * _V2_AMPERE},
    ),
    "NVIDIA H100": Compute(0.60, _V1_HOPPER, f"{_MOSAIC}, of IBM's fms-fsdp, torchtitan and llm.c", _HOPPER_VERSIONS),
    "NVIDIA H200": Compute(0.60, _V1_HOPPER, "as the H100, the same chip", _HOPPER_VERSIONS),
    "NVIDIA GH200": Compute(0.60, _V1_HOPPER, "as the H100, the same chip", _HOPPER_VERSIONS),
    "NVIDIA B200": Compute(0.60, 0.22, "as the H100: no run of its own", _B200_VERSIONS),
    "NVIDIA GeForce RTX 3090": Compute(1.0, 0.5, _TINY),
    "NVIDIA GeForce RTX 4080": Compute(0.95, 0.5, "as the RTX 4090, the same generation"),
    "NVIDIA GeForce RTX 4090": Compute(0.98, 0.5, f"{_LLMQ}, {_TINY}"),
    "NVIDIA GeForce RTX 5090": Compute(1.1, 0.55, "runs of llmq with Qwen2.5 models, at a clock above the sheet's"),
    "NVIDIA RTX A6000": Compute(0.70, 0.4, _TINY),
    "NVIDIA RTX PRO 6000": Compute(0.86, 0.4, "runs of llmq with Qwen2.5 models"),
    "NVIDIA L40S": Compute(0.68, 0.4, "runs of llmq with Qwen2.5 models"),
}


def compute_of(device_name: str) -> Compute | None:
    """Return the fractions of a GPU's data sheet speed that training reaches. None if the GPU is not listed."""
    named = [name for name in COMPUTE if device_name.startswith(name)]
    return COMPUTE[max(named, key=len)] if named else None


_TRIAD = {"DDR4": 0.8, "DDR5": 0.75, "LPDDR5X": 0.8}  # share of the data sheet's bandwidth that a STREAM triad reaches


@dataclass(frozen=True)
class Sheet:
    """The figures of one machine from data sheets and publications, from which its preset is computed.

    Attributes:
        dram_bytes_per_s: Memory bandwidth, by data sheet, of all memory channels of the CPU sockets that a run uses.
        link_raw_bytes_per_s: Rate of the link between host and GPU in one direction, before protocol overhead.
        link: Rate of copies between pinned host memory and the GPU, with its source.
        core: Bytes per second that a single CPU core can read and write in memory, and the name of the core.
        peer: True if a GPU can read another GPU's memory over PCIe. The drivers of GeForce cards do not allow it, so
            data passes through host memory.
        pageable: Rate of copies between unpinned host memory and the GPU, with its source and its quartiles divided by
            the median. None: the rate over PCIe.
        ranks_per_uplink: Number of neighboring GPUs that share one PCIe path to the host.
        stock_update: Published rates of DeepSpeed's update on the CPU, in parameters per second of one rank. They
            include the copy of new parameters to the GPU. The dict maps each number of concurrent ranks to the lowest
            rate, the highest rate, and the source. If it is empty, the rate is computed from ``alone``.
        stock_source: ``assumed`` if the rates in ``stock_update`` were published for a similar machine.
        alone: Fraction of a NUMA node's memory bandwidth that the CPU update of a single rank uses, if
            ``stock_update`` is empty. It is 0.5 for a server with many memory channels, as published for the A100
            node, and 1 for a desktop with two channels.
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
    peer: bool = True
    pageable: tuple[float, Source, str, tuple[float, float]] | None = None
    ranks_per_uplink: int = 1
    stock_update: Mapping[int, tuple[float, float, str]] = field(default_factory=dict)
    stock_source: Source = "published"
    alone: float = 0.5
    network: tuple[float, Source, str] | None = None
    nvlink: tuple[float, str] | None = None
    nvlink_pair: tuple[float, str] | None = None

    @property
    def compute(self) -> Compute:
        """Return the fractions of data sheet speed that matrix products and attention reach on this machine's GPU."""
        found = compute_of(self.device_name)
        if found is None:
            raise KeyError(self.device_name)
        return found

    @property
    def triad_bytes_per_s(self) -> float:
        """Return an estimate of the host memory bandwidth of a triad loop (``a = b + 2 c``), in bytes per second."""
        return _TRIAD[self.dram_kind] * self.dram_bytes_per_s


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


# Over C2C the GPU reads unpinned memory itself, without a staging buffer. A GH200 copied 1 GiB of unpinned memory to
# its GPU at 100 GB/s (github.com/vortex-data/vortex/pull/7815), but only 105 of pinned memory, where others report 346
# GB/s or more. No rate of copies to fresh unpinned memory is known to us: a few cores fault its pages in (24 GB/s).
_GRACE_HOPPER: Fields = {
    "device_name": "NVIDIA GH200 96GB",
    "flops": 989e12,
    "hbm_bytes_per_s": 4.0e12,
    "device_gib": 94.5,
    "dram_kind": "LPDDR5X",
    "link_raw_bytes_per_s": 450e9,
    "link": (297e9, "published", "pinned, over NVLink-C2C: 297 GB/s to the host, 375 to the GPU, arXiv 2407.07850"),
    "pageable": (
        60e9,
        "assumed",
        "the GPU reads unpinned memory itself: 24 to 150 GB/s, of which 100 to the GPU are published (vortex, pull "
        "request 7815)",
        (0.69, 1.46),
    ),
    "storage": (5e9, "assumed", "one PCIe 5 NVMe drive"),
    "core": (30e9, "a Neoverse V2 core"),
    "alone": 1.0,  # SuperOffload, arXiv 2509.21271: DeepSpeedCPUAdam takes 0.1 s for a billion parameters
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
        **_GRACE_HOPPER,
        gpus=1,
        cores=72,
        host_gib=480,
        dram_bytes_per_s=384e9,
        dram_detail="480 GB of LPDDR5X (384 GB/s; 512 with 120 or 240 GB)",
        network=(50e9, "datasheet", "one 400 Gbit/s port"),
    ),
    # HPE Cray EX254n, as in Alps and Isambard-AI: four superchips of 120 GB, each with a network port.
    "gh200-x4": Sheet(
        **_GRACE_HOPPER,
        gpus=4,
        cores=4 * 72,
        host_gib=4 * 120,
        numa_nodes=4,
        dram_bytes_per_s=4 * 512e9,
        dram_detail="four chips with 120 GB of LPDDR5X each (4 x 512 GB/s)",
        nvlink=(450e9, "NVLink 4, 18 links of 25 GB/s, one direction"),
        nvlink_pair=(150e9, "six links between each pair of the four GPUs"),
        network=(100e9, "datasheet", "four 200 Gbit/s ports"),
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
