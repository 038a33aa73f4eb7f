"""A clock for the phases of a training loop (forward, backward, step) that does not slow the loop down."""

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from studies.bench.byte_gpt import Batch

PHASES = ("forward", "backward", "step")


class PhaseClock:
    """A clock for the phases of training: CUDA events on a GPU, wall-clock time on a CPU.

    Nothing is synchronized before `iterations` is called, so that overlapping work stays overlapped.
    """

    def __init__(self, cuda: bool) -> None:
        self._cuda = cuda
        self._marks: list[Any] = []

    def mark(self) -> None:
        """Mark the end of a training phase and the start of the next one."""
        if not self._cuda:
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)

    def seconds(self) -> list[float]:
        """Return the seconds between each two neighboring marks of the clock."""
        pairs = list(zip(self._marks, self._marks[1:], strict=False))
        if not self._cuda:
            return [b - a for a, b in pairs]
        torch.cuda.synchronize()
        return [a.elapsed_time(b) / 1e3 for a, b in pairs]

    def iterations(self) -> list[dict[str, float]]:
        """Return the seconds of each phase and of the whole ``iteration``, for each timed training step."""
        seconds = self.seconds()
        stride = len(PHASES) + 1  # the gap between two steps (data, prints) is nobody's phase
        rows = []
        for start in range(0, len(seconds) - len(PHASES) + 1, stride):
            row = dict(zip(PHASES, seconds[start : start + len(PHASES)], strict=True))
            rows.append({**row, "iteration": sum(row.values())})
        return rows


def timed_step(engine: Any, batch: Batch, clock: PhaseClock) -> torch.Tensor:
    """Run one training step, and mark the clock at each phase's border. Return the detached loss."""
    clock.mark()
    loss: torch.Tensor = engine(*batch)
    clock.mark()
    engine.backward(loss)
    clock.mark()
    engine.step()
    clock.mark()
    return loss.detach()


def medians(rows: Sequence[dict[str, float]], warmup: int = 0) -> dict[str, float]:
    """Return the median seconds of each training phase over the rows after the first ``warmup``.

    Raises:
        ValueError: If no row is left.
    """
    kept = rows[warmup:]
    if not kept:
        raise ValueError(f"at least one step after {warmup} of warm-up is needed, got {len(rows)}")
    return {name: statistics.median(row[name] for row in kept) for name in kept[0]}
