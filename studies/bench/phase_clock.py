"""A clock for the phases of a training step (forward, backward, step), which does not slow down training."""

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from studies.bench.byte_gpt import Batch

PHASES = ("forward", "backward", "step")


class PhaseClock:
    """A clock for the phases of training steps: CUDA events on a GPU, wall-clock time on a CPU.

    The GPU is not synchronized before `iterations` is called, so that work that overlaps in training still
    overlaps when it is timed.
    """

    def __init__(self, cuda: bool) -> None:
        self._cuda = cuda
        self._marks: list[Any] = []

    def mark(self) -> None:
        """Mark the end of one training phase, which is also the start of the next one."""
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
        seconds = self.seconds()
        stride = len(PHASES) + 1  # the time between two steps (data, prints) belongs to no phase
        rows = []
        for start in range(0, len(seconds) - len(PHASES) + 1, stride):
            row = dict(zip(PHASES, seconds[start : start + len(PHASES)], strict=True))
            rows.append({**row, "iteration": sum(row.values())})
        return rows


def timed_step(engine: Any, batch: Batch, clock: PhaseClock) -> torch.Tensor:
    """Run one training step of a DeepSpeed engine, and mark the end of each phase on ``clock``.

    Return the detached loss.
    """
    clock.mark()
    loss: torch.Tensor = engine(*batch)
    clock.mark()
    engine.backward(loss)
    clock.mark()
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
