"""What backward waits for, since no more gradients may be under way than fit into their room."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from simulator.analysis.bounds.model import Model, Part
from simulator.analysis.bounds.pieces import Pieces
from simulator.analysis.bounds.rows import Columns, Rows
from simulator.update.footprint import GRADIENTS_UNDER_WAY_BYTES as ROOM
from simulator.update.recipes import Wait

Floats = NDArray[np.float64]


def wait_for_room(m: Model, rows: Rows, every: Columns, waited: int) -> None:
    """Adds that when gradients are complete all but so many bytes go home before the next pass
    begins (`EbbtideLoop`): in each micro-batch, and of all micro-batches one after the other. Sums
    that stay on the device go home in the last one.

    Args:
        every: how many subgroups of a piece are updated in a way: shape (pieces, ways).
        waited: what backward waits for, in seconds.
    """
    rows.upper[waited] = 0.0
    every_home = [g for g in m.gradients if Wait.SUM not in g.step.waits]
    # Below ZeRO-3 all may come in one micro-batch, which is the last one too (`Workload.serial`).
    home = [g for g in every_home if m.micro == 1 or Wait.LAST not in g.step.waits]
    if not home:
        return
    sent = m.pieces.size.astype(np.float64) * home[0].step.work(m.work.bytes)
    x = every[:, sorted({g.way for g in home})]
    sums = [g for g in m.gradients if Wait.SUM in g.step.waits]
    paces = [_pace(m, some, sent) for some in (home, [*home, *sums])]
    together = _together(m, sent)
    chains = [_Chain(m.pieces, sent, pace, together) for pace in paces][: m.micro]
    all_s = sent * (paces[0] + (m.micro - 1) * paces[1])
    before_s = m.rest_s - m.first_s + chains[-1].left_s
    if all_s @ m.pieces.count <= before_s and not any(chain.waits for chain in chains):
        return
    rows.upper[waited] = np.inf
    each = [chain.add(rows, x) for chain in chains]
    rows.at_most(0.0, (waited, -1.0), *zip(each, (1.0, m.micro - 1.0), strict=False))
    if len(every_home) > len(home):  # in the last one all of them go home, on the same ways
        last = chains[0].add(rows, every[:, sorted({g.way for g in every_home})])
        rows.at_most(
            0.0, (waited, -1.0), *zip((*each, last), (1.0, m.micro - 2.0, 1.0), strict=True)
        )
    rows.at_most(before_s, (waited, -1.0), *((column, all_s) for column in x.T))


def _pace(m: Model, parts: Sequence[Part], sent: Floats) -> float:
    """Seconds of a byte that goes these ways, at the least, of whatever has least room for it."""
    found = [
        min(float((p.seconds / sent).min()) for p in parts if p.step.lane == lane)
        for lane in {p.step.lane for p in parts}
    ]
    for name in m.work.limits:
        taken = [
            np.sum([p.taken_s[name] for p in parts if p.way == way], axis=0) / sent
            for way in {p.way for p in parts}
        ]
        found.append(float(np.min(taken)))
    return max(found)


def _together(m: Model, sent: Floats) -> float:
    """Bytes of several gradients that may be under way when a pass begins: with half of the oldest
    one no more than the room. Beside it are others, each as often as there are micro-batches.
    """
    each = float(sent[0] / m.pieces.size[0])
    sizes = each * np.sort(np.array(m.workload.subgroups, dtype=np.float64))
    before = m.micro * np.cumsum(sizes)
    most = 0.0
    for oldest in np.unique(sizes[sizes <= 2 * ROOM]):
        beside = ROOM - oldest / 2
        fitting = int(np.searchsorted(sizes, beside, side="right"))
        if fitting:
            most = max(most, oldest + min(beside, before[fitting - 1]))
    return most


class _Chain:
    """A backward: its pieces in the order in which the last gradient of each is complete."""

    def __init__(self, pieces: Pieces, sent: Floats, pace: float, together: float) -> None:
        """``pace``: seconds of a byte, of all its ways."""
        self.pieces = pieces
        self.order = np.argsort(-self.pieces.first)
        self.each_s = sent * pace
        # One gradient is left alone: of a piece, if any of it has been sent, or of what lies
        # between its subgroups, if not all of it has.
        own, first, last = np.maximum(sent, together), pieces.first, pieces.last
        between = (first > first[:, None]) & (first < last[:, None])
        self.alone_s = pace * np.where(between, own, own[:, None]).max(axis=1)
        self.left_s = float(self.alone_s.max())
        # Of a piece and those behind it none is complete before so much of backward is left.
        left = self.pieces.left_s[self.order]
        self.begin_s = np.maximum.accumulate(left[::-1])[::-1]
        self.end_s = self.pieces.end_s[self.order]
        # The last one whose wait precedes a piece's first gradient.
        self.before = [
            max(np.flatnonzero(self.end_s[:k] > begin), default=-1)
            for k, begin in enumerate(self.begin_s)
        ]

        # Each pass's gradients come home behind it, but for one that may be left: of a whole block.
        self.bursts = list(self._bursts())

    def _bursts(self) -> Iterator[tuple[int, int, list[int]]]:
        """Of each block: its first and its last position, and its pieces."""
        block = self.pieces.block[self.order]
        for number in dict.fromkeys(block.tolist()):
            places = np.flatnonzero(block == number)
            first, last = int(places[0]), int(places[-1])
            if not first or self.end_s[first - 1] > self.begin_s[first]:
                yield first, last, self.order[first : last + 1].tolist()

    @property
    def waits(self) -> bool:
        """Whether it does where all gradients go home."""
        much_s = (self.each_s * self.pieces.count)[self.order]
        for _, _, pieces in self.bursts:
            if (self.each_s * self.pieces.count)[pieces].sum() > self._left_of(pieces):
                return True
        home_s = -math.inf
        for begin_s, end_s, alone_s, much in zip(
            self.begin_s, self.end_s, self.alone_s[self.order], much_s, strict=True
        ):
            home_s = max(home_s, -begin_s) + much
            if home_s + end_s > alone_s:
                return True
        return False

    def _left_of(self, pieces: Sequence[int]) -> float:
        return float(self.pieces.passes[pieces[0]] * self.alone_s[pieces].max())

    def add(self, rows: Rows, x: Columns) -> int:
        """The variable that is what it waits for."""
        count = self.pieces.count
        waited, home = rows.new(len(count)), rows.new(len(count))  # home: since the first begins
        for k, p in enumerate(self.order):
            mine = (x[p], self.each_s[p])
            before = [(int(waited[self.before[k]]), 1.0)] if self.before[k] >= 0 else []
            late_s = float(self.begin_s[0] - self.begin_s[k])
            rows.at_most(-late_s, (int(home[k]), -1.0), mine, *before)
            less = (x[p], (self.left_s - self.alone_s[p]) / count[p])
            end_s = float(self.begin_s[0] - self.end_s[k])
            rows.at_most(self.left_s + end_s, (int(home[k]), 1.0), (int(waited[k]), -1.0), less)
            if k:
                rows.at_most(0.0, (int(home[k]), -1.0), (int(home[k - 1]), 1.0), mine)
                rows.at_most(0.0, (int(waited[k - 1]), 1.0), (int(waited[k]), -1.0))
        for first, last, pieces in self.bursts:
            asked = [(x[p], self.each_s[p]) for p in pieces]
            before = [(int(waited[first - 1]), 1.0)] if first else []
            rows.at_most(self._left_of(pieces), (int(waited[last]), -1.0), *asked, *before)
        return int(waited[-1])
