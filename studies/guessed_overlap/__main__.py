"""The gain of updates before the gradient norm, and the cost of steps that clip.

    python -m studies.guessed_overlap --json guessed.json

Trains on the emulated device with real copies, updates and bits, in sequences of steps that clip at a rate, in
bursts or more and more often: whole subgroups, and pieces of DeepSpeed's. One engine runs all of them, under one
plan with and without early updates in turn: a block of steps without them lies before and behind each part of a
sequence. An iteration's time is the mean of the medians of its kinds (early updates right, wrong or none), each as
often as it occurs, so that a moment in which the machine is busy elsewhere counts for little. No figure is a GPU
figure.
"""

import logging
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from random import Random
from typing import Any

import ebbtide.tuner
from ebbtide.simulator import Plan
from ebbtide.simulator.update.pausing import PauseRule

from studies.bench.bits import differences
from studies.bench.console import publish, study_parser
from studies.bench.rank import become_only_rank
from studies.trials.emulated_training import Bench, Setting, stock_state
from studies.trials.guessed_overlap import setting_of

RATES = (0.0, 0.05, 0.1, 0.2, 0.5, 1.0)
COMPARED = 0.1  # the clip rate at which the rule is compared with early updates in every step
RATIO = 1.0  # of all updates on the host to forward and backward
BURST = 10  # steps
PIECES_OF = 4  # layers, in one of DeepSpeed's subgroups
STEPS, PART, PLAIN_STEPS = 120, 40, 10  # of a sequence, of its parts, and of a block without early updates
WARM_UP = 2  # steps behind a switch
Clips = Callable[[int], bool]
Outcomes = list[bool | None]  # by step: whether early updates were right; None: there were none


@dataclass(frozen=True)
class Row:
    """One sequence of steps. Times in seconds of an iteration.

    Attributes:
        plain_s: without early updates, in the blocks between the sequence's parts.
        rule_s: with early updates under the rule that pauses them (`ebbtide.simulator.update.pausing`).
        rule_mean_s: the plain mean of the same steps.
        always_s: with early updates in every step. 0: not measured.
        over_plain: ``rule_s`` over ``plain_s``.
        early, wrong: shares of the steps with early updates, and with wrong ones.
    """

    subgroups: str
    sequence: str
    plain_s: float
    rule_s: float
    rule_mean_s: float
    always_s: float
    over_plain: float
    early: float
    wrong: float


def sequences(steps: int) -> Mapping[str, Clips]:
    """Return the sequences by name. A sequence is a function that tells whether a step clips."""

    def at(rate: float) -> Clips:
        return lambda step: Random(f"{rate} {step}").random() < rate

    return {
        **{f"{rate:.0%}": at(rate) for rate in RATES},
        f"bursts of {BURST}": lambda step: step // BURST % 2 == 1,
        "drift to 100%": lambda step: Random(f"drift {step}").random() < step / steps,
    }


def main() -> None:
    parser = study_parser("guessed_overlap", __doc__)
    parser.add_argument("--steps", type=int, default=STEPS, help="timed steps of each sequence")
    parser.add_argument("--factor", type=float, default=0.04, help="of the layers' times")
    parser.add_argument("--quick", action="store_true", help="two sequences, for the tests")
    args = parser.parse_args()
    become_only_rank()
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    base = Setting(layers=8, hidden=128).scaled(args.factor)
    asked = sequences(args.steps)
    if args.quick:
        asked = {name: asked[name] for name in (f"{COMPARED:.0%}", "100%")}
    publish("guessed_overlap", args.json, measure(setting_of(base, RATIO), args.steps, asked))


def measure(setting: Setting, steps: int, asked: Mapping[str, Clips]) -> dict[str, Any]:
    """Return the figures of the study, for whole subgroups and for subgroups cut into parts."""
    rows, same, noise = list[Row](), True, dict[str, float]()
    for name, zero in (("whole", {}), ("pieces", {"sub_group_size": PIECES_OF * setting.subgroup})):
        trial = Trial(name, setting, zero)
        rows += trial.rows(asked, steps)
        noise[name] = trial.noise_pct
        same = trial.ends_as_stock() and same
    compared = [row for row in rows if row.always_s]
    return {
        "worst_over_plain": max(row.over_plain for row in rows),
        "rule_over_always_at_10_pct": max((row.rule_s / row.always_s for row in compared), default=0.0),
        "bit_identical": same,
        "plain_blocks_noise_pct": noise,
        "rows": [asdict(row) for row in rows],
        "steps": steps,
        "device_kind": "emulated",
    }


class Trial:
    """One engine under a plan, with and without early updates.

    Attributes:
        clipped: by step, whether it clipped.
    """

    def __init__(self, name: str, setting: Setting, zero: Mapping[str, Any]) -> None:
        self.name, self.clipped = name, list[bool]()
        self._setting, self._zero = setting, zero
        self._bench = Bench(setting, clips=lambda _: False, **zero)
        work = self._bench.workload(5).model_copy(update={"clip_rate": COMPARED, "state_stays": bool(zero)})
        self.clipped += [False] * self._bench.steps
        self._early = ebbtide.tuner.plan(work, setting.machine(), memory_margin=0)
        if not any(self._early.updated_early):
            raise AssertionError(f"the plan of {name} subgroups must update some early, but updates none")
        self._plain = self._early.with_bits(early=False)
        self._blocks = list[float]()  # seconds of an iteration in each block without early updates

    def rows(self, asked: Mapping[str, Clips], steps: int) -> list[Row]:
        """Return a row for each sequence."""
        return [self._row(sequence, clips, steps) for sequence, clips in asked.items()]

    def _row(self, sequence: str, clips: Clips, steps: int) -> Row:
        """Return one sequence's row. Its parts take turns with steps without early updates, and with all of them."""
        every = sequence == f"{COMPARED:.0%}"
        rule, always = _Steps(self._account()), _Steps(self._account())
        plain = [self._block()]
        for first in range(0, steps, PART):
            count = min(PART, steps - first)
            self._train(self._early, count, clips, first, rule)
            if every:
                self._train(self._early, count, clips, first, always, always=True)
            plain.append(self._block())
        self._blocks += plain
        outcomes = [right for part in rule.outcomes for right in part]
        early = [right for right in outcomes if right is not None]
        plain_s, rule_s = statistics.median(plain), rule.iteration_s
        return Row(
            self.name,
            sequence,
            plain_s,
            rule_s,
            rule.mean_s,
            always.iteration_s if every else 0.0,
            rule_s / plain_s,
            early=len(early) / len(outcomes),
            wrong=early.count(False) / len(outcomes),
        )

    def _account(self) -> PauseRule:
        told = self._early.prediction
        assert told is not None
        assert told.step_times is not None
        return PauseRule(told.step_times)

    def _block(self) -> float:
        block = _Steps(PauseRule())
        self._train(self._plain, PLAIN_STEPS, lambda _: False, 0, block)
        return block.iteration_s

    def _train(self, plan: Plan, steps: int, clips: Clips, number: int, to: "_Steps", *, always: bool = False) -> None:
        """Train some steps under a plan and note their times. The sequence's first of them is ``number``.

        Args:
            to: Its account goes on, and does not see the warm-up.
            always: Whether no step pauses.
        """
        bench = self._bench
        bench.apply(plan)
        first = bench.steps + WARM_UP
        bench.clips = lambda step: step >= first and clips(step - first + number)
        session, outcomes = bench.engine.optimizer._ebbtide, Outcomes()
        session.pausing = _Watched(to.account, outcomes, counts=False)
        bench.periods_s(WARM_UP - 1)
        session.pausing = _Watched(to.account, outcomes := Outcomes(), counts=not always)
        to.periods.append(bench.periods_s(steps))
        to.outcomes.append(outcomes)
        self.clipped += [bench.clips(step) for step in range(len(self.clipped), bench.steps)]

    @property
    def noise_pct(self) -> float:
        """Return the distance of the quartiles of all blocks without early updates, in percent of the median."""
        low, middle, high = statistics.quantiles(self._blocks, n=4)
        return 100 * (high - low) / middle

    def ends_as_stock(self) -> bool:
        """Return whether training has the bits of stock DeepSpeed in as many steps. Ends the engine."""
        ours = self._bench.close()
        theirs = stock_state(self._setting, len(self.clipped), self.clipped.__getitem__, **self._zero)
        return differences(ours, theirs) == ()


class _Watched:
    """The account that a session asks, which notes what became of each step's early updates."""

    def __init__(self, account: PauseRule, outcomes: Outcomes, *, counts: bool) -> None:
        """Wrap the account. If ``counts`` is False, the account does not learn the outcomes."""
        self._account, self._outcomes, self._counts = account, outcomes, counts
        self.steps, self.clipped = account.steps, account.clipped

    @property
    def on(self) -> bool:
        """Return whether the coming step may update early."""
        return self._account.on

    def stepped(self, right: bool | None) -> None:
        """Note a step that has ended."""
        self._outcomes.append(right)
        if self._counts:
            self._account.stepped(right)

    def counted(self, clipped: bool) -> None:
        """Count a step that clipped or not."""
        if self._counts:
            self._account.counted(clipped)


class _Steps:
    """The steps of one side of a sequence, in parts.

    Attributes:
        periods: by part, seconds from each backward's end to the next one's.
        outcomes: by part, of one step more than there are periods.
    """

    def __init__(self, account: PauseRule) -> None:
        self.account = account
        self.periods, self.outcomes = list[Sequence[float]](), list[Outcomes]()

    @property
    def mean_s(self) -> float:
        """Return the mean iteration."""
        return statistics.fmean(period for part in self.periods for period in part)

    @property
    def iteration_s(self) -> float:
        """Return the mean iteration if each took as long as the median one of its kind.

        An iteration's kind is what became of the early updates of the step that begins it, and whether the step
        that ends it has some.
        """
        kinds: dict[tuple[bool | None, bool], list[float]] = defaultdict(list)
        for periods, outcomes in zip(self.periods, self.outcomes, strict=True):
            for period, began, ended in zip(periods, outcomes[:-1], outcomes[1:], strict=True):
                kinds[began, ended is None].append(period)
        count = sum(map(len, kinds.values()))
        return sum(len(some) * statistics.median(some) for some in kinds.values()) / count


if __name__ == "__main__":
    main()
