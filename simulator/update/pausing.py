"""The rule that decides, for each optimizer step, whether early updates are allowed.

Early updates start before the gradient norm is known. If a step clips or overflows, they are dropped and redone, which
costs time. The rule keeps an account of time. A step whose early updates are kept adds the time that they saved, a step
whose early updates are redone subtracts the time that they cost, and each step adds a small allowance. Early updates
are allowed only while the account covers the cost of redoing one step's updates. So, for any fraction of clipping
steps, training loses at most the initial balance and the allowances, compared with the same plan without early updates.
If early updates are kept often enough to save time on average, the account stays full and they are never paused.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from ebbtide.simulator.workload import ASSUMED_CLIP_RATE

ASSUMED_STEPS = 16  # weight of the assumed rate, in steps, beside the steps counted so far
ALLOWANCE = 0.005  # fraction of an iteration without early updates that a step may lose on average
FIRST_BALANCE = 2.0  # number of wrong steps that the balance covers at the start
FULLEST_BALANCE = 12.0  # number of wrong steps that the balance covers at most


class StepTimes(NamedTuple):
    """The times of an iteration, in seconds, under a plan with updates that start before the gradient norm is known.

    Attributes:
        right_s: Time if these early updates are kept, because the step does not clip or overflow.
        wrong_s: Time if the early updates are redone, because the step clips or overflows.
    """

    right_s: float
    plain_s: float
    wrong_s: float

    @property
    def saves(self) -> float:
        """Return the time that early updates save in a step that does not clip, as a fraction of the step's time
        without early updates.
        """
        return (self.plain_s - self.right_s) / self.plain_s

    @property
    def costs(self) -> float:
        """Return by how much early updates lengthen a step that clips, as a fraction of the step's time without early
        updates.
        """
        return max(0.0, (self.wrong_s - self.plain_s) / self.plain_s)

    def mean_s(self, clip_rate: float) -> float:
        """Return the mean seconds of an iteration with early updates, if the fraction ``clip_rate`` of the steps clips.

        The result is at most slightly longer than without early updates, because `PauseRule` pauses updates that
        lose time.
        """
        always_s = (1 - clip_rate) * self.right_s + clip_rate * self.wrong_s
        return min(always_s, (1 + ALLOWANCE) * self.plain_s)


# Used if the plan predicts no times: early updates save as much as they cost.
UNKNOWN = StepTimes(right_s=0.85, plain_s=1.0, wrong_s=1.15)


@dataclass
class PauseRule:
    """The rule that decides whether the next step may update subgroups before the gradient norm is known.

    The rule keeps a balance of the time that such early updates have saved and cost so far, for one training run
    under one plan. The balance is in units of the time of an iteration without early updates.

    Attributes:
        times: Times of the plan's iterations, predicted or measured.
        steps: Number of optimizer steps so far.
        clipped: Number of steps so far that clipped or overflowed.
        kept, redone: Numbers of steps so far whose early updates were kept, and whose early updates were redone.
    """

    times: StepTimes = UNKNOWN
    steps: int = 0
    clipped: int = 0
    balance: float = field(init=False)
    kept: int = field(init=False, default=0)
    redone: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.balance = FIRST_BALANCE * self.times.costs

    @property
    def on(self) -> bool:
        """Return True if the next optimizer step may start updates before the gradient norm is known."""
        return self.balance >= max(self.times.costs, -self.times.saves)

    def stepped(self, right: bool | None) -> None:
        """Add to the balance of saved time what the early updates of a finished step saved, or subtract what they cost.

        Args:
            right: True if the early updates were kept. False if they were redone, because the step clipped or
                overflowed. None if the step had none.
        """
        self.balance += ALLOWANCE
        if right is not None:
            self.balance += self.times.saves if right else -self.times.costs
            self.kept, self.redone = self.kept + right, self.redone + (not right)
        self.balance = min(self.balance, FULLEST_BALANCE * max(self.times.costs, ALLOWANCE))

    @property
    def clip_rate(self) -> float:
        """Return the fraction of steps that clip or overflow, for the search of a new plan."""
        # The fraction counted in training so far is mixed with an assumed one that weighs as much as
        # `ASSUMED_STEPS` counted steps.
        return (self.clipped + ASSUMED_CLIP_RATE * ASSUMED_STEPS) / (self.steps + ASSUMED_STEPS)

    def counted(self, clipped: bool) -> None:
        """Count a finished optimizer step for the fraction of steps that clip."""
        self.steps += 1
        self.clipped += clipped
