"""The timeline of a training iteration: the start and the end of every op, predicted or measured."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ebbtide.simulator.display import Shown, table
from ebbtide.simulator.page import write_whole
from ebbtide.simulator.schedule import Lane, OpKind, Schedule, Span, makespan_s

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# The phase of the training loop that an op's time, and the wait before it, are counted with.
PHASE = {
    OpKind.IDLE: "loop",
    OpKind.FORWARD: "forward",
    OpKind.BACKWARD: "backward",
    OpKind.GRADIENT_PASS: "backward",
    OpKind.NORM: "step",
    OpKind.STEP_END: "step",
}
UPDATES = (
    OpKind.UPDATE_HOST,
    OpKind.UPDATE_HOST_EARLY,
    OpKind.UPDATE_DEVICE,
    OpKind.UPDATE_DEVICE_EARLY,
    OpKind.STATE_D2H,
    OpKind.PARAMETER_H2D,
    OpKind.PARAMETER_D2H,
)


@dataclass(frozen=True, slots=True)
class MemorySample:
    """The GPU and host memory in use at one moment of a timeline: right after an op has started or ended."""

    t_s: float
    device_bytes: int
    host_bytes: int


@dataclass(frozen=True, slots=True, repr=False)
class Timeline(Shown):
    """A timeline: the ops of one or more training iterations, with their start and end times.

    Attributes:
        spans: Start and end of every op.
        source: ``predicted`` by the simulator, or ``measured`` by the runtime.
        memory: GPU and host memory in use over time. Empty if unknown.
        storage_bytes: Bytes of optimizer state on drives.
    """

    spans: tuple[Span, ...]
    source: Literal["predicted", "measured"]
    memory: tuple[MemorySample, ...] = ()
    strategy: str = "ebbtide"
    storage_bytes: int = 0

    def in_short(self) -> str:
        return f"{self.strategy}, {self.source}, {self.iteration_s:.3g} s per iteration, {len(self.spans)} ops"

    def records(self) -> list[dict[str, Any]]:
        """Return a list of table rows, one for each op of a timeline, ordered by start."""
        return [
            {
                "op": span.label,
                "lane": span.lane.value,
                "iteration": span.iteration,
                "subgroup": span.subgroup,
                "start_s": span.start_s,
                "end_s": span.end_s,
            }
            for span in sorted(self.spans, key=lambda span: span.start_s)
        ]

    def _repr_html_(self) -> str:
        phases = [{"phase": name.removesuffix("_s"), "seconds": spent} for name, spent in self.phases().items()]
        return f"<p><b>Timeline</b>: {escape(self.in_short())}</p>{table(phases)}"

    @property
    def makespan_s(self) -> float:
        """Return the seconds from a timeline's first start to its last end."""
        return makespan_s(self.spans)

    @property
    def iteration_s(self) -> float:
        """Return the seconds of one iteration of a timeline in the steady state.

        This is the time from the end of one iteration's last backward pass to the end of the next one's. If the
        timeline has a single iteration, return the seconds from the first start to the last end of its ops.
        """
        ends = self.backward_ends
        if len(ends) < 2:
            return self.makespan_s
        first = 1 if len(ends) > 2 else 0
        return (ends[-1] - ends[first]) / (len(ends) - 1 - first)

    @property
    def backward_ends(self) -> list[float]:
        """Return the end of the last backward pass of each iteration of a timeline, in seconds."""
        ends: dict[int, float] = {}
        for span in self.spans:
            if span.kind == OpKind.BACKWARD:
                ends[span.iteration] = max(ends.get(span.iteration, 0.0), span.end_s)
        return [ends[i] for i in sorted(ends)]

    def phases(self, iteration: int | None = None) -> dict[str, float]:
        """Return the seconds of the phases of one iteration of a timeline: forward, backward, step, update, rest of the
        loop.

        Args:
            iteration: Number of the iteration. None: the last one with a complete step.

        Returns:
            A dict with these keys: ``forward_s`` (including waits for parameters whose update is still running),
            ``backward_s``, ``step_s``, ``update_s`` (from the end of backward to the end of the iteration's last
            update), and ``loop_s``, the time outside forward, backward and step. That is the training script's work
            between iterations, and waits for other pipeline stages. Only a predicted timeline has ops for ``loop_s``.
            In a measured one this time counts as forward.
        """
        if iteration is None:
            iteration = max((s.iteration for s in self.spans if s.kind == OpKind.STEP_END), default=0)
        spent = dict.fromkeys(("loop", "forward", "backward", "step"), 0.0)
        step_ends = [s.end_s for s in self.spans if s.kind == OpKind.STEP_END and s.iteration == iteration - 1]
        starts = (s.start_s for s in self.spans if s.iteration == iteration)
        previous_end = max(step_ends) if step_ends else min(starts, default=0.0)
        backward_end = previous_end
        for span in sorted(self._loop_spans(iteration), key=lambda s: s.end_s):
            phase = PHASE[span.kind]
            spent[phase] += max(0.0, span.end_s - previous_end)
            previous_end = max(previous_end, span.end_s)
            if phase == "backward":
                backward_end = previous_end
        updates = [s for s in self.spans if s.iteration == iteration and s.kind in UPDATES]
        update_end = max((s.end_s for s in updates), default=backward_end)
        return {
            "forward_s": spent["forward"],
            "backward_s": spent["backward"],
            "step_s": spent["step"],
            "update_s": max(0.0, update_end - backward_end),
            "loop_s": spent["loop"],
        }

    def _loop_spans(self, iteration: int) -> list[Span]:
        # Spans of copies and updates, which can overlap them, are left out.
        return [
            s
            for s in self.spans
            if s.iteration == iteration
            and s.kind in PHASE
            and (s.kind != OpKind.GRADIENT_PASS or s.lane == Lane.COMPUTE)
        ]

    @property
    def device_peak_bytes(self) -> int:
        return max((m.device_bytes for m in self.memory), default=0)

    @property
    def host_peak_bytes(self) -> int:
        return max((m.host_bytes for m in self.memory), default=0)

    def busy_s(self, lane: Lane) -> float:
        """Return the sum of the durations of a lane's ops, in seconds."""
        return sum(s.end_s - s.start_s for s in self.spans if s.lane == lane)

    def to_perfetto(self, path: str | Path, *others: Timeline) -> None:
        """Write timelines to a trace file for ui.perfetto.dev, each as a process of the trace."""
        write_whole(path, json.dumps(self.perfetto(*others)))

    def perfetto(self, *others: Timeline) -> dict[str, Any]:
        """Return one or more timelines as a JSON document in the trace format of the web page ui.perfetto.dev."""
        events: list[dict[str, Any]] = []
        for pid, timeline in enumerate((self, *others), start=1):
            events.extend(_perfetto_events(timeline, pid))
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw a timeline with matplotlib, one row for each lane, and return the axes."""
        from ebbtide.simulator.drawing import draw_spans

        return draw_spans(self.spans, f"{self.strategy}, {self.source}", ax)


def _perfetto_events(timeline: Timeline, pid: int) -> list[dict[str, Any]]:
    name = f"{timeline.source}: {timeline.strategy}"
    events: list[dict[str, Any]] = [{"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}]
    lanes: Sequence[Lane] = list(Lane)
    for tid, lane in enumerate(lanes, start=1):
        events.append({"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": lane.value}})
    events.extend(
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
        for span in timeline.spans
    )
    for sample in timeline.memory:
        used = {"device": sample.device_bytes, "host": sample.host_bytes}
        events.append({"ph": "C", "pid": pid, "name": "memory_bytes", "ts": sample.t_s * 1e6, "args": used})
    return events


def critical_path(schedule: Schedule, timeline: Timeline, from_s: float, to_s: float) -> tuple[Span, ...]:
    """Return the chain of ops in a simulated timeline that determines the time from ``from_s`` to ``to_s``.

    Each op of the chain starts when the previous one ends. The previous one is the last to end of all ops for
    which the op waits: its dependencies, and the previous op of its lane. Slowdown by a shared link or shared
    memory is not considered.

    Returns:
        The ops' spans in order of time. Empty if no op ends at ``to_s``.
    """
    spans, before = _by_op(schedule, timeline)
    ends = [op for op, span in enumerate(spans) if abs(span.end_s - to_s) <= 1e-9 * (1 + to_s)]
    path: list[Span] = []
    op = min(ends, key=lambda op: spans[op].start_s, default=None)
    while op is not None and spans[op].end_s > from_s:
        path.append(spans[op])
        waited = [*schedule.ops[op].after, *before[op]]
        op = max(waited, key=lambda other: spans[other].end_s, default=None)
    return tuple(reversed(path))


def _by_op(schedule: Schedule, timeline: Timeline) -> tuple[list[Span], list[list[int]]]:
    ran: dict[Lane, list[Span]] = defaultdict(list)
    for span in timeline.spans:
        ran[span.lane].append(span)
    seen: dict[Lane, list[int]] = defaultdict(list)
    spans: list[Span] = []
    before: list[list[int]] = []
    for op in schedule.ops:
        spans.append(ran[op.lane][len(seen[op.lane])])
        before.append(seen[op.lane][-1:])
        seen[op.lane].append(op.id)
    return spans, before
