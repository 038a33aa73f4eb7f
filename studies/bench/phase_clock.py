"""A clock for the phases of a training step (forward, backward, step), which does not slow down training.

The clock also records what the threads that train do in each phase: their CPU time, their cores, and what disturbs
them. On a GPU, autograd runs the hooks of backward on a thread of its own. If a phase takes long, the thread's CPU time
tells whether its core was slow (CPU time as long as wall time) or the thread waited.
"""

import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from studies.bench.byte_gpt import Batch

PHASES = ("forward", "backward", "step")
CORE_FIELD = 36  # of /proc/PID/task/TID/stat, behind the program's name: the core that the thread ran on last
STEAL_FIELD = 8  # of the first line of /proc/stat: ticks in which the hypervisor ran somebody else


@dataclass(frozen=True)
class ThreadCounters:
    """The counters of both training threads at one moment. None where the system or the thread does not have one."""

    wall_s: float
    main_s: float
    main_core: int | None
    autograd_s: float | None
    autograd_core: int | None
    steal_s: float | None
    alloc_retries: int | None

    def until(self, end: "ThreadCounters") -> dict[str, Any]:
        """Return what a phase took, from this sample at its start to the sample at its end."""

        def taken(name: str) -> Any:
            before, after = getattr(self, name), getattr(end, name)
            return None if before is None or after is None else after - before

        counted = ("wall_s", "main_s", "autograd_s", "steal_s", "alloc_retries")
        cores = {"main_core": end.main_core, "autograd_core": end.autograd_core}
        return {name: taken(name) for name in counted} | cores


class TrainingThreads:
    """The main thread, which makes this object, and autograd's thread, which the first backward shows."""

    def __init__(self) -> None:
        self._main = _CallingThread()
        self._autograd: _CallingThread | None = None

    def watch(self, loss: torch.Tensor) -> None:
        """Find out in the backward of ``loss`` which thread runs it."""
        loss.register_hook(self._in_backward)

    def _in_backward(self, gradient: torch.Tensor) -> None:
        del gradient
        known = {thread.number for thread in (self._main, self._autograd) if thread is not None}
        if threading.get_native_id() not in known:
            self._autograd = _CallingThread()

    def sample(self) -> ThreadCounters:
        other = self._autograd
        return ThreadCounters(
            time.perf_counter(),
            self._main.cpu_s(),
            self._main.core(),
            None if other is None else other.cpu_s(),
            None if other is None else other.core(),
            _steal_s(),
            _alloc_retries(),
        )


class _CallingThread:
    """The calling thread. Another thread can read its CPU time and its core."""

    def __init__(self) -> None:
        self.number = threading.get_native_id()
        self._clock = time.pthread_getcpuclockid(threading.get_ident())

    def cpu_s(self) -> float:
        return time.clock_gettime(self._clock)

    def core(self) -> int | None:
        try:
            text = Path(f"/proc/self/task/{self.number}/stat").read_text(encoding="utf-8")
        except OSError:
            return None
        return int(text.rpartition(")")[2].split()[CORE_FIELD])


def _steal_s() -> float | None:
    try:
        with Path("/proc/stat").open(encoding="utf-8") as file:
            return int(file.readline().split()[STEAL_FIELD]) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError):
        return None


def _alloc_retries() -> int | None:
    return int(torch.cuda.memory_stats().get("num_alloc_retries", 0)) if torch.cuda.is_available() else None


class PhaseClock:
    """A clock for the phases of training steps: CUDA events on a GPU, wall-clock time on a CPU.

    The GPU is not synchronized before `iterations` is called, so that work that overlaps in training still
    overlaps when it is timed.

    Args:
        threads: The training threads, to record also what they do in each phase. None records times only.
    """

    def __init__(self, cuda: bool, threads: TrainingThreads | None = None) -> None:
        self._cuda, self._threads = cuda, threads
        self._marks: list[Any] = []
        self._samples: list[ThreadCounters] = []

    def watch(self, loss: torch.Tensor) -> None:
        if self._threads is not None:
            self._threads.watch(loss)

    def mark(self) -> None:
        """Mark the end of one training phase, which is also the start of the next one."""
        if self._threads is not None:
            self._samples.append(self._threads.sample())
        if not self._cuda:
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)

    def seconds(self) -> list[float]:
        """Return a list of the seconds between each two successive calls of `mark`."""
        pairs = list(zip(self._marks, self._marks[1:], strict=False))
        if not self._cuda:
            return [b - a for a, b in pairs]
        torch.cuda.synchronize()
        return [a.elapsed_time(b) / 1e3 for a, b in pairs]

    def iterations(self) -> list[dict[str, float]]:
        """Return a list with a dict per timed training step: the seconds by phase, and of the whole ``iteration``."""
        rows = _by_phase(self.seconds())
        return [{**row, "iteration": sum(row.values())} for row in rows]

    def threads(self) -> list[dict[str, dict[str, Any]]]:
        """Return a list with a dict per timed training step: by phase, what the training threads did in the phase."""
        seconds = self.seconds() if self._cuda else [None] * len(self._samples)
        pairs = zip(self._samples, self._samples[1:], seconds, strict=False)
        return _by_phase([{"gpu_s": gpu_s, **begin.until(end)} for begin, end, gpu_s in pairs])


def _by_phase(spans: list[Any]) -> list[dict[str, Any]]:
    stride = len(PHASES) + 1  # the time between two steps (data, prints) belongs to no phase
    starts = range(0, len(spans) - len(PHASES) + 1, stride)
    return [dict(zip(PHASES, spans[start : start + len(PHASES)], strict=True)) for start in starts]


def timed_step(
    engine: Any, batch: Batch, clock: PhaseClock, before_step: Callable[[], None] = lambda: None
) -> torch.Tensor:
    """Run one training step of a DeepSpeed engine, and mark the end of each phase on ``clock``.

    Return the detached loss.
    """
    clock.mark()
    loss: torch.Tensor = engine(*batch)
    clock.watch(loss)
    clock.mark()
    engine.backward(loss)
    clock.mark()
    before_step()
    engine.step()
    clock.mark()
    return loss.detach()


def medians(rows: Sequence[dict[str, float]], warmup: int = 0) -> dict[str, float]:
    """Return the median seconds of each training phase over several steps, as a dict by phase.

    Args:
        rows: Seconds by phase, one dict per step (see `PhaseClock.iterations`).
        warmup: Number of first steps that are left out.

    Raises:
        ValueError: If no step is left.
    """
    kept = rows[warmup:]
    if not kept:
        raise ValueError(
            f"at least one step must be measured, but the run has {len(rows)} steps, of which the first {warmup} are "
            "left out as warm-up"
        )
    return {name: statistics.median(row[name] for row in kept) for name in kept[0]}
