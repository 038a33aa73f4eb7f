"""The critical path of an iteration: the chain of ops that must get shorter for it to get shorter."""

from collections import defaultdict

from ebbtide.simulator.schedule import Lane, Schedule
from ebbtide.simulator.span import Span
from ebbtide.simulator.timeline import Timeline


def critical_path(schedule: Schedule, timeline: Timeline, from_s: float, to_s: float) -> tuple[Span, ...]:
    """Return the ops without a gap between them that end at ``to_s``, back to ``from_s``, in time's order.

    An op starts when the last of what it waits for has ended, its lane's predecessor included; the
    chain goes back along that last one. How fast an op runs is not looked at: sharing a link or
    DRAM with others makes it longer wherever it stands.

    Args:
        timeline: `simulate`'s of the same schedule.

    Returns:
        Nothing where no op ends at ``to_s``.
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
    """Return the span of each op, and its predecessor on its lane: a lane runs its ops in order."""
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
