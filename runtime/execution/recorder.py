"""The measured timeline of training: the operations that ran, in the format of the simulator's timeline."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ebbtide.runtime.devices.passes import Pass, WatchedPasses
from ebbtide.simulator.schedule import Lane, OpKind, Span
from ebbtide.simulator.timeline import Timeline

if TYPE_CHECKING:
    from ebbtide.runtime.devices.base import Device
    from ebbtide.runtime.devices.clock import Mark, Moment
    from ebbtide.runtime.devices.lane import Completion
    from ebbtide.runtime.execution.executor import StepRecord

KEPT_SPANS = 64


@dataclass(frozen=True, slots=True)
class _TimedPhase:
    """A phase of a training step, such as forward.

    Its begin and end are GPU events on the training stream. Without CUDA, they are times of the host's clock.
    """

    kind: OpKind
    iteration: int
    begin: Moment
    end: Moment


@dataclass
class Recorder:
    """A recorder of the times at which forward, backward and optimizer step begin and end.

    On CUDA the training thread runs ahead of the GPU. The recorder therefore uses events on the training
    stream, which give the GPU's time. On other devices it uses the host's clock.
    """

    device: Device
    origin_s: float = field(default_factory=time.perf_counter)
    iteration: int = 0
    _noted: deque[_TimedPhase] = field(default_factory=lambda: deque(maxlen=KEPT_SPANS))
    _begun: dict[OpKind, Moment] = field(default_factory=dict)
    _issued: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_SPANS))
    _issue_began_s: float = 0.0

    def forward_begins(self) -> None:
        self._begin(OpKind.FORWARD)

    def forward_ends(self) -> None:
        self._end(OpKind.FORWARD)

    def backward_begins(self) -> None:
        self._begin(OpKind.BACKWARD)

    def backward_ends(self) -> None:
        self._end(OpKind.BACKWARD)

    def gather_begins(self) -> None:
        """Record that the ranks begin to exchange updated parameters at the end of a step."""
        # Nothing is recorded unless steps are recorded in detail (see `watch`).
        if self.device.watched is not None:
            self.device.watched.begins(OpKind.PARAMETER_GATHER, self.iteration)

    def gather_ends(self) -> None:
        """Record that the exchange of updated parameters among the ranks has ended."""
        # Nothing is recorded unless steps are recorded in detail (see `watch`).
        if self.device.watched is not None:
            self.device.watched.ends(OpKind.PARAMETER_GATHER)

    def step_begins(self) -> None:
        self._issue_began_s = time.perf_counter()
        self._begin(OpKind.STEP_END)

    def step_ends(self) -> None:
        self._end(OpKind.STEP_END)
        self.iteration += 1

    def issue_waited(self, seconds: float) -> None:
        """Leave out the seconds of the present optimizer step that the CPU has spent waiting for the GPU."""
        self._issue_began_s += seconds

    def issue_ends(self) -> None:
        """Record that the optimizer step has started all updates."""
        self._issued.append(time.perf_counter() - self._issue_began_s)

    @property
    def step_issue_s(self) -> float:
        """Return the median CPU seconds that ``step()`` takes until it has started all updates, over the latest steps.

        Waits for the GPU are left out. The result is 0 if the model runs on the CPU, because its forward and backward
        then use the same cores.
        """
        return statistics.median(self._issued) if self._issued and self.device.name == "cuda" else 0.0

    def watch(self) -> None:
        """Start to measure in forward and backward when each gradient is computed, and when the GPU waits for copies.

        Only the first micro-batch of each step is measured.
        """
        self.device.watched = WatchedPasses(self.device)

    def unwatch(self) -> None:
        """End the measurement that `watch` began, and discard the measured times."""
        # `watch` measures in forward and backward when each gradient is computed, and when the GPU waits for copies.
        self.device.watched = None

    def forget_step(self) -> None:
        """Discard the times that were measured in the latest finished step's forward and backward."""
        # The times tell when each gradient was computed, and when the GPU waited for copies. Nothing happens unless
        # such times are being measured (see `watch`).
        if self.device.watched is not None:
            self.device.watched.forget(self.iteration - 1)

    def passes(self) -> list[Pass]:
        """Return the forwards and backwards that were measured since `watch` was called and that the GPU has finished.

        Each has its start and end, its waits for copies, and the times at which gradients were computed. Only the first
        micro-batch of a step is measured. For ZeRO-1 and 2, the list also contains the exchange of updated parameters
        among ranks at the end of each step.
        """
        return [] if self.device.watched is None else self.device.watched.passes()

    def _begin(self, kind: OpKind) -> None:
        if self.device.watched is not None and kind in (OpKind.FORWARD, OpKind.BACKWARD):
            self.device.watched.begins(kind, self.iteration)
        self._begun[kind] = self.device.moment()

    def _end(self, kind: OpKind) -> None:
        if self.device.watched is not None:
            self.device.watched.ends(kind)
        begun = self._begun.pop(kind, None)
        if begun is not None:
            self._noted.append(_TimedPhase(kind, self.iteration, begun, self.device.moment()))

    def timeline(self, history: Iterable[StepRecord]) -> Timeline:
        """Return a measured timeline: the copies and updates of the given steps, and every forward, backward and
        ``step()`` since the first of these steps.

        A forward, backward or ``step()`` that the GPU has not finished yet is left out.
        """
        records = list(history)
        first = records[0].number if records else 0
        spans = [
            Span(
                noted.kind,
                Lane.COMPUTE,
                noted.begin.reached_s - self.origin_s,
                noted.end.reached_s - self.origin_s,
                iteration=noted.iteration,
            )
            for noted in self._noted
            if noted.iteration >= first and noted.end.is_past
        ]
        for record in records:
            for op, completion in record.ops:
                start_s, end_s = self._times(completion, record.origin)
                spans.append(Span(op.kind, op.lane, start_s, end_s, op.subgroup, iteration=record.number))
        return Timeline(spans=tuple(sorted(spans, key=lambda s: s.start_s)), source="measured")

    def _times(self, completion: Completion, origin: Mark | None) -> tuple[float, float]:
        start, end = completion.start_event, completion.event
        if start is None or end is None or origin is None:
            return completion.start_s - self.origin_s, completion.end_s - self.origin_s
        return origin.date_s(start) - self.origin_s, origin.date_s(end) - self.origin_s
