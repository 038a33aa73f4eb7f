"""The memory in use by this process, on the GPU and on the host."""

import os
from pathlib import Path

import torch

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def device_bytes() -> int:
    """Return the bytes of this process's tensors in GPU memory, or its resident host memory without CUDA."""
    if torch.cuda.is_available():
        return int(torch.cuda.memory_allocated())
    return host_bytes()


def host_bytes() -> int:
    """Return the bytes of host memory that are resident for this process."""
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * _PAGE_BYTES


def reset_peak() -> None:
    """Reset the peak of tensor bytes in GPU memory, so that `peak_device_bytes` measures from now on."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def peak_device_bytes() -> int:
    """Return the peak of this process's tensor bytes in GPU memory since `reset_peak`, or 0 without CUDA."""
    return int(torch.cuda.max_memory_allocated()) if torch.cuda.is_available() else 0
