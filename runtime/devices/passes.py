"""A recorder of the time that the GPU computes in forward and in backward of a training step.

The GPU also waits for copies: backward must not run ahead of the copies of gradients to host memory, and forward may
need a layer's parameters that are still being copied to the GPU. Events on the training stream measure these waits
without a synchronization, so that they can be subtracted.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ebbtide.simulator.schedule import OpKind

if TYPE_CHECKING:
    from ebbtide.runtime.devices.clock import Moment
    from ebbtide.runtime.devices.lane import Completion


class Place(NamedTuple):
    """The part of a subgroup that the gradient of one parameter fills, in elements of the subgroup."""

    subgroup: int
    offset: int
    elements: int


@dataclass(frozen=True)
class Pass:
    """The measured forward or backward of the first micro-batch of a training step. All times are of one clock.

    Below ZeRO-3, it can also be the exchange of updated parameters among the ranks at the end of the step.

    Attributes:
        waits: Start and end of each interval in which the GPU waits for a copy. They ascend and do not overlap.
        made: Gradients of a backward in the order in which the GPU computes them, each with the time of its end.
        issued_s: CPU time of the thread that launches the kernels. 0 if it is not known, as on the CPU, where this
            thread also computes. In backward on a GPU, it is counted from the first gradient to the last.
    """

    kind: OpKind
    iteration: int
    start_s: float
    end_s: float
    waits: tuple[tuple[float, float], ...] = ()
    made: tuple[tuple[float, tuple[Place, ...]], ...] = ()
    issued_s: float = 0.0

    @property
    def computed_s(self) -> float:
        """Return the seconds of this forward or backward in which the GPU computes and does not wait for a copy."""
        return self.computed_between_s(self.start_s, self.end_s)

    def computed_between_s(self, start_s: float, end_s: float) -> float:
        """Return for how many seconds the GPU computes between two times of this forward or backward."""
        # Waits for copies are left out.
        waited_s = sum(max(0.0, min(end_s, last) - max(start_s, first)) for first, last in self.waits)
        return max(0.0, end_s - start_s - waited_s)


def disjoint(intervals: Iterable[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Return the union of time intervals as intervals in ascending order that do not overlap.

    Empty intervals are left out.
    """
    merged: list[tuple[float, float]] = []
    for start_s, end_s in sorted(pair for pair in intervals if pair[1] > pair[0]):
        if merged and start_s <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end_s, merged[-1][1])
        else:
            merged.append((start_s, end_s))
    return tuple(merged)


class Clock(Protocol):
    """The methods of `ebbtide.runtime.devices.base.Device` that a recorder of forward and backward needs.

    They return the training stream, and record when the GPU has done the work issued to this stream so far.
    """

    name: str

    def training_streams(self) -> list[Any]: ...
    def moment(self, stream: Any = None) -> Moment: ...


@dataclass
class _OpenPass:
    kind: OpKind
    iteration: int
    begin: Moment
    end: Moment | None = None
    waits: list[tuple[Moment, Completion]] = field(default_factory=list)
    made: list[tuple[Moment, tuple[Place, ...]]] = field(default_factory=list)
    threads: dict[int, tuple[float, float]] = field(default_factory=dict)  # first and latest CPU time of each thread

    def runs(self) -> None:
        now_s, thread = time.thread_time(), threading.get_ident()
        self.threads[thread] = self.threads.get(thread, (now_s,))[0], now_s

    def read(self) -> Pass | None:
        if self.end is None or not self.end.is_past or not all(end.ended for _, end in self.waits):
            return None
        return Pass(
            self.kind,
            self.iteration,
            self.begin.reached_s,
            self.end.reached_s,
            disjoint((begin.reached_s, begin.date_s(end)) for begin, end in self.waits),
            tuple((moment.reached_s, places) for moment, places in self.made),
            max((last_s - first_s for first_s, last_s in self.threads.values()), default=0.0),
        )


class WatchedPasses:
    """A recorder of the times of forward and backward in each step's first micro-batch, and of their waits for copies.

    The recorder runs in the first training steps, which are measured to make a plan (``plan="auto"``). It sees only
    waits of the training stream. In the backward of later micro-batches, DeepSpeed's reduction stream also waits for
    copies, so these micro-batches are not recorded.

    A wait begins when the training stream has done the work issued before it, and ends when the copy ends. If the copy
    ends before this work, there is no wait.

    The methods are called by the training thread, and during backward by autograd's thread. The two threads never call
    them at the same time.
    """

    def __init__(self, device: Clock) -> None:
        self._device = device
        self._stream: Any = None
        self._noted: dict[tuple[OpKind, int], _OpenPass] = {}
        self._now: _OpenPass | None = None

    def begins(self, kind: OpKind, iteration: int) -> None:
        """Record the start of a forward, of a backward, or of the exchange of updated parameters among ranks.

        Only the first start of a backward or of an exchange counts in an iteration, because DeepSpeed's hooks may call
        this method again. Before the backward, the last forward counts: an earlier one was an evaluation or has failed.
        A forward after the start of the backward is not recorded.
        """
        last = OpKind.BACKWARD if kind == OpKind.FORWARD else kind
        if (last, iteration) in self._noted:
            return
        # In hooks of backward, DeepSpeed's reduction stream is the current one.
        self._stream = next(iter(self._device.training_streams()), None)
        self._now = self._noted[kind, iteration] = _OpenPass(kind, iteration, self._device.moment(self._stream))
        self._thread_runs()

    def ends(self, kind: OpKind) -> None:
        """Record the end of the forward or backward whose start was recorded last."""
        if self._now is not None and self._now.kind == kind:
            self._thread_runs()
            self._now.end = self._device.moment(self._stream)
            self._now = None

    def will_wait(self, ends: Iterable[Completion]) -> None:
        """Record that the training stream is about to wait for copies.

        The time of this wait is later subtracted from the measured time of the forward or backward. This method does
        not make the stream wait.
        """
        if self._now is not None:
            missing = [end for end in ends if not end.ended]
            if missing:
                now = self._device.moment(self._stream)
                self._now.waits += [(now, end) for end in missing]

    def made(self, places: Sequence[Place]) -> None:
        """Record that all work for the gradient of a parameter has been issued to the training stream."""
        if self._now is not None and places:
            self._now.made.append((self._device.moment(self._stream), tuple(places)))
            self._thread_runs()

    def _thread_runs(self) -> None:
        if self._now is not None and self._device.name == "cuda":
            self._now.runs()

    def forget(self, iteration: int) -> None:
        """Discard the recorded times of a training iteration's forward and backward."""
        self._noted = {key: noted for key, noted in self._noted.items() if key[1] != iteration}

    def passes(self) -> list[Pass]:
        """Return the recorded forwards and backwards that the GPU has finished, in one list."""
        read = (noted.read() for noted in self._noted.values())
        return [found for found in read if found is not None]
