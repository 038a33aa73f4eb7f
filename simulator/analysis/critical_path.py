"""The critical path of a simulated iteration: the chain of ops that decides how long the iteration takes."""

from collections import defaultdict

from ebbtide.simulator.schedule import Lane, Schedule, Span
from ebbtide.simulator.timeline import Timeline


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
