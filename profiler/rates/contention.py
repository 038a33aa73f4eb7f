"""Measurement of an activity's speed (such as a copy's) while another activity runs, relative to its speed alone."""

import contextlib
import statistics
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from ebbtide.profiler.rates.adam import AdamBuffers
from ebbtide.profiler.rates.copies import Endpoints
from ebbtide.profiler.rates.sampling import noise, repeat_s
from ebbtide.profiler.rates.storage import PLANNED_WRITERS, FileToWrite
from ebbtide.runtime.hardware.background import InterpreterEndsError, native_work
from ebbtide.runtime.kernels import host
from ebbtide.simulator.quantity import Quantity, Source

Work = Callable[[], object]


def slowdown(work: Callable[[], object], neighbour: Callable[[], object], budget_s: float, source: Source) -> Quantity:
    """Return the speed of ``work`` while ``neighbour`` runs, divided by its speed alone. 1 means no slowdown.

    Args:
        source: Source that the result records, such as measured or emulated.
    """
    alone_s = statistics.median(repeat_s(work, budget_s / 2))
    stop = threading.Event()

    def keep_busy() -> None:
        with contextlib.suppress(InterpreterEndsError):
            while not stop.is_set():
                with native_work():
                    neighbour()

    thread = threading.Thread(target=keep_busy, daemon=True)
    thread.start()
    try:
        beside = repeat_s(work, budget_s / 2)
    finally:
        stop.set()
        thread.join()
    return Quantity.from_samples([alone_s / s for s in beside], source, "speed beside / alone")


def measure_contention(
    cuda: bool, elements: int, threads: int, file: FileToWrite, budget_s: float
) -> dict[str, Quantity]:
    """Measure how much two activities of a training plan slow each other down when they run at the same time.

    These pairs are measured:

    - CPU Adam, and a copy in either direction
    - GPU work, and a copy in either direction
    - CPU Adam, and writes to the drive

    Without CUDA, copies go from host memory to host memory, and one CPU core does the GPU's work in these pairs.
    Results of pairs with a copy are marked ``emulated``. One more pair is measured without CUDA: forward and backward
    on all CPU cores (``passes``), and writes to the drive.

    Returns:
        By name ``X_while_Y``, the speed of X while Y runs divided by the speed of X alone. Each pair has two results,
        one for each activity as X.
    """
    buffers = AdamBuffers(elements)
    device: Source = "measured" if cuda else "emulated"

    def update() -> None:
        buffers.host_update(threads)

    def write() -> None:
        file.write(PLANNED_WRITERS, as_checkpoints=True)

    compute = _device_compute(cuda)
    pairs: list[tuple[str, Work, str, Work, Source]] = [("host_adam", update, "storage_write", write, "measured")]
    for name, copy in _copies(cuda, elements).items():
        pairs.append(("host_adam", update, name, copy, device))
        pairs.append((name, copy, "compute", compute, device))
    on_all: list[tuple[str, Work, str, Work, Source]] = []
    if not cuda:
        on_all.append(("passes", compute, "storage_write", write, "measured"))
    share_s = budget_s / (2 * len(pairs + on_all))
    with _one_thread():
        result = _both_ways(pairs, share_s)
    return result | _both_ways(on_all, share_s)


def _both_ways(pairs: Sequence[tuple[str, Work, str, Work, Source]], share_s: float) -> dict[str, Quantity]:
    result = {}
    for name, work, other, neighbour, source in pairs:
        result[f"{name}_while_{other}"] = slowdown(work, neighbour, share_s, source)
        result[f"{other}_while_{name}"] = slowdown(neighbour, work, share_s, source)
    return result


@contextmanager
def _one_thread() -> Iterator[None]:
    # With more threads, some would wait for a thread on a busy core. The measurement would then show the operating
    # system's scheduler instead of the contention for memory.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _copies(cuda: bool, elements: int) -> dict[str, Work]:
    if not cuda:
        to, source = torch.zeros(elements), noise(elements)
        return {"copy": lambda: host.copy(to, source)}
    ends = Endpoints(elements * 4, cuda=True)
    return {"h2d": _on_stream(ends.h2d), "d2h": _on_stream(ends.d2h)}


def _device_compute(cuda: bool) -> Work:
    size, dtype = (8192, torch.bfloat16) if cuda else (512, torch.float32)
    a = noise(size * size, "cuda" if cuda else "cpu").view(size, size).to(dtype)
    out = torch.empty_like(a)

    def multiply(stream: Any = None) -> None:
        del stream
        torch.mm(a, a, out=out)

    return _on_stream(multiply) if cuda else multiply


def _on_stream(work: Callable[..., object]) -> Work:
    stream = torch.cuda.Stream()

    def run() -> None:
        with torch.cuda.stream(stream):
            work(stream)
        stream.synchronize()

    return run
