"""When updates are begun before the norm is known: the rule, for the runtime and for what-ifs."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from functools import cache
from random import Random
from typing import NamedTuple

RECENT = 8  # steps with guesses that are remembered
MOST_WRONG = 1  # of them; one more and guessing pauses
PAUSE_STEPS, LONGEST_PAUSE_STEPS = 16, 256
SAMPLED_STEPS = 20_000


@dataclass
class Guessing:
    """A step that clips or overflows makes all of its guesses wrong, which costs their time. So
    guessing pauses when more than `MOST_WRONG` of the last `RECENT` steps were wrong. It is tried
    again `PAUSE_STEPS` later, from nothing; if the first try is wrong, after twice that, up to
    `LONGEST_PAUSE_STEPS`.
    """

    outcomes: deque[bool] = field(default_factory=lambda: deque(maxlen=RECENT))  # True: right
    pause_steps: int = PAUSE_STEPS
    left: int = 0  # steps without guesses
    trying: bool = False  # the first step behind a pause

    @property
    def on(self) -> bool:
        """The coming step may guess."""
        return self.left == 0

    def stepped(self, right: bool | None) -> None:
        """A step has ended. ``right``: its guesses were; None: there were none."""
        if self.left:
            self.left -= 1
            self.trying = self.left == 0
        elif right is not None:
            self._judge(right)

    def _judge(self, right: bool) -> None:
        self.outcomes.append(right)
        again, self.trying = self.trying and not right, False
        if right:
            wrong = self.outcomes.count(False)
            if not wrong:
                self.pause_steps = PAUSE_STEPS
            return
        if again:
            self.pause_steps = min(2 * self.pause_steps, LONGEST_PAUSE_STEPS)
        if again or self.outcomes.count(False) > MOST_WRONG:
            self.left = self.pause_steps
            self.outcomes.clear()


class Shares(NamedTuple):
    """Of many steps: those whose guesses were right, those whose were wrong, those without any."""

    right: float
    wrong: float
    paused: float


@cache
def shares(clip_rate: float) -> Shares:
    """Under the rule, where each step clips or overflows with this chance, whatever the others
    did.
    """
    rule, rng, counts = Guessing(), Random(0), Counter[bool | None]()
    for _ in range(SAMPLED_STEPS):
        right = rng.random() >= clip_rate if rule.on else None
        rule.stepped(right)
        counts[right] += 1
    return Shares(*(counts[outcome] / SAMPLED_STEPS for outcome in (True, False, None)))
