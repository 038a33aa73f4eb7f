"""The timeline: when every op ran, predicted or measured. One type for both."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from simulator.schedule import Lane, OpKind

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True, slots=True)
class Span:
    """One op's time on its lane, in seconds from the timeline's origin."""

    kind: OpKind
    lane: Lane
    start_s: float
    end_s: float
    subgroup: int = -1
    layer: int = -1
    iteration: int = 0

    @property
    def label(self) -> str:
        part = f" s{self.subgroup}" if self.subgroup >= 0 else ""
        part += f" l{self.layer}" if self.layer >= 0 else ""
        return f"{self.kind.value}{part}"


@dataclass(frozen=True, slots=True)
class MemorySample:
    """Memory in use right after an op started or ended."""

    t_s: float
    device_bytes: int
    host_bytes: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """What happened, op by op.

    Attributes:
        spans: every op's start and end.
        source: ``predicted`` by the simulator or ``measured`` by the runtime.
        memory: device and host memory over time; empty if unknown.
    """

    spans: tuple[Span, ...]
    source: Literal["predicted", "measured"]
    memory: tuple[MemorySample, ...] = ()
    strategy: str = "ebbtide"

    @property
    def makespan_s(self) -> float:
        """From the first start to the last end."""
        if not self.spans:
            return 0.0
        return max(s.end_s for s in self.spans) - min(s.start_s for s in self.spans)

    @property
    def iteration_s(self) -> float:
        """Steady-state time of one iteration: the distance between the ends of two backwards.

        With one iteration only, its makespan.
        """
        ends = self._backward_ends()
        if len(ends) < 2:
            return self.makespan_s
        first = 1 if len(ends) > 2 else 0
        return (ends[-1] - ends[first]) / (len(ends) - 1 - first)

    def _backward_ends(self) -> list[float]:
        ends: dict[int, float] = {}
        for span in self.spans:
            if span.kind == OpKind.BACKWARD:
                ends[span.iteration] = max(ends.get(span.iteration, 0.0), span.end_s)
        return [ends[i] for i in sorted(ends)]

    def phases(self, iteration: int | None = None) -> dict[str, float]:
        """Seconds the training loop spends in forward, backward and step, and the update's length.

        ``forward`` includes waiting for parameters whose update is still running. The iteration
        taken is the last one that has a complete step, unless given.
        """
        if iteration is None:
            iteration = max(
                (s.iteration for s in self.spans if s.kind == OpKind.STEP_END), default=0
            )
        spans = [s for s in self.spans if s.iteration == iteration]
        previous_end = max(
            (
                s.end_s
                for s in self.spans
                if s.kind == OpKind.STEP_END and s.iteration == iteration - 1
            ),
            default=min((s.start_s for s in spans), default=0.0),
        )
        forward_end = _last_end(spans, {OpKind.FORWARD}, previous_end)
        backward_end = _last_end(spans, {OpKind.BACKWARD, OpKind.GRADIENT_PASS}, forward_end)
        step_end = _last_end(spans, {OpKind.STEP_END}, backward_end)
        updates = {
            OpKind.UPDATE_HOST, OpKind.UPDATE_DEVICE, OpKind.STATE_D2H, OpKind.PARAMETER_H2D,
        }  # fmt: skip
        return {
            "forward_s": forward_end - previous_end,
            "backward_s": backward_end - forward_end,
            "step_s": step_end - backward_end,
            "update_s": _last_end(spans, updates, backward_end) - backward_end,
        }

    @property
    def device_peak_bytes(self) -> int:
        return max((m.device_bytes for m in self.memory), default=0)

    @property
    def host_peak_bytes(self) -> int:
        return max((m.host_bytes for m in self.memory), default=0)

    def busy_s(self, lane: Lane) -> float:
        """Seconds during which the lane had an op running."""
        return sum(s.end_s - s.start_s for s in self.spans if s.lane == lane)

    def to_perfetto(self, path: str | Path, *others: Timeline) -> None:
        """Writes a trace that ui.perfetto.dev opens; each timeline becomes one process."""
        events: list[dict[str, Any]] = []
        for pid, timeline in enumerate((self, *others), start=1):
            events.extend(_perfetto_events(timeline, pid))
        document = {"traceEvents": events, "displayTimeUnit": "ms"}
        Path(path).write_text(json.dumps(document))

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draws the lanes over time with matplotlib; returns the axes."""
        from simulator.drawing import draw_timeline

        return draw_timeline(self, ax)


def _last_end(spans: Iterable[Span], kinds: set[OpKind], default: float) -> float:
    return max((s.end_s for s in spans if s.kind in kinds), default=default)


def _perfetto_events(timeline: Timeline, pid: int) -> list[dict[str, Any]]:
    name = f"{timeline.source}: {timeline.strategy}"
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}
    ]
    lanes: Sequence[Lane] = list(Lane)
    for tid, lane in enumerate(lanes, start=1):
        events.append(
            {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": lane.value}}
        )
    for span in timeline.spans:
        events.append(
            {
                "ph": "X",
                "pid": pid,
                "tid": lanes.index(span.lane) + 1,
                "name": span.label,
                "cat": span.kind.value,
                "ts": span.start_s * 1e6,
                "dur": (span.end_s - span.start_s) * 1e6,
                "args": {"iteration": span.iteration, "subgroup": span.subgroup},
            }
        )
    for sample in timeline.memory:
        used = {"device": sample.device_bytes, "host": sample.host_bytes}
        events.append(
            {"ph": "C", "pid": pid, "name": "memory_bytes", "ts": sample.t_s * 1e6, "args": used}
        )
    return events
