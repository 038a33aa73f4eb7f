"""Measurements of the rates that limit forward and backward: of matrix products, and of GPU memory."""

from collections.abc import Callable

import torch
from ebbtide.profiler.rates.copies import cuda_clock
from ebbtide.profiler.rates.sampling import noise, rate, repeat_s, timed_s
from ebbtide.simulator.quantity import Quantity, Source

CUDA_SIDE, HOST_SIDE = 8192, 512  # side of a square matrix, large enough to reach the sustained rate


def products(cuda: bool, budget_s: float) -> Quantity:
    """Measure the speed of a large bf16 matrix product in floating-point operations per second.

    Without CUDA, the product runs on the CPU.
    """
    side = CUDA_SIDE if cuda else HOST_SIDE
    a, b = (noise(side * side, _device(cuda)).view(side, side).sub_(0.5).bfloat16() for _ in range(2))
    out = torch.empty_like(a)
    durations = repeat_s(lambda: torch.matmul(a, b, out=out), budget_s, _clock(cuda))
    return rate(2 * side**3, durations, _source(cuda), f"bf16 product of {side} x {side} matrices")


def device_memory(cuda: bool, elements: int, budget_s: float) -> Quantity:
    """Measure the bandwidth of a copy within GPU memory in bytes/s. Each byte counts as one read and one write."""
    source = noise(elements, _device(cuda))
    to = torch.empty_like(source)
    durations = repeat_s(lambda: to.copy_(source), budget_s, _clock(cuda))
    detail = f"copy of {elements} fp32 elements within device memory"
    return rate(2 * source.nbytes, durations, _source(cuda), detail)


def _device(cuda: bool) -> str:
    return "cuda" if cuda else "cpu"


def _source(cuda: bool) -> Source:
    return "measured" if cuda else "emulated"


def _clock(cuda: bool) -> Callable[[Callable[[], object]], float]:
    return cuda_clock if cuda else timed_s
