"""Which configurations have to be simulated until every verdict is certain.

Each value of each free knob is a contest of its own: which of the configurations that have it is
the fastest? Bounds say what a configuration can give at best, so a contest is over once nothing
is left that could still beat its leader.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ebbtide.tuner.configurations.outcome import Outcome, Question
from ebbtide.tuner.configurations.promise import Promise, promise, tightened
from ebbtide.tuner.configurations.space import Configuration, Space

# What promises less gain than this is not simulated: of the leader's speed, and of the memory that
# is missing at the least.
SLACK = 0.002
SHOWN = 0.005  # of the fastest of all: the table rounds to percents
APART = 0.03  # of the fastest, and of memory: what is closer together is one point of the front


@dataclass
class Promises:
    """Bounds of every configuration, made tighter when somebody asks."""

    question: Question
    known: dict[Configuration, Promise] = field(default_factory=dict)

    def of(self, c: Configuration) -> Promise:
        if c not in self.known:
            self.known[c] = promise(self.question, c)
        return self.known[c]

    def tight(self, c: Configuration) -> Promise:
        self.known[c] = tightened(self.question, c, self.of(c))
        return self.known[c]


@dataclass
class Contest:
    """The fastest of some configurations; of some contests, where none fits, what lacks least.

    Attributes:
        by_speed: those that may fit, most promising first; what is behind ``at`` is still open.
        by_need: all, in the order of what they lack at the least; empty: nobody asks.
    """

    by_speed: list[Configuration]
    by_need: list[Configuration]
    at: int = 0

    @classmethod
    def of(cls, some: Sequence[Configuration], promises: Promises, needs: bool) -> "Contest":
        may = [c for c in some if not promises.of(c).refused]
        fit = [c for c in may if not promises.of(c).missing_bytes]
        fit.sort(key=lambda c: -promises.of(c).tokens_per_s)
        by_need = sorted(may, key=lambda c: promises.of(c).missing_bytes) if needs else []
        return cls(fit, by_need)

    def next(self, promises: Promises, outcomes: dict[Configuration, Outcome], fastest: float) -> Configuration | None:
        """What has to be simulated next; None: it is decided.

        Args:
            fastest: tokens per second of all so far.
        """
        leader = max(
            (outcomes[c].tokens_per_s for c in self.by_speed if c in outcomes and outcomes[c].fits), default=0.0
        )
        enough = leader + max(SLACK * leader, SHOWN * fastest * bool(leader))
        while self.at < len(self.by_speed):
            c = self.by_speed[self.at]
            # Those behind it may promise more: another contest may have made this bound tighter.
            closed = c in outcomes or promises.of(c).tokens_per_s <= enough
            if not closed and promises.tight(c).tokens_per_s > enough:
                return c
            self.at += 1
        return None if leader else self._least_missing(promises, outcomes)

    def _least_missing(self, promises: Promises, outcomes: dict[Configuration, Outcome]) -> Configuration | None:
        lacking = [outcomes[c].missing_bytes for c in self.by_need if c in outcomes]
        enough = min(lacking, default=float("inf")) * (1 - SLACK)
        for c in self.by_need:
            if promises.of(c).missing_bytes >= enough:
                return None
            if c not in outcomes:
                return c
        return None


@dataclass
class Front:
    """What is left to simulate until nothing else can be as fast with less device memory.

    Attributes:
        open: those that may fit, leanest first.
    """

    open: list[Configuration]

    @classmethod
    def of(cls, every: Sequence[Configuration], promises: Promises) -> "Front":
        may = _least_and_most_accumulated(
            [c for c in every if not (promises.of(c).refused or promises.of(c).missing_bytes)]
        )
        # Of equally lean ones the faster first: the others may need no simulation then.
        may.sort(key=lambda c: (promises.of(c).device_bytes, -promises.of(c).tokens_per_s))
        return cls(may[::-1])

    def next(self, promises: Promises, outcomes: dict[Configuration, Outcome], fastest: float) -> Configuration | None:
        """As `Contest.next`."""
        while self.open:
            c = self.open[-1]
            if c not in outcomes and not (
                self._beaten(promises.of(c), outcomes, fastest) or self._beaten(promises.tight(c), outcomes, fastest)
            ):
                return c
            self.open.pop()
        return None

    def _beaten(self, bounds: Promise, outcomes: dict[Configuration, Outcome], fastest: float) -> bool:
        enough, lean = bounds.tokens_per_s - APART * fastest, bounds.device_bytes * (1 + APART)
        return any(o.fits and o.tokens_per_s >= enough and o.device_peak_bytes <= lean for o in outcomes.values())


def _least_and_most_accumulated(some: Sequence[Configuration]) -> list[Configuration]:
    """Of those that differ in accumulation alone, which makes steps rarer, and its sum takes memory
    from the second micro-batch on: those between are on no front.
    """
    by_rest: dict[Configuration, list[Configuration]] = {}
    for c in some:
        by_rest.setdefault(c.changed(accumulation=1), []).append(c)
    ends = [sorted(same, key=lambda c: c.accumulation) for same in by_rest.values()]
    return list(dict.fromkeys(c for same in ends for c in (same[0], same[-1])))


def contests(space: Space, every: Sequence[Configuration], promises: Promises) -> list[Contest | Front]:
    """Of the whole space, of offloading and not, and of each value of each free knob."""
    result: list[Contest | Front] = [Contest.of(every, promises, needs=True)]
    if "offload" in space.free:
        for stays in (True, False):
            side = [c for c in every if (c.offload == "none") == stays]
            result.append(Contest.of(side, promises, needs=True))
    for knob in space.free:
        for value in dict.fromkeys(getattr(c, knob) for c in every):
            group = [c for c in every if getattr(c, knob) == value]
            result.append(Contest.of(group, promises, needs=False))
    return [*result, Front.of(every, promises)]


def decide(
    question: Question,
    undecided: Sequence[Contest | Front],
    promises: Promises,
    most: int,
    seen: Callable[[Outcome], None],
) -> tuple[dict[Configuration, Outcome], bool]:
    """Simulates for one contest after the other, in turn, until all are decided.

    Args:
        most: configurations to simulate; reached, the rest stays undecided.
        seen: called with each outcome.

    Returns:
        the outcomes, and whether everything is decided.
    """
    outcomes: dict[Configuration, Outcome] = {}
    fastest = 0.0
    while undecided:
        still = []
        for contest in undecided:
            c = contest.next(promises, outcomes, fastest)
            if c is None:
                continue
            if len(outcomes) == most:
                return outcomes, False
            outcomes[c] = question.answer(c)
            fastest = max(fastest, outcomes[c].tokens_per_s * outcomes[c].fits)
            seen(outcomes[c])
            still.append(contest)
        undecided = still
    return outcomes, True
