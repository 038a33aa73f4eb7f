"""Machines that need not be measured first: published nodes and data sheets, a source per value.

Estimates for what-if questions. A plan to train by comes from a machine that was measured
(`tune profile`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from simulator.machine import Machine
from simulator.quantity import Quantity, Source

GIB = 2**30
# Quartiles over the median, by how a value was obtained: one run says less than many, a data sheet
# tells what cannot be exceeded.
_SPREAD: dict[Source, tuple[float, float]] = {
    "published": (0.95, 1.05),
    "datasheet": (0.85, 1.0),
    "assumed": (0.8, 1.2),
}
# What the update moves: 32 bytes per parameter in device memory (p, m, v both ways, gradient fp32
# or bf16 with its parameter), 28 on the host.
_DEVICE_UPDATE_BYTES, _HOST_UPDATE_BYTES = 32, 28
_TRIAD = 0.8  # of the data sheet's bandwidth, what a triad loop usually reaches
_KERNELS = 0.45  # of the data sheet's dense 16-bit flops, what training usually reaches
DOS = "Deep Optimizer States, arXiv 2410.21316, and its published logs"


def preset(name: str) -> Machine:
    """A machine by name.

    >>> preset("h200").device_memory_bytes // 2**30
    141

    Raises:
        ValueError: no such preset; lists all.
    """
    if name not in PRESETS:
        raise ValueError(f"a machine preset must be one of {', '.join(PRESETS)}, but got {name!r}")
    return PRESETS[name]()


def preset_names() -> tuple[str, ...]:
    """All names, in alphabetical order."""
    return tuple(sorted(PRESETS))


def _value(median: float, source: Source, detail: str) -> Quantity:
    low, high = _SPREAD[source]
    return Quantity(
        median=median, q1=low * median, q3=high * median, n=1, source=source, detail=detail
    )


def _memory_rates(
    dram: float, dram_detail: str, hbm: float, flops: float, device: str
) -> dict[str, Quantity]:
    """What follows from bandwidths: the updates, copies in host memory, matrix products."""
    triad = _TRIAD * dram
    return {
        "dram_bytes_per_s": _value(triad, "datasheet", f"{_TRIAD:.0%} of {dram_detail}"),
        "host_adam_params_per_s": _value(
            triad / _HOST_UPDATE_BYTES, "assumed",
            f"bound by DRAM at {_HOST_UPDATE_BYTES} bytes per parameter",
        ),
        "device_adam_params_per_s": _value(
            _TRIAD * hbm / _DEVICE_UPDATE_BYTES, "datasheet",
            f"{_TRIAD:.0%} of {device}'s {hbm / 1e12:g} TB/s at {_DEVICE_UPDATE_BYTES} bytes "
            "per parameter",
        ),
        "device_flops_per_s": _value(
            _KERNELS * flops, "assumed",
            f"{_KERNELS:.0%} of {device}'s {flops / 1e12:g} dense bf16 Tflop/s",
        ),
    }  # fmt: skip


def _link(rate: float, source: Source, detail: str) -> dict[str, Quantity]:
    return {
        "h2d_bytes_per_s": _value(rate, source, detail),
        "d2h_bytes_per_s": _value(rate, source, detail),
    }


def _a100_node() -> Machine:
    """Four A100-40GB on PCIe 4, 32 cores, 512 GB: the published A100 runs."""
    rates = _memory_rates(204.8e9, "8 channels of DDR4-3200 (204.8 GB/s)", 1.555e12, 312e12,
                          "A100-40GB")  # fmt: skip
    stock = _value(1.4e9, "published", f"CPU Adam with write-back, one rank: {DOS}")
    third = {ranks: Quantity.exact(rate / (ranks * 1.4e9), "published", f"CPU Adam, {ranks} ranks")
             for ranks, rate in ((2, 1.9e9), (4, 1.9e9))}  # fmt: skip
    return Machine(
        name="a100-node", device_kind="cuda", device_name="NVIDIA A100-SXM4-40GB",
        gpus_per_node=4, cpu_cores=32, host_memory_bytes=512 * GIB, device_memory_bytes=40 * GIB,
        **{**rates, **_link(25e9, "published", f"pinned, PCIe 4: {DOS}")},
        stock_host_adam_params_per_s=stock,
        rank_shares={ranks: {"dram": share} for ranks, share in third.items()},
        network_bytes_per_s=_value(50e9, "datasheet", "two 200 Gbit/s ports"),
        storage_write_bytes_per_s=_value(2e9, "assumed", "one NVMe drive"),
        other_rates={"nvlink_bytes_per_s": _value(300e9, "datasheet", "NVLink 3, one direction")},
        measured_with="preset",
    )  # fmt: skip


def _h100_node() -> Machine:
    """Four H100-80GB on PCIe 5, 96 cores, 512 GB: the published H100 runs."""
    rates = _memory_rates(614e9, "two sockets of 8 channels DDR5-4800 (614 GB/s)", 3.35e12, 989e12,
                          "H100 SXM")  # fmt: skip
    return Machine(
        name="h100-node", device_kind="cuda", device_name="NVIDIA H100 80GB HBM3",
        gpus_per_node=4, cpu_cores=96, numa_nodes=2, host_memory_bytes=512 * GIB,
        device_memory_bytes=80 * GIB,
        **{**rates, **_link(52e9, "published", f"pinned, PCIe 5, 50 to 55 GB/s: {DOS}")},
        stock_host_adam_params_per_s=_value(1.7e9, "published", f"CPU Adam, 46 cores: {DOS}"),
        network_bytes_per_s=_value(50e9, "assumed", "one 400 Gbit/s port"),
        storage_write_bytes_per_s=_value(5e9, "assumed", "one PCIe 4 NVMe drive"),
        other_rates={"nvlink_bytes_per_s": _value(450e9, "datasheet", "NVLink 4, one direction")},
        measured_with="preset",
    )  # fmt: skip


def _h200() -> Machine:
    """One H200 with its eighth of a usual host."""
    rates = _memory_rates(614e9, "two sockets of 8 channels DDR5-4800 (614 GB/s)", 4.8e12, 989e12,
                          "H200")  # fmt: skip
    return Machine(
        name="h200", device_kind="cuda", device_name="NVIDIA H200", gpus_per_node=8,
        cpu_cores=112, numa_nodes=2, host_memory_bytes=2048 * GIB, device_memory_bytes=141 * GIB,
        **{**rates, **_link(55e9, "assumed", "as on H100: PCIe 5 x16, 64 GB/s raw")},
        stock_host_adam_params_per_s=_value(1.7e9, "assumed", f"as on the H100 node: {DOS}"),
        network_bytes_per_s=_value(400e9, "datasheet", "eight 400 Gbit/s ports"),
        storage_write_bytes_per_s=_value(5e9, "assumed", "one PCIe 4 NVMe drive"),
        other_rates={"nvlink_bytes_per_s": _value(450e9, "datasheet", "NVLink 4, one direction")},
        measured_with="preset",
    )  # fmt: skip


def _rtx4090() -> Machine:
    """A desktop: RTX 4090, 16 cores, 128 GB of two-channel DDR5."""
    rates = _memory_rates(89.6e9, "two channels of DDR5-5600 (89.6 GB/s)", 1.008e12, 165e12,
                          "RTX 4090")  # fmt: skip
    return Machine(
        name="rtx4090", device_kind="cuda", device_name="NVIDIA GeForce RTX 4090",
        cpu_cores=16, host_memory_bytes=128 * GIB, device_memory_bytes=24 * GIB,
        **{**rates, **_link(25e9, "assumed", "PCIe 4 x16, 32 GB/s raw")},
        stock_host_adam_params_per_s=_value(
            _TRIAD * 89.6e9 / 46, "assumed", "bound by DRAM at stock's 46 bytes per parameter"
        ),
        storage_write_bytes_per_s=_value(4e9, "assumed", "one PCIe 4 NVMe drive"),
        measured_with="preset",
    )  # fmt: skip


def _gh200() -> Machine:
    """Grace Hopper: the link is NVLink-C2C, faster than host memory."""
    rates = _memory_rates(512e9, "LPDDR5X (512 GB/s)", 4.0e12, 989e12, "GH200")
    return Machine(
        name="gh200", device_kind="cuda", device_name="NVIDIA GH200 96GB", cpu_cores=72,
        host_memory_bytes=480 * GIB, device_memory_bytes=96 * GIB,
        **{**rates, **_link(_TRIAD * 450e9, "datasheet", "80% of NVLink-C2C's 450 GB/s a way")},
        stock_host_adam_params_per_s=_value(
            _TRIAD * 512e9 / 46, "assumed", "bound by DRAM at stock's 46 bytes per parameter"
        ),
        network_bytes_per_s=_value(50e9, "datasheet", "one 400 Gbit/s port"),
        storage_write_bytes_per_s=_value(5e9, "assumed", "one PCIe 5 NVMe drive"),
        measured_with="preset",
    )  # fmt: skip


PRESETS: Mapping[str, Callable[[], Machine]] = {
    "a100-node": _a100_node,
    "gh200": _gh200,
    "h100-node": _h100_node,
    "h200": _h200,
    "rtx4090": _rtx4090,
}
