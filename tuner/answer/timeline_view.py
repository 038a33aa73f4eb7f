"""The data to draw one training iteration: for each lane, the spans of time during which the lane works."""

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

from ebbtide.simulator.drawing import GROUPS, lane_names
from ebbtide.simulator.schedule import Lane, Schedule, Span
from ebbtide.simulator.timeline import Timeline, critical_path
from ebbtide.tuner.answer.verdict import role_of

MOST_SPANS = 500  # most ops that are drawn of one timeline
MOST_SAMPLES = 300  # most samples that are drawn of a memory curve


def view(timeline: Timeline, schedule: Schedule | None = None) -> dict[str, Any]:
    """Return one iteration of a timeline as JSON data, from the end of one backward pass to the end of the next.

    Args:
        schedule: Schedule that was simulated. If None, the result has no critical path.

    Returns:
        A dict with these keys. ``role``: Kind of training, such as ``stock``. ``duration_s``: Seconds of the iteration.
        ``lanes``: For each lane (a resource that runs one operation at a time), its name, the fraction of time in which
        it is ``idle``, and its spans ``[start_s, end_s, group, label]``. A span is one operation, or several in a row.
        ``start_s`` and ``end_s`` count from the start of the iteration, ``group`` is a category such as ``forward`` or
        ``gradients``, and ``label`` is a text to show. ``critical``: The critical path as spans ``[start_s, end_s,
        group, lane]`` without gaps. ``memory``: The lists ``t_s``, ``device_bytes`` and ``host_bytes`` of equal length.
    """
    start_s, end_s = window(timeline)
    shown = [
        s
        for s in timeline.spans
        if s.kind in GROUPS and s.end_s > start_s and s.start_s < end_s and s.end_s > s.start_s
    ]
    gap_s, names = 0.0, lane_names(shown)
    lanes = _lanes(shown, names, start_s, end_s, gap_s)
    while sum(len(lane["spans"]) for lane in lanes) > MOST_SPANS:
        gap_s = max(2 * gap_s, (end_s - start_s) / 4000)
        lanes = _lanes(shown, names, start_s, end_s, gap_s)
        if gap_s > end_s - start_s:
            break
    return {
        "strategy": timeline.strategy,
        "role": role_of(timeline.strategy),
        "source": timeline.source,
        "duration_s": end_s - start_s,
        "lanes": lanes,
        "critical": _critical(schedule, timeline, names, start_s, end_s) if schedule else [],
        "memory": _memory(timeline, start_s, end_s),
    }


def window(timeline: Timeline) -> tuple[float, float]:
    """Return the start and end in seconds of one iteration in a timeline, from the end of a backward pass to
    the end of the next.

    In a measured timeline, the iteration is one of about average length. If the timeline has no whole
    iteration, return the start and end of the timeline.
    """
    ends = timeline.backward_ends
    pairs = [pair for pair in pairwise(ends[1:] if len(ends) > 2 else ends) if pair[1] > pair[0]]
    if pairs:
        typical_s = timeline.iteration_s
        return min(reversed(pairs), key=lambda pair: abs(pair[1] - pair[0] - typical_s))
    starts = [s.start_s for s in timeline.spans] or [0.0]
    return min(starts), max([s.end_s for s in timeline.spans] or [0.0])


def _critical(schedule: Schedule, timeline: Timeline, names: Mapping[Lane, str], start_s: float, end_s: float) -> Any:
    path: list[list[Any]] = []
    for span in critical_path(schedule, timeline, start_s, end_s):
        if span.end_s == span.start_s:
            continue
        group, lane = GROUPS.get(span.kind, "idle"), names[span.lane]
        if path and path[-1][2:] == [group, lane]:
            path[-1][1] = span.end_s - start_s
        else:
            path.append([max(0.0, span.start_s - start_s), span.end_s - start_s, group, lane])
    return path


def _idle(spans: Iterable[Span], start_s: float, end_s: float) -> float:
    busy_s, reached_s = 0.0, start_s
    for span in sorted(spans, key=lambda s: s.start_s):
        first, last = max(span.start_s, reached_s), min(span.end_s, end_s)
        busy_s += max(0.0, last - first)
        reached_s = max(reached_s, last)
    return 1.0 - busy_s / (end_s - start_s) if end_s > start_s else 0.0


def _lanes(spans: Iterable[Span], names: Mapping[Lane, str], start_s: float, end_s: float, gap_s: float) -> Any:
    by_lane: dict[Lane, list[Span]] = {lane: [] for lane in Lane}
    for span in spans:
        by_lane[span.lane].append(span)
    return [
        {"name": names[lane], "idle": _idle(held, start_s, end_s), "spans": _merged(held, start_s, end_s, gap_s)}
        for lane, held in by_lane.items()
        if held
    ]


def _merged(spans: list[Span], start_s: float, end_s: float, gap_s: float) -> list[list[Any]]:
    merged: list[list[Any]] = []
    counts: list[int] = []
    for span in sorted(spans, key=lambda s: s.start_s):
        group = GROUPS[span.kind]
        first, last = max(span.start_s, start_s) - start_s, min(span.end_s, end_s) - start_s
        if merged and merged[-1][2] == group and first - merged[-1][1] <= gap_s + 1e-9:
            merged[-1][1] = max(merged[-1][1], last)
            counts[-1] += 1
        else:
            merged.append([first, last, group, span.label])
            counts.append(1)
    for row, count in zip(merged, counts, strict=True):
        if count > 1:
            row[3] = f"{row[2]} ({count} in a row)"
    return merged


def _memory(timeline: Timeline, start_s: float, end_s: float) -> dict[str, list[float]]:
    before = [m for m in timeline.memory if m.t_s <= start_s][-1:]
    inside = [*before, *(m for m in timeline.memory if start_s < m.t_s <= end_s)]
    size = max(1, -(-len(inside) // MOST_SAMPLES))
    parts = [inside[i : i + size] for i in range(0, len(inside), size)]
    return {
        "t_s": [max(0.0, part[0].t_s - start_s) for part in parts],
        "device_bytes": [max(m.device_bytes for m in part) for part in parts],
        "host_bytes": [max(m.host_bytes for m in part) for part in parts],
    }
