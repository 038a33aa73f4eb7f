"""Measurements of host memory bandwidth."""

import torch
from ebbtide.profiler.rates.sampling import doubts, noise, rate, repeat_s
from ebbtide.runtime.kernels import host
from ebbtide.simulator.quantity import Quantity

TRIAD_BYTES_PER_ELEMENT = 16  # two reads, a write, and the read of the cache line that is overwritten


def triad(elements: int, threads: int, budget_s: float) -> tuple[Quantity, list[str]]:
    """Measure host memory bandwidth in bytes/s with the vector operation ``a = b + 2 c``.

    The bytes include the reads of the memory that is overwritten.

    Returns:
        Bandwidth, and sentences that say if the measurement was unstable.
    """
    a, b, c = (noise(elements) for _ in range(3))
    durations = repeat_s(lambda: host.triad(a, b, c, threads), budget_s)
    detail = f"triad of {elements} fp32 elements, {threads} threads, 16 bytes each"
    quantity = rate(elements * TRIAD_BYTES_PER_ELEMENT, durations, "measured", detail)
    return quantity, doubts("DRAM bandwidth", durations)


def host_copy(elements: int, threads: int, budget_s: float) -> Quantity:
    """Measure the bandwidth of a copy within host memory in bytes/s. Each copied byte counts once."""
    to, source = torch.zeros(elements), noise(elements)
    durations = repeat_s(lambda: host.copy(to, source, threads), budget_s)
    return rate(source.nbytes, durations, "measured", f"copy, {threads} threads")
