"""Memory in use by this process, on the device and on the host."""

import os
from pathlib import Path

import torch

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def device_bytes() -> int:
    """Bytes that tensors take on the device; without CUDA the device's memory is the process's."""
    if torch.cuda.is_available():
        return int(torch.cuda.memory_allocated())
    return host_bytes()


def host_bytes() -> int:
    """Resident set of this process in bytes."""
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * _PAGE_BYTES


def reset_host_peak() -> None:
    """Reset the counter of `host_peak_bytes`."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def host_peak_bytes() -> int:
    """Return the most that the resident set of this process has taken."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])


def reset_peak() -> None:
    """Reset the counter of `peak_device_bytes`."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def peak_device_bytes() -> int:
    """Return the peak of tensor bytes on the device since `reset_peak`, or 0 without CUDA."""
    return int(torch.cuda.max_memory_allocated()) if torch.cuda.is_available() else 0
