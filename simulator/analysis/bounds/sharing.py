"""Rules of the lower bound for lanes (queues of ops, such as copy directions) that share the node's bandwidth.

They apply to the time between the gradient norm and the end of the next forward.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from ebbtide.simulator.analysis.bounds.model import Inside, Part
from ebbtide.simulator.analysis.bounds.modes import Modes
from ebbtide.simulator.analysis.bounds.rows import Columns, Term
from ebbtide.simulator.analysis.bounds.window import Window
from ebbtide.simulator.schedule import Lane
from numpy.typing import NDArray

Floats = NDArray[np.float64]
TAILS, NEXT_TAILS = 8, 6  # moments before the window's end
CLOSE = 1e-9


class Sharing:
    """The rules for lanes that slow each other between the gradient norm and the end of the next forward.

    A lane is a queue of ops that run one after the other, such as a copy direction. The rules are rows of the
    lower bound's linear program. The time is divided at several moments, and the work that a lane has done by
    each moment is a variable. Between two moments a lane must do all work that cannot begin before the first
    and cannot end after the second.
    """

    def __init__(self, window: Window, known_s: float) -> None:
        """Add the rules for lanes that slow each other to a lower bound's linear program.

        Args:
            known_s: Known lower bound of the seconds from the gradient norm to the end of the next forward, plus
                the seconds that backward waits.
        """
        self.window, self.rows, self.model = window, window.rows, window.model
        known_s = window.least_inside_s(known_s)
        self.begins = [0.0, *(h for h in self._heads() if 0 < h < known_s / 2)]
        left_s = known_s - self.begins[-1]
        self.ends = [*(t for t in self._tails() if 0 < t <= left_s), 0.0]
        self.done = {lane: d for modes in self.model.modes for lane, d in self._done(modes).items()}
        self.rows.at_most(-self.model.forward_s, (self.done[Lane.COMPUTE][-1], -1.0))
        self._late = self._late_gradients()
        waiting = [p for parts in window.waiting.values() for p in parts]
        behind_s = min((float((p.least_s + p.tail_s).min()) for p in waiting), default=0.0)
        behind_s = min([behind_s, *(float(p.tail_s.min()) for p in self._takers)])
        self._needed_s = behind_s + float(self.model.pieces.tail_s[-1])
        for lane in self.model.lanes:
            for begin in range(len(self.begins)):
                for end in range(len(self.ends)):
                    self._do(lane, begin, end)
            self._follow(lane)

    def _heads(self) -> list[float]:
        """Return the earliest starts of the ops of updates, in seconds after the gradient norm.

        At these moments the rules divide the time. If there are many different starts, some are chosen.
        """
        chosen = set()
        for part in (p for p in self.model.parts if p.inside != Inside.NONE):
            heads = np.unique(part.head_s)
            places = {0, min(1, len(heads) - 1), len(heads) // 2}
            chosen |= {float(heads[i]) for i in places}
        return sorted(chosen)

    def _tails(self) -> list[float]:
        """Return the latest ends of the ops of updates, in seconds before the end of the next forward.

        At these moments the rules divide the time. They are in descending order. If there are many, some are chosen.
        """
        tails = self.model.pieces.tail_s
        found = set(tails.tolist())
        for part in (p for p in self.model.parts if p.inside != Inside.NONE):
            behind_s = tails[-1] if part.inside == Inside.GIVERS else tails
            found |= set((part.tail_s + behind_s).tolist())
        ordered = sorted(found)
        rest = ordered[TAILS:]
        return [*rest[:: max(1, len(rest) // NEXT_TAILS)][::-1], *ordered[:TAILS][::-1]]

    def _done(self, modes: Modes) -> dict[Lane, Columns]:
        heads, tails = np.diff(self.begins), -np.diff(self.ends)
        fixed_s = self.begins[-1] + self.ends[0]
        done = [self.rows.new(len(modes.lanes)) for _ in range(len(heads) + 1 + len(tails))]
        for number, length in enumerate([*heads, None, *tails]):
            seconds = self.rows.new(len(modes.speeds))
            if length is None:
                self.window.behind_the_norm(fixed_s, (seconds, 1.0))
            else:
                self.rows.at_most(float(length), (seconds, 1.0))
            for lane, now in enumerate(done[number]):
                before = [(done[number - 1][lane], -1.0)] if number else []
                self.rows.at_most(0.0, (now, 1.0), (seconds, -modes.speeds[:, lane]), *before)
                self.rows.at_most(0.0, (now, -1.0), *((v, 1.0) for v, _ in before))
        return {lane: np.array([d[i] for d in done]) for i, lane in enumerate(modes.lanes)}

    def _do(self, lane: Lane, begin: int, end: int) -> None:
        begin_s, end_s = self.begins[begin], self.ends[end]
        asked = [t for p in self.model.on(lane) for t in self._between(p, begin_s, end_s)]
        if not begin and end_s <= self._needed_s and lane in self._late:
            asked.append((self._late[lane], 1.0))
        if asked:
            done = self.done[lane]
            before = [(int(done[begin - 1]), 1.0)] if begin else []
            self.rows.at_most(0.0, *asked, *before, (int(done[len(self.begins) - 1 + end]), -1.0))

    def _between(self, part: Part, begin_s: float, end_s: float) -> Iterator[Term]:
        """Yield the linear program's terms for the work of an op that must be done between two moments.

        The op belongs to the updates, such as a copy of state, and has work for each subgroup. A subgroup's work is
        included if it cannot begin before the first moment and cannot end after the second one. If there are more
        staged updates than staging buffers, a later update waits until an earlier one has freed its buffer.

        Args:
            begin_s: First moment, in seconds after the gradient norm.
            end_s: Second moment, in seconds before the end of the next forward.
        """
        window, tails = self.window, self.model.pieces.tail_s
        begun = part.head_s >= begin_s * (1 - CLOSE)
        ended = part.tail_s + tails >= end_s * (1 - CLOSE)
        chosen = begun & ended
        if part.inside == Inside.TAKERS:
            chosen = ended
            if begin_s:
                yield window.early[part.way][~begun], -begin_s
        if part.inside == Inside.GIVERS:
            chosen = begun & (end_s <= tails[-1] or part.way in window.early or ended.all())
            soon = ~ended & (end_s > tails[-1])
            if part.way in window.early and soon.any():
                longest_s = np.full(len(tails), part.alone_s.max())
                for columns, seconds in window.asked(self.model.taker(part), longest_s, soon):
                    yield columns, -seconds
        chosen = chosen & (self.model.pieces.size >= self.model.least_size)
        if chosen.any():
            yield from window.asked(part, part.alone_s, chosen)

    def _follow(self, lane: Lane) -> None:
        """Add the rule that a lane (such as a copy direction) cannot get ahead of the lane with the preceding ops.

        In each update, an op on the lane follows an op on another lane. If staging buffers are reused, a copy of
        state to the GPU follows the copy of another subgroup's state to the host, which frees the buffer.
        """
        parts = self.model.on(lane)
        before = [self._followed(part) for part in parts]
        ahead = {p.step.lane for p in before if p is not None}
        if None in before or len(ahead) != 1 or lane in ahead:
            return
        pairs = [(part, one) for part, one in zip(parts, before, strict=True) if one is not None]
        mine_s = float(np.median([part.alone_s for part, _ in pairs]))
        theirs_s = float(np.median([one.alone_s for _, one in pairs]))
        more: list[Term] = []
        for part, one in pairs:
            if part.inside == Inside.ALL:
                beyond_s = part.alone_s - mine_s / theirs_s * one.alone_s
                more.append((self.window.x[:, part.way], np.maximum(0.0, beyond_s)))
            else:  # of other sizes than what they follow
                larger_s = np.maximum(0.0, part.alone_s - mine_s)
                smaller_s = np.maximum(0.0, theirs_s - one.alone_s) * mine_s / theirs_s
                more += self.window.asked(part, larger_s, slice(None))
                more += self.window.asked(one, smaller_s, slice(None))
        more += [(self._late[lane], 1.0)] if lane in self._late else []
        more = [(columns, -np.asarray(seconds)) for columns, seconds in more]
        for mine, theirs in zip(self.done[lane], self.done[ahead.pop()], strict=True):
            self.rows.at_most(0.0, (int(mine), 1.0), (int(theirs), -mine_s / theirs_s), *more)

    def _followed(self, part: Part) -> Part | None:
        same = [p for p in self.model.parts if p.way == part.way]
        number = same.index(part)
        if part.inside == Inside.TAKERS:
            return next(p for p in same if p.inside == Inside.GIVERS)
        follows = part.inside == Inside.ALL and number and same[number - 1].inside == Inside.ALL
        return same[number - 1] if follows else None

    @property
    def _takers(self) -> list[Part]:
        return [p for p in self.model.parts if p.inside == Inside.TAKERS]

    def _late_gradients(self) -> dict[Lane, int]:
        """Add variables for gradient copies that do not end before the gradient norm. Return them by lane.

        Each variable of the linear program is the seconds that a lane (a queue of ops, such as a copy direction)
        copies gradients after the gradient norm. These copies delay the updates. A layer's gradients can be copied
        only after the layer's backward.
        """
        m, late = self.model, {}
        pieces = m.pieces
        for lane in {g.step.lane for g in self.window.sent}:
            sent, late[lane] = [g for g in self.window.sent if g.step.lane == lane], self.rows.one()
            for p in range(len(pieces)):
                up_to = slice(p + 1)
                some = [(self.window.x[up_to, g.way], g.alone_s[up_to]) for g in sent]
                self._late_by(late[lane], float(pieces.sent_s[p]), *some)
                # Without the parts of the piece's last subgroup that left before its last one.
                before_s = max(float((1 - pieces.completes[p]) * g.alone_s[p]) for g in sent)
                if before_s:
                    self._late_by(late[lane], float(pieces.left_s[p]) + before_s, *some)
            everything = [(self.window.x[:, g.way], g.times * g.alone_s) for g in sent]
            self._late_by(late[lane], m.rest_s - m.first_s, *everything)
        return late

    def _late_by(self, late: int, before_s: float, *terms: Term) -> None:
        """Add the rule that gradient copies run after the gradient norm if backward leaves too little time for them.

        Args:
            late: Variable for the seconds of gradient copies after the gradient norm.
            before_s: Seconds of backward in which the gradients can be copied. Waits of backward come on top.
            terms: Seconds of the gradient copies.
        """
        self.rows.at_most(before_s, (late, -1.0), (self.window.waited, -1.0), *terms)
