"""The order of writing a checkpoint's bytes to storage, and the choice of bytes that are copied before an update.

This module simulates `ebbtide.runtime.checkpoint.stream.persist.BlockWriter`. State is written from its live memory in
the order of the plan's updates. If a subgroup's update is due before its state is written, the rest of the state is
copied into reserved memory. If that memory is full, the update waits until the rest is written.
"""

import heapq
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Part = Literal["live", "copied", "urgent"]
REST = -1  # bytes that belong to no subgroup. They are written last, and no update overwrites them
_NOTHING = 1e-6  # bytes. Smaller amounts are rounding errors


@dataclass(frozen=True, slots=True)
class Segment:
    """An uninterrupted part of writing a checkpoint, with bytes of one subgroup only. Times are seconds since the save
    began.

    Attributes:
        part: What is written. ``live``: the state itself, before the subgroup's update is due. ``copied``: a copy that
            was made before the update. ``urgent``: the state itself, while the update waits.
    """

    subgroup: int
    part: Part
    size_bytes: float
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Due:
    """The time at which an update would overwrite a subgroup's state while a checkpoint is written.

    Updates of the same ``queue`` (on the CPU, or on the GPU) run in order.
    """

    subgroup: int
    at_s: float
    queue: str = ""


@dataclass(frozen=True, slots=True)
class Writing:
    """The order of writing a checkpoint's bytes to storage, and the bytes that are copied first.

    Attributes:
        segments: Parts of the checkpoint, in the order of writing.
        copied: For each subgroup, the bytes of state that are first copied in host memory, because an update
            overwrites the state before the checkpoint has written it.
    """

    segments: tuple[Segment, ...]
    copied: Mapping[int, float]

    def bytes_of(self, part: Part) -> float:
        return sum(s.size_bytes for s in self.segments if s.part == part)


@dataclass(frozen=True, slots=True)
class Pace:
    """The rates of a checkpoint in bytes per second: of normal writes, of urgent writes, and of copies in host memory.

    A write is urgent if an update waits for it.
    """

    write_bytes_per_s: float
    urgent_bytes_per_s: float
    copy_bytes_per_s: float


def order_writing(
    sizes_bytes: Sequence[float],
    due: Sequence[Due],
    pace: Pace,
    budget_bytes: float,
    rest_bytes: float = 0.0,
    turns: Sequence[int] | None = None,
) -> Writing:
    """Plan the order and the times of writing a checkpoint's bytes to storage, while training goes on.

    If an update would overwrite state before it is written, the state is first copied to reserved host memory. The
    result tells which bytes are copied.

    Args:
        due: Subgroups whose state is overwritten by an update, each with the time of the overwriting, in any order. A
            subgroup has at most one entry.
        pace: Speeds of writes and of copies in host memory, in bytes per second.
        budget_bytes: Size of the host memory reserved for copies of state.
        rest_bytes: Bytes to write after the state of all subgroups.
        turns: All subgroups in the order of their updates, which is also the order of writing. None: the order of the
            layers.
    """
    live = {REST: float(rest_bytes), **{i: float(n) for i, n in enumerate(sizes_bytes)}}
    ranks = {subgroup: rank for rank, subgroup in enumerate(turns or range(len(sizes_bytes)))}
    writer = _Writer(pace, budget_bytes, live, ranks)
    queues = _in_order(due)
    late = dict.fromkeys(queues, 0.0)  # the time that each queue has spent waiting so far
    while any(queues.values()):
        name = min((n for n in queues if queues[n]), key=lambda n: queues[n][0].at_s + late[n])
        next_due = queues[name].popleft()
        late[name] += writer.release(next_due.subgroup, next_due.at_s + late[name])
    writer.write_until(math.inf)
    return Writing(tuple(writer.segments), writer.copied)


def _in_order(due: Sequence[Due]) -> dict[str, deque[Due]]:
    queues: dict[str, deque[Due]] = {}
    for one in sorted(due, key=lambda d: d.at_s):
        queues.setdefault(one.queue, deque()).append(one)
    return queues


@dataclass
class _Writer:
    """A simulation of a checkpoint's writer threads as a single writer that is as fast as all threads together."""

    pace: Pace
    free_bytes: float  # free part of the budget
    live: dict[int, float]  # for each subgroup, bytes that are neither written nor copied yet
    ranks: dict[int, int]  # subgroup -> its position in the order of updates
    now_s: float = 0.0
    copied: dict[int, float] = field(default_factory=dict)
    segments: list[Segment] = field(default_factory=list)
    waiting: dict[int, float] = field(default_factory=dict)  # subgroup -> bytes that are copied, but not written yet
    turn: list[tuple[float, int]] = field(default_factory=list)  # heap of subgroups that may have bytes to write
    copying: list[tuple[float, int]] = field(default_factory=list)  # heap: (ended at, subgroup)

    def __post_init__(self) -> None:
        self.turn = sorted(self._order(subgroup) for subgroup in self.live)

    def _order(self, subgroup: int) -> tuple[float, int]:
        return (math.inf if subgroup == REST else self.ranks[subgroup]), subgroup

    def release(self, subgroup: int, at_s: float) -> float:
        # The update would overwrite the bytes that are not yet written.
        self.write_until(at_s)
        left = self.live.get(subgroup, 0.0)
        if left <= _NOTHING:
            return 0.0
        self.live[subgroup] = 0.0
        copied = min(left, self.free_bytes)
        copy_s = 0.0
        if copied > _NOTHING:
            copy_s = copied / self.pace.copy_bytes_per_s
            self.free_bytes -= copied
            self.copied[subgroup] = copied
            heapq.heappush(self.copying, (at_s + copy_s, subgroup))
        if left - copied <= _NOTHING:
            return copy_s
        self._write(subgroup, "urgent", left - copied, self.pace.urgent_bytes_per_s)
        return max(copy_s, self.now_s - at_s)

    def write_until(self, end_s: float) -> None:
        while self.now_s < end_s and (self.turn or self.copying):
            while self.copying and (self.copying[0][0] <= self.now_s or not self.turn):
                ready_s, subgroup = heapq.heappop(self.copying)
                self.now_s = max(self.now_s, ready_s)
                self.waiting[subgroup] = self.copied[subgroup]
                heapq.heappush(self.turn, self._order(subgroup))
            self._write_next(min(end_s, self.copying[0][0] if self.copying else end_s))
        if math.isfinite(end_s):
            self.now_s = max(self.now_s, end_s)

    def _write_next(self, end_s: float) -> None:
        subgroup = self.turn[0][1]
        part: Part = "live" if self.live.get(subgroup) else "copied"
        side = self.live if part == "live" else self.waiting
        most = max(0.0, end_s - self.now_s) * self.pace.write_bytes_per_s
        size = min(side.get(subgroup, 0.0), most)
        self._write(subgroup, part, size, self.pace.write_bytes_per_s)
        side[subgroup] = side.get(subgroup, 0.0) - size
        self.free_bytes += size if part == "copied" else 0.0
        if side[subgroup] <= _NOTHING:
            side[subgroup] = 0.0
            heapq.heappop(self.turn)

    def _write(self, subgroup: int, part: Part, size: float, bytes_per_s: float) -> None:
        begin, self.now_s = self.now_s, self.now_s + size / bytes_per_s
        if size <= 0:
            return
        last = self.segments[-1] if self.segments else None
        if last is not None and (last.subgroup, last.part) == (subgroup, part):
            size, begin = size + last.size_bytes, last.begin_s
            self.segments.pop()
        self.segments.append(Segment(subgroup, part, size, begin, self.now_s))
