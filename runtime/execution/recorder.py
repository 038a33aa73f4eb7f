"""The measured timeline: what the runtime did, in the simulator's type."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from simulator.schedule import Lane, OpKind
from simulator.timeline import Span, Timeline

if TYPE_CHECKING:
    from runtime.devices.clock import Mark
    from runtime.devices.lane import Completion
    from runtime.execution.executor import StepRecord

KEPT_SPANS = 64


@dataclass
class Recorder:
    """Notes when forward, backward and step began and ended on the training thread.

    Host clock; on CUDA the training thread runs ahead of the device, so that there the spans of
    forward and backward tell when they were issued, while the lanes' ops carry device times.
    """

    origin_s: float = field(default_factory=time.perf_counter)
    iteration: int = 0
    spans: deque[Span] = field(default_factory=lambda: deque(maxlen=KEPT_SPANS))
    _begun: dict[OpKind, float] = field(default_factory=dict)

    def forward_begins(self) -> None:
        self._begin(OpKind.FORWARD)

    def forward_ends(self) -> None:
        self._end(OpKind.FORWARD)

    def backward_begins(self) -> None:
        self._begin(OpKind.BACKWARD)

    def backward_ends(self) -> None:
        self._end(OpKind.BACKWARD)

    def step_begins(self) -> None:
        self._begin(OpKind.STEP_END)

    def step_ends(self) -> None:
        self._end(OpKind.STEP_END)
        self.iteration += 1

    def _begin(self, kind: OpKind) -> None:
        self._begun[kind] = time.perf_counter()

    def _end(self, kind: OpKind) -> None:
        begun = self._begun.pop(kind, None)
        if begun is not None:
            now = time.perf_counter()
            self.spans.append(
                Span(kind, Lane.COMPUTE, begun - self.origin_s, now - self.origin_s,
                     iteration=self.iteration)
            )  # fmt: skip

    def timeline(self, history: Iterable[StepRecord]) -> Timeline:
        """The spans of the steps in ``history`` and of the training thread around them."""
        records = list(history)
        spans = [s for s in self.spans if not records or s.iteration >= records[0].number]
        for record in records:
            for op, completion in record.ops:
                start_s, end_s = self._times(completion, record.origin)
                spans.append(
                    Span(op.kind, op.lane, start_s, end_s, op.subgroup, iteration=record.number)
                )
        return Timeline(spans=tuple(sorted(spans, key=lambda s: s.start_s)), source="measured")

    def _times(self, completion: Completion, origin: Mark | None) -> tuple[float, float]:
        start, end = completion.start_event, completion.event
        if start is None or end is None or origin is None:
            return completion.start_s - self.origin_s, completion.end_s - self.origin_s
        return origin.date_s(start) - self.origin_s, origin.date_s(end) - self.origin_s
