"""Times forward, backward and step of a training loop without slowing it down."""

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from studies.bench.byte_gpt import Batch

PHASES = ("forward", "backward", "step")


class PhaseClock:
    """Times phases on the stream that computes: CUDA events there, the wall clock elsewhere.

    Nothing is synchronised until `iterations` is asked for, so that what overlaps stays
    overlapped.
    """

    def __init__(self, cuda: bool) -> None:
        self._cuda = cuda
        self._marks: list[Any] = []

    def mark(self) -> None:
        """The end of a phase and the start of the next one."""
        if not self._cuda:
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)

    def seconds(self) -> list[float]:
        """Return the seconds between each two neighbouring marks."""
        pairs = list(zip(self._marks, self._marks[1:], strict=False))
        if not self._cuda:
            return [b - a for a, b in pairs]
        torch.cuda.synchronize()
        return [a.elapsed_time(b) / 1e3 for a, b in pairs]

    def iterations(self) -> list[dict[str, float]]:
        """Seconds of each phase, and of the ``iteration``, per timed training step."""
        seconds = self.seconds()
        stride = len(PHASES) + 1  # the gap between two steps (data, prints) is nobody's phase
        rows = []
        for start in range(0, len(seconds) - len(PHASES) + 1, stride):
            row = dict(zip(PHASES, seconds[start : start + len(PHASES)], strict=True))
            rows.append({**row, "iteration": sum(row.values())})
        return rows


def timed_step(engine: Any, batch: Batch, clock: PhaseClock) -> torch.Tensor:
    """`studies.bench.byte_gpt.train_step` with a mark at each phase's border."""
    clock.mark()
    loss: torch.Tensor = engine(*batch)
    clock.mark()
    engine.backward(loss)
    clock.mark()
    engine.step()
    clock.mark()
    return loss.detach()


def medians(rows: Sequence[dict[str, float]], warmup: int = 0) -> dict[str, float]:
    """Median of each phase over the rows after the first ``warmup``, in seconds.

    Raises:
        ValueError: no row is left.
    """
    kept = rows[warmup:]
    if not kept:
        raise ValueError(f"at least one step after {warmup} of warm-up is needed, got {len(rows)}")
    return {name: statistics.median(row[name] for row in kept) for name in kept[0]}
