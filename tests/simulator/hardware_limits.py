"""Upper limits of hardware rates and sizes, computed from published facts and independent of the machine presets.

Each limit of a bandwidth is the number of parallel units times the rate of one. The units are PCIe lanes, the data
bits of memory channels, the pins of the GPU's memory, NVLink links, or network ports.

Sources of common facts:
    PCI Express Base Specification 4.0 and 5.0: 16 and 32 GT/s per lane, 128b/130b. JEDEC JESD79-4 and JESD79-5: 64 data
    bits per channel, at the DIMM's rate in MT/s. JEDEC JESD238 (HBM): 1024 data bits per stack. NVIDIA, NVLink 3 and 4:
    25 GB/s per link and direction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

GIB = 2**30
NVLINK_BYTES_PER_S = 25e9
DIMM_GIB = 256  # the largest DDR4 and DDR5 modules of servers; two to a channel


def pcie_bytes_per_s(generation: int, lanes: int) -> float:
    """Return the bytes per second that a PCIe link carries in one direction. Packet headers are included."""
    return {4: 16e9, 5: 32e9}[generation] * lanes * 128 / 130 / 8


@dataclass(frozen=True)
class Gpu:
    """Figures from a GPU's data sheet, from which upper limits of its memory bandwidth and FLOP/s are computed.

    Attributes:
        memory: Width of the memory bus in bits, and bits/s per pin.
        memory_gib: Number of memory stacks or chips times their size. Less may be enabled.
        tensor: Number of multiprocessors, dense 16-bit flops of each per clock with 32-bit sums, clock in Hz.
        highest_clock_hz: The GPU's highest clock, if it is above the data sheet's clock and published. 0 otherwise.
    """

    memory: tuple[int, float]
    memory_gib: float
    tensor: tuple[int, int, float]
    nvlinks: int = 0
    highest_clock_hz: float = 0.0

    @property
    def memory_bytes_per_s(self) -> float:
        bits, bits_per_s = self.memory
        return bits * bits_per_s / 8

    @property
    def flops(self) -> float:
        count, each, clock_hz = self.tensor
        return count * each * clock_hz

    @property
    def highest_flops(self) -> float:
        return self.flops * max(1.0, self.highest_clock_hz / self.tensor[2])


# NVIDIA A100 Tensor Core GPU Architecture (2020), table 1: 5 stacks of HBM2 at 1215 MHz, 8 GiB
# each, 108 SMs, 312 Tflop/s at 1410 MHz, 12 NVLinks.
A100 = Gpu((5 * 1024, 2.43e9), 5 * 8, (108, 2048, 1.41e9), nvlinks=12)
# NVIDIA A100 80GB data sheet (SXM): the same chip, 5 stacks of HBM2e, 16 GiB each, 2039 GB/s.
A100_80GB = Gpu((5 * 1024, 3.186e9), 5 * 16, (108, 2048, 1.41e9), nvlinks=12)
# NVIDIA A100 80GB PCIe product brief: the same chip, HBM2e at 1512 MHz, 1935 GB/s, no NVLink without a bridge.
A100_PCIE = Gpu((5 * 1024, 3.024e9), 5 * 16, (108, 2048, 1.41e9))
# NVIDIA H100 Tensor Core GPU Architecture (2022), SXM5: 5 stacks of HBM3, 16 GiB each, 3.35 TB/s,
# 132 SMs, 989.4 Tflop/s at 1830 MHz, 18 NVLinks.
H100 = Gpu((5 * 1024, 5.24e9), 5 * 16, (132, 4096, 1.83e9), nvlinks=18)
# NVIDIA H200 data sheet: the same chip, 6 stacks of HBM3e, 141 GB of them enabled, 4.8 TB/s.
H200 = Gpu((6 * 1024, 6.25e9), 141, (132, 4096, 1.83e9), nvlinks=18)
# NVIDIA GH200 Grace Hopper Superchip data sheet: 6 stacks of HBM3, 96 GB, 4 TB/s.
GH200 = Gpu((6 * 1024, 5.25e9), 96, (132, 4096, 1.83e9), nvlinks=18)
# NVIDIA Ada GPU Architecture (2022), appendix A: 384 bits of GDDR6X at 21 Gbit/s, 12 chips of
# 2 GiB, 128 SMs, 165.2 Tflop/s with FP32 accumulate at 2520 MHz.
RTX4090 = Gpu((384, 21e9), 12 * 2, (128, 512, 2.52e9))
# The same paper, RTX 4080: 256 bits at 22.4 Gbit/s, 8 chips, 76 SMs, 97.5 Tflop/s at 2505 MHz.
RTX4080 = Gpu((256, 22.4e9), 8 * 2, (76, 512, 2.505e9))
# NVIDIA Ampere GA102 GPU Architecture (2020), table 9: 384 bits of GDDR6X at 19.5 Gbit/s, 24 chips
# of 1 GiB, 82 SMs, 71 Tflop/s with FP32 accumulate at 1695 MHz.
RTX3090 = Gpu((384, 19.5e9), 24, (82, 512, 1.695e9))
# The same paper, table 11, RTX A6000: GDDR6 at 16 Gbit/s, 48 GiB, 84 SMs, 154.8 Tflop/s at 1.8 GHz.
A6000 = Gpu((384, 16e9), 48, (84, 1024, 1.8e9))
# NVIDIA RTX Blackwell GPU Architecture (2025), appendix A: 512 bits of GDDR7 at 28 Gbit/s, 16 chips
# of 2 GiB, 170 SMs, 209.5 Tflop/s with FP32 accumulate at 2407 MHz. The driver allows 3090 MHz, and 2813 to 2932 MHz
# were sampled under load (https://github.com/kekzl/imp/issues/1671).
RTX5090 = Gpu((512, 28e9), 32, (170, 512, 2.407e9), highest_clock_hz=2.932e9)
# NVIDIA RTX PRO 6000 Blackwell data sheet: the same chip, 188 SMs at 2617 MHz, 96 GB; FP32
# accumulate at the whole rate (503.8 Tflop/s).
RTX_PRO_6000 = Gpu((512, 28e9), 96, (188, 1024, 2.617e9))
# NVIDIA L40S data sheet: 384 bits of GDDR6 at 18 Gbit/s, 48 GB of which ECC takes a sixteenth, 142
# SMs, 362 Tflop/s.
L40S = Gpu((384, 18e9), 45, (142, 1024, 2.49e9))
# NVIDIA DGX B200 data sheet, an eighth: 64 TB/s, 1440 GB, 18 Pflop/s dense in 16 bits, 14.4 TB/s of
# NVLink 5 in both directions (18 links of 50 GB/s).
B200 = Gpu((8 * 1024, 7.8125e9), 180, (148, 8192, 1.856e9), nvlinks=2 * 18)


@dataclass(frozen=True)
class Node:
    """The hardware of a node, from which upper limits of the node's bandwidths and memory sizes are computed.

    Attributes:
        dram: Sockets, channels per socket, transfers/s, and bytes per transfer.
        cores: Cores of all sockets.
        host_gib: Host memory as published. 0 means as much as the channels support.
        link_bytes_per_s: Bytes per second from the host to one GPU, in one direction.
        ports_bits_per_s: Bits per second of all network ports together.
        drive: PCIe generation of the drive's four lanes.
    """

    gpu: Gpu
    gpus: int
    dram: tuple[int, int, float, float]
    cores: int
    link_bytes_per_s: float
    drive: int
    ports_bits_per_s: float = 0.0
    host_gib: float = 0.0

    @property
    def dram_bytes_per_s(self) -> float:
        sockets, channels, rate, width = self.dram
        return sockets * channels * rate * width

    @property
    def most_host_gib(self) -> float:
        sockets, channels, _, _ = self.dram
        return self.host_gib or sockets * channels * 2 * DIMM_GIB


NODES = {
    # Argonne's Polaris, machine overview: one EPYC 7543P (32 cores, 8 channels of DDR4-3200, 512
    # GiB), four A100 on PCIe 4 x16, each pair joined by four NVLinks, two Slingshot 11 adapters
    # (HPE: 200 Gbit/s each), NVMe drives on PCIe 4 x4.
    "a100-node": Node(A100, 4, (1, 8, 3200e6, 8), 32, pcie_bytes_per_s(4, 16), 4, 2 * 200e9, host_gib=512),
    # NVIDIA DGX A100 640GB data sheet: two EPYC 7742 (64 cores, 8 channels of DDR4-3200), 2 TB,
    # eight ports of 200 Gbit/s for the GPUs.
    "a100-80gb": Node(A100_80GB, 8, (2, 8, 3200e6, 8), 2 * 64, pcie_bytes_per_s(4, 16), 4, 8 * 200e9, host_gib=2048),
    # Two sockets of Intel Xeon Scalable of the fourth generation (Intel ARK: 8 channels of
    # DDR5-4800, at most 60 cores), PCIe 5 x16, one ConnectX-7 (NVIDIA: 400 Gbit/s).
    "h100-node": Node(H100, 4, (2, 8, 4800e6, 8), 2 * 60, pcie_bytes_per_s(5, 16), 5, 400e9),
    # NVIDIA DGX H200 data sheet: two Xeon 8480C (56 cores), 2 TB, eight ConnectX-7.
    "h200": Node(H200, 8, (2, 8, 4800e6, 8), 2 * 56, pcie_bytes_per_s(5, 16), 5, 8 * 400e9, host_gib=2048),
    # NVIDIA DGX A100 320GB data sheet: as the 640GB one, 1 TB, A100 of 40 GB.
    "a100-40gb": Node(A100, 8, (2, 8, 3200e6, 8), 2 * 64, pcie_bytes_per_s(4, 16), 4, 8 * 200e9, host_gib=1024),
    # Two EPYC 7543 (32 cores, 8 channels of DDR4-3200), four cards on PCIe 4 x16.
    "a100-pcie": Node(A100_PCIE, 4, (2, 8, 3200e6, 8), 2 * 32, pcie_bytes_per_s(4, 16), 4),
    # NVIDIA DGX H100 data sheet: two Xeon 8480C (56 cores), 2 TB, eight ConnectX-7.
    "h100": Node(H100, 8, (2, 8, 4800e6, 8), 2 * 56, pcie_bytes_per_s(5, 16), 5, 8 * 400e9, host_gib=2048),
    # GH200 data sheet: 72 cores, 480 GB of LPDDR5X on the package, 512 bits at 384 GB/s;
    # NVLink-C2C 900 GB/s in both directions together.
    "gh200": Node(GH200, 1, (1, 1, 6000e6, 64), 72, 450e9, 5, 400e9, host_gib=480),
    # The same data sheet, 120 GB: 512 GB/s. HPE Cray EX254n: four of them, NVLink between each pair, four Slingshot 11
    # ports of 200 Gbit/s.
    "gh200-x4": Node(GH200, 4, (4, 1, 8000e6, 64), 4 * 72, 450e9, 5, 4 * 200e9, host_gib=480),
    # AMD AM5 desktop (Ryzen 9 7950X: 16 cores, two channels of DDR5, 192 GB at most), DIMMs of
    # 5600 MT/s, PCIe 4 x16.
    "rtx4090": Node(RTX4090, 1, (1, 2, 5600e6, 8), 16, pcie_bytes_per_s(4, 16), 5, host_gib=192),
    "rtx4080": Node(RTX4080, 1, (1, 2, 5600e6, 8), 16, pcie_bytes_per_s(4, 16), 5, host_gib=192),
    "rtx5090": Node(RTX5090, 1, (1, 2, 5600e6, 8), 16, pcie_bytes_per_s(5, 16), 5, host_gib=192),
    # AMD AM4 desktop (Ryzen 9 5950X: 16 cores, two channels of DDR4-3200, 128 GB at most).
    "rtx3090": Node(RTX3090, 1, (1, 2, 3200e6, 8), 16, pcie_bytes_per_s(4, 16), 4, host_gib=128),
    # The same desktops with two cards, which divide the 16 lanes.
    "rtx3090-x2": Node(RTX3090, 2, (1, 2, 3200e6, 8), 16, pcie_bytes_per_s(4, 8), 4, host_gib=128),
    "rtx4090-x2": Node(RTX4090, 2, (1, 2, 5600e6, 8), 16, pcie_bytes_per_s(4, 8), 5, host_gib=192),
    "rtx5090-x2": Node(RTX5090, 2, (1, 2, 5600e6, 8), 16, pcie_bytes_per_s(5, 8), 5, host_gib=192),
    # One or two EPYC 7543 (32 cores, 8 channels of DDR4-3200, 128 lanes of PCIe 4).
    "rtx3090-x4": Node(RTX3090, 4, (1, 8, 3200e6, 8), 32, pcie_bytes_per_s(4, 16), 4),
    "rtx3090-x8": Node(RTX3090, 8, (2, 8, 3200e6, 8), 2 * 32, pcie_bytes_per_s(4, 16), 4),
    "rtx4090-x4": Node(RTX4090, 4, (1, 8, 3200e6, 8), 32, pcie_bytes_per_s(4, 16), 4),
    "rtx4090-x8": Node(RTX4090, 8, (2, 8, 3200e6, 8), 2 * 32, pcie_bytes_per_s(4, 16), 4),
    # One or two EPYC 9354 (32 cores, 12 channels of DDR5-4800, 128 lanes of PCIe 5).
    "rtx5090-x4": Node(RTX5090, 4, (1, 12, 4800e6, 8), 32, pcie_bytes_per_s(5, 16), 4),
    "rtx5090-x8": Node(RTX5090, 8, (2, 12, 4800e6, 8), 2 * 32, pcie_bytes_per_s(5, 16), 4),
    # Threadripper PRO 5975WX and 7975WX workstations: 32 cores, 8 channels of DDR4-3200 and
    # DDR5-5200, 128 lanes of PCIe 4 and 5.
    "a6000": Node(A6000, 4, (1, 8, 3200e6, 8), 32, pcie_bytes_per_s(4, 16), 4),
    "rtxpro6000": Node(RTX_PRO_6000, 4, (1, 8, 5200e6, 8), 32, pcie_bytes_per_s(5, 16), 5),
    # Servers for eight L40S: two Xeon Scalable of the fourth generation, one ConnectX-7 (200 Gb/s).
    "l40s": Node(L40S, 8, (2, 8, 4800e6, 8), 2 * 60, pcie_bytes_per_s(4, 16), 5, 200e9),
    # NVIDIA DGX B200 data sheet: two Xeon Platinum 8570 (56 cores, 8 channels of DDR5-5600), 2 TB
    # (4 at most), eight ConnectX-7.
    "b200": Node(B200, 8, (2, 8, 5600e6, 8), 2 * 56, pcie_bytes_per_s(5, 16), 5, 8 * 400e9, host_gib=4096),
}


def limits(name: str) -> dict[str, float]:
    """Return the upper limits of a machine preset's bandwidths, compute speeds, update speeds, memory sizes, and
    numbers of cores and GPUs.

    The limits are computed from published hardware facts in the table `NODES`. The result is a dict from the name of a
    value to its limit. The name is a field of `Machine` or a key of the field ``other_rates``.
    """
    node = NODES[name]
    gpu, link = node.gpu, node.link_bytes_per_s
    socket = node.dram_bytes_per_s / node.dram[0]
    return {
        "h2d_bytes_per_s": link,
        "d2h_bytes_per_s": link,
        "pageable_h2d_bytes_per_s": link,
        "pageable_d2h_bytes_per_s": link,
        "dram_bytes_per_s": node.dram_bytes_per_s,
        # An update reads and writes at least each parameter and moment in 32 bits, in the memory of one socket.
        "host_adam_params_per_s": socket / 24,
        "stock_host_adam_params_per_s": socket / 36,
        "device_adam_params_per_s": gpu.memory_bytes_per_s / 24,
        "device_flops_per_s": gpu.highest_flops,
        "attention_flops_per_s": gpu.highest_flops,
        "device_memory_bytes_per_s": gpu.memory_bytes_per_s,
        "storage_write_bytes_per_s": pcie_bytes_per_s(node.drive, 4),
        "network_bytes_per_s": node.ports_bits_per_s / 8,
        "nvlink_bytes_per_s": gpu.nvlinks * NVLINK_BYTES_PER_S,
        "nvlink_pair_bytes_per_s": gpu.nvlinks * NVLINK_BYTES_PER_S / max(1, node.gpus - 1),
        "device_memory_bytes": gpu.memory_gib * GIB,
        "host_memory_bytes": node.most_host_gib * GIB,
        "cpu_cores": node.cores,
        "gpus_per_node": node.gpus,
    }


# The least fraction of its limit that a rate should reach. A smaller fraction means that a unit or a digit is wrong.
# STREAM reaches 0.75 to 0.9 of DRAM bandwidth, copies 0.75 to 0.9 of PCIe, and products at least half of a GPU's peak.
LEAST = {
    "h2d_bytes_per_s": 0.6,
    "d2h_bytes_per_s": 0.6,
    "dram_bytes_per_s": 0.6,
    "device_flops_per_s": 0.4,
    "attention_flops_per_s": 0.15,
    "device_memory_bytes_per_s": 0.6,
    "device_memory_bytes": 0.95,
    "nvlink_bytes_per_s": 0.9,
    "nvlink_pair_bytes_per_s": 0.9,
    "gpus_per_node": 1.0,
    "cpu_cores": 0.5,
}


def offences(machine: Any) -> list[str]:
    """Return a message for each value of a machine preset that exceeds what its hardware can have, given the
    hardware's limits.
    """
    told = []
    for name, most in limits(machine.name).items():
        value = getattr(machine, name, None) or machine.other_rates.get(name)
        value = getattr(value, "median", value)
        if value is None:
            continue
        least = LEAST.get(name, 0.0) * most
        if not least <= value <= most * 1.001:
            told.append(f"{name} must lie in [{least:.3g}, {most:.3g}], but got {value:.3g}")
    return told


def sheet_offences(sheet: Any, name: str) -> list[str]:
    """Return a message for each data-sheet value of a machine preset that differs by more than 1% from the value that
    follows from published hardware facts, such as the number of PCIe lanes (table `NODES`).

    The compared values are the GPU's FLOP/s and the bandwidths of GPU memory, of host memory, and of the link between
    host and GPU. `tune calibrate` uses the FLOP/s and the link's bandwidth as upper limits of fitted speeds.
    """
    most, node = limits(name), NODES[name]
    pairs = {
        "flops": node.gpu.flops,
        "hbm_bytes_per_s": most["device_memory_bytes_per_s"],
        "link_raw_bytes_per_s": node.link_bytes_per_s,
        "dram_bytes_per_s": node.dram_bytes_per_s,
    }
    return [
        f"{field} must be {limit:.4g} within 1%, but got {getattr(sheet, field):.4g}"
        for field, limit in pairs.items()
        if abs(getattr(sheet, field) / limit - 1) > 0.01
    ]
