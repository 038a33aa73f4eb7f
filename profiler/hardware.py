"""What the machine is: cores, memory, NUMA, limits, and the GPU's link."""

from __future__ import annotations

import os
import platform
import resource
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Hardware:
    """Facts that need no timing; ``warnings`` say what should be looked at."""

    cpu_name: str
    cores: int
    numa_nodes: int
    host_memory_bytes: int
    gpu_name: str
    gpus: int
    device_memory_bytes: int
    warnings: tuple[str, ...]


def look(cuda: bool) -> Hardware:
    """Asks the operating system and, on CUDA, NVML."""
    import torch

    host_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    warnings = list(_memlock_warnings(host_bytes)) if cuda else []
    name, gpus, device_bytes = "", 1, host_bytes
    if cuda:
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        name, gpus, device_bytes = (
            properties.name,
            torch.cuda.device_count(),
            properties.total_memory,
        )
        warnings += link_warnings(torch.cuda.current_device())
    nodes = len(list(Path("/sys/devices/system/node").glob("node[0-9]*")))
    return Hardware(
        cpu_name(), len(os.sched_getaffinity(0)), max(1, nodes), host_bytes, name, gpus,
        device_bytes, tuple(warnings),
    )  # fmt: skip


def cpu_name() -> str:
    """The CPU's model name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _memlock_warnings(host_bytes: int) -> list[str]:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or soft >= host_bytes // 2:
        return []
    return [f"only {soft} bytes may be page-locked: raise the limit (ulimit -l unlimited)"]


def link_warnings(index: int) -> list[str]:
    """PCIe links that trained below what device and slot can do, and throttled clocks."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        width = pynvml.nvmlDeviceGetCurrPcieLinkWidth(handle)
        widest = pynvml.nvmlDeviceGetMaxPcieLinkWidth(handle)
        reasons = pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    except Exception as error:  # noqa: BLE001 - NVML may be absent or forbidden; say so, go on
        return [f"NVML does not tell the link's width and the clocks: {error}"]
    found = []
    if width < widest:
        found.append(f"the PCIe link runs with {width} lanes of {widest}")
    slow = (
        pynvml.nvmlClocksThrottleReasonHwSlowdown
        | pynvml.nvmlClocksThrottleReasonSwThermalSlowdown
        | pynvml.nvmlClocksThrottleReasonHwThermalSlowdown
    )
    if reasons & slow:
        found.append(f"the GPU's clocks are throttled (reasons {reasons:#x})")
    return found
