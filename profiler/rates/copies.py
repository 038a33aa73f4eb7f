"""Measurements of host memory bandwidth, and of copies between host and GPU: each direction, both together, pinned and
pageable memory.
"""

import statistics
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from ebbtide.profiler.rates.sampling import Part, doubts, noise, rate, repeat_s, timed_s
from ebbtide.runtime.kernels import host
from ebbtide.simulator.quantity import Quantity, Source

SIZES_BYTES = tuple(2**n for n in (16, 18, 20, 22, 24, 26))


def fit_latency(sizes_bytes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Fit ``seconds = latency + size / bandwidth`` to measured copies. Return seconds and bytes/s.

    The squares of relative errors are minimized, so that small copies decide the latency and large ones the bandwidth.

    Raises:
        ValueError: There are fewer than two sizes.
    """
    if len(set(sizes_bytes)) < 2:
        raise ValueError(f"at least two copy sizes are needed, but got {list(sizes_bytes)}")
    sizes, times = np.asarray(sizes_bytes, float), np.asarray(seconds, float)
    design = np.stack([np.ones_like(sizes), sizes], axis=1) / times[:, None]
    (latency, per_byte), *_ = np.linalg.lstsq(design, np.ones_like(times), rcond=None)
    per_byte = per_byte if per_byte > 0 else float(np.min(times / sizes))
    return max(0.0, float(latency)), 1.0 / float(per_byte)


class Endpoints:
    """A buffer in host memory and a buffer in GPU memory, with functions that copy from one to the other."""

    def __init__(self, size_bytes: int, cuda: bool, *, pinned: bool = True) -> None:
        self.cuda = cuda
        self.on_host = torch.ones(size_bytes, dtype=torch.uint8)
        if cuda and pinned:
            self.on_host = self.on_host.pin_memory()
        self.on_device = torch.zeros(size_bytes, dtype=torch.uint8, device="cuda" if cuda else "cpu")

    def h2d(self, stream: Any = None) -> None:
        self._copy(self.on_device, self.on_host, stream)

    def d2h(self, stream: Any = None) -> None:
        self._copy(self.on_host, self.on_device, stream)

    def _copy(self, to: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        if not self.cuda:
            host.copy(to, source)
            return
        with torch.cuda.stream(stream):
            to.copy_(source, non_blocking=True)


def measure_copies(cuda: bool, size_bytes: int, budget_s: float) -> Part:
    """Measure the bandwidths and the latency of copies between host and GPU.

    Without CUDA the GPU's buffer is in host memory too, and the results are marked ``emulated``.

    Returns:
        Fields of a `Machine`, and sentences that name unstable measurements.
    """
    source: Source = "measured" if cuda else "emulated"
    clock = cuda_clock if cuda else timed_s
    share_s = budget_s / 6
    ends = Endpoints(size_bytes, cuda)
    down = repeat_s(ends.d2h, share_s, clock)
    up = repeat_s(ends.h2d, share_s, clock)
    both = repeat_s(both_ways(ends, size_bytes), share_s, clock)
    h2d = rate(size_bytes, up, source, f"pinned copies of {size_bytes} bytes")
    d2h = rate(size_bytes, down, source, f"pinned copies of {size_bytes} bytes")
    alone = h2d.median + d2h.median
    duplex = Quantity.from_samples(
        [min(1.2, max(0.31, 2 * size_bytes / s / alone)) for s in both], source, "both at once"
    )
    pageable_h2d, pageable_d2h = _pageable(size_bytes, share_s) if cuda else (None, None)
    notes = [*doubts("H2D bandwidth", up), *doubts("D2H bandwidth", down)]
    notes += doubts("bandwidth of both directions at once", both)
    return {
        "h2d_bytes_per_s": h2d,
        "d2h_bytes_per_s": d2h,
        "duplex_factor": duplex,
        "pageable_h2d_bytes_per_s": pageable_h2d,
        "pageable_d2h_bytes_per_s": pageable_d2h,
        "copy_latency_s": _latency_s(cuda, clock),
    }, notes


def _latency_s(cuda: bool, clock: Callable[[Callable[[], object]], float]) -> float:
    ends = [Endpoints(size, cuda) for size in SIZES_BYTES]
    ways = ([end.h2d for end in ends], [end.d2h for end in ends])
    least_s = [[min(repeat_s(copy, 0.0, clock)) for copy in copies] for copies in ways]
    return statistics.mean(fit_latency(SIZES_BYTES, seconds)[0] for seconds in least_s)


def _pageable(size_bytes: int, share_s: float) -> tuple[Quantity, Quantity]:
    ends = Endpoints(size_bytes, cuda=True, pinned=False)
    detail = f"pageable copies of {size_bytes} bytes"
    up = repeat_s(ends.h2d, share_s, cuda_clock)
    down = repeat_s(ends.d2h, share_s, cuda_clock)
    return rate(size_bytes, up, "measured", detail), rate(size_bytes, down, "measured", detail)


def both_ways(ends: Endpoints, size_bytes: int) -> Callable[[], None]:
    """Return a function that copies from host to GPU and from GPU to host at the same time, to measure both together.

    The function uses two streams, or two threads without CUDA.
    """
    other = Endpoints(size_bytes, ends.cuda)
    if not ends.cuda:

        def by_threads() -> None:
            thread = threading.Thread(target=other.d2h)
            thread.start()
            ends.h2d()
            thread.join()

        return by_threads
    streams = torch.cuda.Stream(), torch.cuda.Stream()

    def by_streams() -> None:
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
        ends.h2d(streams[0])
        other.d2h(streams[1])
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)

    return by_streams


def cuda_clock(work: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3


TRIAD_BYTES_PER_ELEMENT = 16  # two reads, a write, and the read of the cache line that is overwritten


def triad(elements: int, threads: int, budget_s: float) -> tuple[Quantity, list[str]]:
    """Measure host memory bandwidth in bytes/s with ``a = b + 2 c``. Return it with sentences on unstable repeats.

    The bytes include the reads of the memory that is overwritten.
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
