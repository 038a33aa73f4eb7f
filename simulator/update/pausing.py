"""The rule that decides, step by step, whether updates may begin before the gradient norm is known.

A step that clips or overflows makes its early updates wrong: they are redone, which costs time. The rule
keeps an account. A step whose early updates were right pays in the time that it has saved, a wrong one takes
out the time that it has lost, and each step adds a small allowance. Updates begin early only while the
account covers a wrong step. So whatever the clip rate is, and however it bursts or drifts, training loses at
most the allowance of its steps and the first balance, compared with the same plan without early updates. If
more steps are right than the break-even share asks for, the account stays full and no step pauses.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

ASSUMED_CLIP_RATE = 0.10  # if no clip rate is given
ASSUMED_STEPS = 16  # that show it, beside those that have been counted
ALLOWANCE = 0.005  # of an iteration without early updates: what a step may lose on average
FIRST_BALANCE = 2.0  # wrong steps that the account covers at the start
FULLEST_BALANCE = 12.0  # wrong steps that the account covers at most


class StepTimes(NamedTuple):
    """Times of one iteration under a plan, in seconds.

    Attributes:
        right_s: the early updates are right.
        plain_s: all updates wait for the norm.
        wrong_s: the early updates are redone.
    """

    right_s: float
    plain_s: float
    wrong_s: float

    @property
    def saves(self) -> float:
        """Share of a plain iteration that right early updates save."""
        return (self.plain_s - self.right_s) / self.plain_s

    @property
    def costs(self) -> float:
        """Share of a plain iteration that wrong early updates cost."""
        return max(0.0, (self.wrong_s - self.plain_s) / self.plain_s)

    @property
    def break_even(self) -> float:
        """Share of wrong steps at which early updates save nothing on average."""
        span_s = self.wrong_s - self.right_s
        return 1.0 if span_s <= 0 else min(1.0, max(0.0, (self.plain_s - self.right_s) / span_s))

    def mean_s(self, clip_rate: float) -> float:
        """Return the mean iteration under the rule if this share of the steps clips."""
        always_s = (1 - clip_rate) * self.right_s + clip_rate * self.wrong_s
        return min(always_s, (1 + ALLOWANCE) * self.plain_s)


# A plan that does not predict them: early updates save as much as they cost.
UNKNOWN = StepTimes(right_s=0.85, plain_s=1.0, wrong_s=1.15)


@dataclass
class PauseRule:
    """The account of one run under one plan. Shares are of an iteration without early updates.

    Attributes:
        times: of the plan's iterations, predicted or measured.
        steps: number of optimizer steps so far; ``clipped``: those that clipped or overflowed.
    """

    times: StepTimes = UNKNOWN
    steps: int = 0
    clipped: int = 0
    balance: float = field(init=False)

    def __post_init__(self) -> None:
        self.balance = FIRST_BALANCE * self.times.costs

    @property
    def on(self) -> bool:
        """Return whether the coming step may update early."""
        return self.balance >= max(self.times.costs, -self.times.saves)

    def stepped(self, right: bool | None) -> None:
        """Account for a step that has ended.

        Args:
            right: whether its early updates were right; None if there were none.
        """
        self.balance += ALLOWANCE
        if right is not None:
            self.balance += self.times.saves if right else -self.times.costs
        self.balance = min(self.balance, FULLEST_BALANCE * max(self.times.costs, ALLOWANCE))

    @property
    def clip_rate(self) -> float:
        """Clip rate to plan with: the counted one, and the assumed one as if `ASSUMED_STEPS` had shown it."""
        return (self.clipped + ASSUMED_CLIP_RATE * ASSUMED_STEPS) / (self.steps + ASSUMED_STEPS)

    def counted(self, clipped: bool) -> None:
        """Count a step that clipped or not, early updates or none."""
        self.steps += 1
        self.clipped += clipped
