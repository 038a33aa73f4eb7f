"""The part of the lower bound about GPU memory for gradients that are being copied to the host.

That memory is limited. If it is full, backward waits for copies to end.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from ebbtide.simulator.analysis.bounds.model import Model, Part
from ebbtide.simulator.analysis.bounds.pieces import parts_of_subgroups
from ebbtide.simulator.analysis.bounds.rows import Columns, Rows
from ebbtide.simulator.update.footprint import GRADIENTS_UNDER_WAY_BYTES as ROOM
from ebbtide.simulator.update.recipes import Wait
from numpy.typing import NDArray

Floats = NDArray[np.float64]
ByWay = Mapping[int, Floats]  # of a gradient of each piece
CLOSE = 1e-9
MOST_BESIDE = 3  # gradients under way; where there is room for more, they hide one another's ways


def wait_for_room(m: Model, rows: Rows, every: Columns, waited: int) -> None:
    """Add the rule to the lower bound's linear program that GPU memory for outgoing gradients is limited.

    The backward of a layer starts only if the gradients that are still being copied to the host fit into that
    memory. `EbbtideLoop`, the simulated training loop, follows this rule too. It holds in each micro-batch, and
    over all micro-batches.

    Args:
        every: Number of a group's subgroups that are updated in each way: shape (groups, ways).
        waited: Variable for the seconds that backward waits.
    """
    rows.upper[waited] = 0.0
    chains = [(times, _Chain(m, some)) for times, some in _micro_batches(m) if some]
    if not chains:
        return
    sent = [g for g in m.gradients if Wait.SUM not in g.step.waits]
    before_s = m.rest_s - m.first_s + chains[-1][1].left_s
    most_s = np.max([g.times * g.seconds for g in sent], axis=0) @ m.pieces.count
    if most_s <= before_s and not any(chain.waits for _, chain in chains):
        return
    rows.upper[waited] = np.inf
    rows.at_most(0.0, (waited, -1.0), *((chain.add(rows, every), times) for times, chain in chains))
    rows.at_most(before_s, (waited, -1.0), *((every[:, g.way], g.times * g.seconds) for g in sent))


def _micro_batches(m: Model) -> Iterator[tuple[float, list[Part]]]:
    """Yield the kinds of micro-batches of a training step: the first one, the last one, and those in between.

    Each is yielded as a pair: how often the kind occurs, and the ops that copy its gradients to the host.
    """
    kinds = (
        [(1, Wait.SUM)]
        if m.micro == 1  # below ZeRO-3 it is the last one too (`Workload.serial`)
        else [(1, Wait.SUM | Wait.LAST), (m.micro - 2, Wait.LAST), (1, Wait(0))]
    )
    for times, left_out in kinds:
        if times:
            yield float(times), [g for g in m.gradients if not g.step.waits & left_out]


def _together(m: Model, sent: Floats) -> float:
    """Return the largest number of bytes of gradients on their way to the host when a layer's backward begins.

    The GPU memory for outgoing gradients limits these bytes. Of the oldest gradient only half is counted there.

    Args:
        sent: Bytes of a subgroup's gradient, for each group of subgroups.
    """
    each = float(sent[0] / m.pieces.size[0])
    parts = [n for held in parts_of_subgroups(m.workload) for _, n in held]
    sizes = each * np.sort(np.array(parts, dtype=np.float64))
    before = m.micro * np.cumsum(sizes)
    most = 0.0
    for oldest in np.unique(sizes[sizes <= 2 * ROOM]):
        beside = ROOM - oldest / 2
        fitting = int(np.searchsorted(sizes, beside, side="right"))
        if fitting:
            most = max(most, oldest + min(beside, before[fitting - 1]))
    return most


class _Chain:
    """The gradients of one backward in the order of their completion, for the lower bound of an iteration's time.

    Attributes:
        work: By resource, the seconds that copying the gradients to the host takes.
    """

    def __init__(self, m: Model, parts: Sequence[Part]) -> None:
        self.pieces = pieces = m.pieces
        sent = pieces.size.astype(np.float64) * m.work.bytes.gradient
        self.ways = sorted({p.way for p in parts})
        paces = _paces(m, parts, self.ways, sent)
        self.work = [{way: sent * pace for way, pace in some.items()} for some in paces]
        self.order = np.argsort(-pieces.first)
        # One part is left alone: of a piece, if any of it has been sent, or of what lies between
        # its subgroups, if not all of it has.
        part = sent * pieces.part / pieces.size
        own, first, last = np.maximum(part, _together(m, sent)), pieces.first, pieces.last
        between = (first > first[:, None]) & (first < last[:, None])
        alone = np.where(between, own, own[:, None]).max(axis=1)
        self.alone_s = [max(some.values()) * alone for some in paces]
        self.left_s = float(max(each.max() for each in self.alone_s))
        # No part of a piece and of those behind it leaves before so much of backward is left.
        left = pieces.sent_s[self.order]
        self.begin_s = np.maximum.accumulate(left[::-1])[::-1]
        self.end_s = pieces.end_s[self.order]
        # The last one whose wait precedes a piece's first gradient.
        self.before = [max(np.flatnonzero(self.end_s[:k] > begin), default=-1) for k, begin in enumerate(self.begin_s)]

        # Each pass's gradients come home behind it, but for one that may be left: of a whole block.
        self.bursts = list(self._bursts())
        some = (_Beside.of(m, parts, most) for most in range(1, MOST_BESIDE + 1))
        self.beside = [each for each in some if each is not None]

    def _bursts(self) -> Iterator[tuple[int, int, list[int]]]:
        block = self.pieces.block[self.order]
        for number in dict.fromkeys(block.tolist()):
            places = np.flatnonzero(block == number)
            first, last = int(places[0]), int(places[-1])
            if not first or self.end_s[first - 1] > self.begin_s[first]:
                yield first, last, self.order[first : last + 1].tolist()

    @property
    def waits(self) -> bool:
        """Return whether backward would wait if all of its gradients were copied to the host."""
        some = zip(self.work, self.alone_s, strict=True)
        return any(self._waits(*each) for each in some) or any(b.waits(self) for b in self.beside)

    def _waits(self, work: ByWay, alone_s: Floats) -> bool:
        much_s = np.max(list(work.values()), axis=0) * self.pieces.count
        for _, _, pieces in self.bursts:
            if much_s[pieces].sum() > self._left_of(pieces, alone_s):
                return True
        copied_s = -math.inf
        for begin_s, end_s, left_s, much in zip(
            self.begin_s, self.end_s, alone_s[self.order], much_s[self.order], strict=True
        ):
            copied_s = max(copied_s, -begin_s) + much
            if copied_s + end_s > left_s:
                return True
        return False

    def _left_of(self, pieces: Sequence[int], alone_s: Floats) -> float:
        return float(self.pieces.passes[pieces[0]] * alone_s[pieces].max())

    def add(self, rows: Rows, every: Columns) -> int:
        """Add rows for the waits of one backward to a linear program, and return its variable for their seconds."""
        waited = rows.new(len(self.order))
        for k in range(1, len(waited)):
            rows.at_most(0.0, (int(waited[k - 1]), 1.0), (int(waited[k]), -1.0))
        for work, alone_s in zip(self.work, self.alone_s, strict=True):
            self._come_to_host(rows, every, waited, work, alone_s)
        for beside in self.beside:
            beside.add(self, rows, every, waited)
        return int(waited[-1])

    def _come_to_host(self, rows: Rows, every: Columns, waited: Columns, work: ByWay, alone_s: Floats) -> None:
        """Add rows to the lower bound's linear program for one resource that copies gradients to the host.

        The resource copies one gradient after the other. Backward waits if the GPU memory for outgoing gradients is
        full.
        """
        count, left_s = self.pieces.count, float(alone_s.max())
        sent = rows.new(len(count))  # since the first begins
        for k, p in enumerate(self.order):
            mine = [(every[p, way], float(each[p])) for way, each in work.items()]
            before = [(int(waited[self.before[k]]), 1.0)] if self.before[k] >= 0 else []
            late_s = float(self.begin_s[0] - self.begin_s[k])
            rows.at_most(-late_s, (int(sent[k]), -1.0), *mine, *before)
            less = (every[p, self.ways], (left_s - alone_s[p]) / count[p])
            end_s = float(self.begin_s[0] - self.end_s[k])
            rows.at_most(left_s + end_s, (int(sent[k]), 1.0), (int(waited[k]), -1.0), less)
            if k:
                rows.at_most(0.0, (int(sent[k]), -1.0), (int(sent[k - 1]), 1.0), *mine)
        for first, last, pieces in self.bursts:
            asked = [(every[pieces, way], each[pieces]) for way, each in work.items()]
            before = [(int(waited[first - 1]), 1.0)] if first else []
            limit_s = self._left_of(pieces, alone_s)
            rows.at_most(limit_s, (int(waited[last]), -1.0), *asked, *before)


def _paces(m: Model, parts: Sequence[Part], ways: Sequence[int], sent: Floats) -> list[dict[int, float]]:
    """Return the least seconds per byte of copying gradients to the host, for each resource of the copies.

    A resource is a lane (a queue of ops, such as a copy direction) or a shared capacity, such as DRAM bandwidth.
    A resource that is never slower than another one is left out.

    Returns:
        For each resource, the seconds per byte by number of the way in which a subgroup is updated.
    """
    some = [
        {p.way: float((p.seconds / sent).min()) for p in parts if p.step.lane == lane}
        for lane in dict.fromkeys(p.step.lane for p in parts)
    ]
    some += [{way: float((_taken(parts, way, name) / sent).min()) for way in ways} for name in m.work.limits]
    kept: list[dict[int, float]] = []
    for one in sorted(some, key=lambda each: -sum(each.values())):
        if not any(all(pace <= other.get(way, 0.0) * (1 + CLOSE) for way, pace in one.items()) for other in kept):
            kept.append(one)
    return kept


def _taken(parts: Sequence[Part], way: int, capacity: str) -> Floats:
    total: Floats = np.sum([p.taken_s[capacity] for p in parts if p.way == way], axis=0)
    return total


@dataclass(frozen=True)
class _Beside:
    """A rule of the lower bound for large gradients, of which few fit into the GPU memory for outgoing gradients.

    Each large gradient comes from a single layer, and occupies the memory until its own copy to the host has
    ended. If backward waits, the memory also holds the gradients that the previous layer has completed.

    Attributes:
        most: Number of large gradients that fit into the memory together.
        large: For each group of subgroups, whether its gradients are large.
        waiting: Number of large gradients in the memory while backward waits.
        takes: Seconds of copying a gradient of each group, by way of updating.
        longest_s: Most seconds of one copy that the rule counts.
    """

    most: int
    large: NDArray[np.bool_]
    waiting: int
    takes: ByWay
    longest_s: float

    @classmethod
    def of(cls, m: Model, parts: Sequence[Part], most: int) -> Self | None:
        """Build the rule for a workload, or return None if the workload has no large gradient.

        Args:
            most: Number of large gradients that fit into the memory together. A gradient is large if no more fit.
        """
        least = ROOM / (most + 0.5) / m.work.bytes.gradient
        large = (m.pieces.least > least) & m.pieces.single
        if not large.any():
            return None
        held = parts_of_subgroups(m.workload)
        ends = Counter(some[0][0] for some in held if len(some) == 1 and some[0][1] > least)
        takes = {}
        for way in {p.way for p in parts}:
            takes[way] = np.sum([p.seconds for p in parts if p.way == way], axis=0)
        longest_s = float(np.median(np.max(list(takes.values()), axis=0)[large]))
        return cls(most, large, most + max(ends.values()), takes, longest_s)

    def add(self, chain: _Chain, rows: Rows, every: Columns, waited: Columns) -> None:
        """Add rows for the limited memory of large gradients to the linear program of a lower bound."""
        there = np.flatnonzero(self.large[chain.order])
        for k in there:
            some = chain.order[there[there <= k]]
            asked = [(every[some, w], np.minimum(s[some], self.longest_s)) for w, s in self.takes.items()]
            run_s = float(chain.begin_s[there[0]] - chain.end_s[k])
            left_s = self.most * (run_s + self.longest_s)
            rows.at_most(left_s, (int(waited[k]), -float(self.waiting)), *asked)

    def waits(self, chain: _Chain) -> bool:
        """Return True if backward would have to wait if all large gradients were copied to the host."""
        takes = np.minimum(np.max(list(self.takes.values()), axis=0), self.longest_s)
        there = np.flatnonzero(self.large[chain.order])
        run_s = float(chain.begin_s[there[0]] - chain.end_s[there[-1]])
        all_s = float((takes * chain.pieces.count)[self.large].sum())
        return all_s > self.most * (run_s + self.longest_s)
