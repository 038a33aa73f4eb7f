"""Measurements of host memory bandwidth."""

import torch
from ebbtide.profiler.rates.sampling import doubts, noise, rate, repeat_s
from ebbtide.runtime.kernels import host
from ebbtide.simulator.quantity import Quantity

TRIAD_BYTES_PER_ELEMENT = 16  # two reads, a write, and the read of the line that is overwritten


def triad(elements: int, threads: int, budget_s: float) -> tuple[Quantity, list[str]]:
    """Measure the bytes/s of host memory traffic for ``a = b + 2 c``, and return doubts about stability.

    The traffic includes the read of the overwritten lines.
    """
    a, b, c = (noise(elements) for _ in range(3))
    durations = repeat_s(lambda: host.triad(a, b, c, threads), budget_s)
    detail = f"triad of {elements} fp32 elements, {threads} threads, 16 bytes each"
    quantity = rate(elements * TRIAD_BYTES_PER_ELEMENT, durations, "measured", detail)
    return quantity, doubts("DRAM bandwidth", durations)


def host_copy(elements: int, threads: int, budget_s: float) -> Quantity:
    """Measure the bytes/s of a copy within host memory, with each byte counted once."""
    to, source = torch.zeros(elements), noise(elements)
    durations = repeat_s(lambda: host.copy(to, source, threads), budget_s)
    return rate(source.nbytes, durations, "measured", f"copy, {threads} threads")
