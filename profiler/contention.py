"""How much slower one thing is beside another: measured, not assumed."""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable

import torch

from profiler.adam import AdamBuffers
from profiler.sampling import repeat_s
from runtime.kernels import host
from simulator.quantity import Quantity, Source


def slowdown(
    work: Callable[[], object], neighbour: Callable[[], object], budget_s: float, source: Source
) -> Quantity:
    """Speed of ``work`` beside ``neighbour`` over its speed alone; 1: they do not touch."""
    alone_s = statistics.median(repeat_s(work, budget_s / 2))
    stop = threading.Event()

    def keep_busy() -> None:
        while not stop.is_set():
            neighbour()

    thread = threading.Thread(target=keep_busy, daemon=True)
    thread.start()
    try:
        beside = repeat_s(work, budget_s / 2)
    finally:
        stop.set()
        thread.join()
    return Quantity.from_samples([alone_s / s for s in beside], source, "speed beside / alone")


def host_contention(elements: int, threads: int, budget_s: float) -> dict[str, Quantity]:
    """Host Adam beside a copying thread, and the copy beside host Adam (host memory only)."""
    buffers = AdamBuffers(elements)
    to, source = torch.zeros(elements), torch.rand(elements)

    def update() -> None:
        buffers.host_update(threads)

    def copy() -> None:
        host.copy(to, source)

    return {
        "host_adam_while_copy": slowdown(update, copy, budget_s / 2, "measured"),
        "copy_while_host_adam": slowdown(copy, update, budget_s / 2, "measured"),
    }


def link_contention(elements: int, threads: int, budget_s: float) -> dict[str, Quantity]:
    """Host Adam beside pinned copies each way, and the copies beside host Adam (CUDA)."""
    from profiler.copies import _Endpoints

    buffers, ends = AdamBuffers(elements), _Endpoints(elements * 4, cuda=True)

    def update() -> None:
        buffers.host_update(threads)

    found = {}
    for name, copy in (("h2d", ends.h2d), ("d2h", ends.d2h)):

        def copied(copy: Callable[[], None] = copy) -> None:
            copy()
            torch.cuda.synchronize()

        found[f"host_adam_while_{name}"] = slowdown(update, copied, budget_s / 4, "measured")
        found[f"{name}_while_host_adam"] = slowdown(copied, update, budget_s / 4, "measured")
    return found
