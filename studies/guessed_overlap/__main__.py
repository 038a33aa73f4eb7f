"""The gain of early updates (before the gradient norm is known), and the cost of steps that clip.

    python -m studies.guessed_overlap --json guessed.json

An early update assumes that the step neither clips nor overflows. If the assumption fails, the update is redone.

The study trains on an emulated device: durations are emulated, but copies, updates and trained values are real. It
trains sequences of steps. The steps of a sequence clip at a given rate, in bursts, or more and more often. The study
runs twice: with DeepSpeed's subgroups, and with subgroups that are split into smaller ones. Each time, one engine
trains all sequences. A sequence is trained in sections with early updates. Before and after each section, the engine
trains some steps without early updates, for comparison.

A step's early updates are kept, redone or absent. The reported iteration time is a mean of the median times of these
three kinds of steps, weighted by how often each kind occurs. So a short disturbance of the machine hardly counts. No
number of this study is a GPU measurement.
"""

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
from studies.trials.emulated_training import Bench, stock_state
from studies.trials.guessed_overlap import setting_of
from studies.trials.paced_model import Setting

RATES = (0.0, 0.05, 0.1, 0.2, 0.5, 1.0)
COMPARED = 0.1  # clip rate at which the rule is compared with early updates in every step
RATIO = 1.0  # time of all updates on the host, divided by that of forward and backward
BURST = 10  # steps of a burst
PIECES_OF = 4  # layers in one of DeepSpeed's subgroups
STEPS, PART, PLAIN_STEPS = 120, 40, 10  # steps of a sequence, of its sections, and of a block without early updates
WARM_UP = 2  # steps after a switch that are not measured
PROFILED_STEPS = 5  # steps that are profiled for the plan
Clips = Callable[[int], bool]
Outcomes = list[bool | None]  # for each step, whether early updates were right, or None without early updates


@dataclass(frozen=True)
class Row:
    """The results of one sequence of training steps with early updates. Times are in seconds of an iteration.

    An early update starts before the gradient norm is known. `PauseRule` decides for each step whether early updates
    pause. The sequence is trained in sections, with steps without early updates in between.

    Attributes:
        subgroups: ``whole`` for DeepSpeed's subgroups, ``pieces`` if they are split into smaller ones.
        sequence: Name of the sequence, such as the fraction of its steps that clip.
        plain_s: Time without early updates, measured in the steps between the sections.
        rule_s: Time with early updates that may pause. It is the mean of the median times of three kinds of steps,
            weighted by the number of steps of each kind: steps with early updates that are kept, steps with early
            updates that are redone, and steps without early updates.
        rule_mean_s: Arithmetic mean of the times of all steps that ``rule_s`` covers.
        always_s: Time with early updates in every step. 0 if not measured.
        over_plain: ``rule_s`` divided by ``plain_s``.
        early: Fraction of the steps that had early updates.
        wrong: Fraction of the steps in which early updates were redone, because the step clipped.
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
    """Return the sequences of training steps to measure, by name, such as one with 10% of steps that clip.

    A sequence is a function that takes the number of a step and tells whether the step clips.
    """

    def at(rate: float) -> Clips:
        return lambda step: Random(f"{rate} {step}").random() < rate

    return {
        **{f"{rate:.0%}": at(rate) for rate in RATES},
        f"bursts of {BURST}": lambda step: step // BURST % 2 == 1,
        "drift to 100%": lambda step: Random(f"drift {step}").random() < step / steps,
    }


def main() -> None:
    parser = study_parser("guessed_overlap", __doc__)
    parser.add_argument(
        "--steps",
        type=int,
        default=STEPS,
        help="number of timed steps in each part of the study. The parts differ in which steps clip gradients",
    )
    parser.add_argument(
        "--factor",
        type=float,
        default=0.04,
        help="factor on the given durations of layers, copies and updates in the emulated training (default: 0.04). A "
        "smaller factor shortens the study",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="run only the parts with 10%% and 100%% clipped steps, with plans for the given times, for tests",
    )
    args = parser.parse_args()
    become_only_rank(quiet=True)
    base = Setting(layers=8, hidden=128).scaled(args.factor)
    asked = sequences(args.steps)
    if args.quick:
        asked = {name: asked[name] for name in (f"{COMPARED:.0%}", "100%")}
    figures = measure(setting_of(base, RATIO), args.steps, asked, profiled=not args.quick)
    publish("guessed_overlap", args.json, figures)


def measure(setting: Setting, steps: int, asked: Mapping[str, Clips], *, profiled: bool) -> dict[str, Any]:
    """Measure training with early updates (before the gradient norm is known), and return all results as a dict.

    All sequences of steps are trained twice: with DeepSpeed's subgroups, and with subgroups that are split into
    smaller ones.

    Args:
        setting: Emulated model and machine.
        steps: Number of timed steps of each sequence.
        asked: For each sequence of steps, by name, a function that returns True if the step with the given number
            clips.
        profiled: True to make plans for measured times of forward and backward. False to make them for the given times.
    """
    rows, same, noise = list[Row](), True, dict[str, float]()
    for name, zero in (("whole", {}), ("pieces", {"sub_group_size": PIECES_OF * setting.subgroup})):
        trial = Trial(name, setting, zero, profiled=profiled)
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
    """One engine on an emulated device that trains with and without early updates in turn.

    An early update starts before the gradient norm is known.

    Attributes:
        clipped: For each step so far, True if the step clipped.
    """

    def __init__(self, name: str, setting: Setting, zero: Mapping[str, Any], *, profiled: bool) -> None:
        self.name, self.clipped = name, list[bool]()
        self._setting, self._zero = setting, zero
        self._bench = Bench(setting, clips=lambda _: False, **zero)
        work = self._bench.workload(PROFILED_STEPS) if profiled else setting.given_workload()
        work = work.model_copy(update={"clip_rate": COMPARED, "state_stays": bool(zero)})
        self.clipped += [False] * self._bench.steps
        self._early = ebbtide.tuner.plan(work, setting.machine(), memory_margin=0)
        if not any(self._early.updated_early):
            raise AssertionError(
                f"the plan for subgroups of kind {name!r} must contain early updates (before the gradient norm is "
                "known), but contains none"
            )
        self._plain = self._early.with_bits(early=False)
        self._blocks = list[float]()  # time of an iteration in each block without early updates

    def rows(self, asked: Mapping[str, Clips], steps: int) -> list[Row]:
        """Train several sequences of steps with and without early updates. Return a list with a row of times per
        sequence.

        The sequences differ in which of their steps clip.

        Args:
            asked: For each sequence, by name, a function that returns True if the step with the given number clips.
            steps: Number of timed steps of each sequence.
        """
        return [self._row(sequence, clips, steps) for sequence, clips in asked.items()]

    def _row(self, sequence: str, clips: Clips, steps: int) -> Row:
        """Train one sequence of steps with early updates, and return the measured times.

        The sequence is divided into sections of at most `PART` steps. Before and after each section, some steps without
        early updates are trained for comparison. `PauseRule` pauses early updates after they have cost too much time.
        If ``sequence`` is the one with 10% of clipping steps, each section is trained a second time without such
        pauses.

        Args:
            sequence: Name of the sequence.
            clips: Function that tells which steps of the sequence clip gradients.
            steps: Number of steps in the sequence.
        """
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
        """Train ``steps`` steps under a plan, and add their times and the outcomes of their early updates to ``to``.

        The steps are a section of a longer sequence of steps, some of which clip gradients. Early updates start before
        the gradient norm is known. Each call first trains `WARM_UP` other steps, which do not clip and are not
        measured.

        Args:
            clips: Function that returns True if the step with the given number in the sequence clips.
            number: Number of the section's first step in the sequence.
            to: Measurements of the sequence so far, and its rule that pauses early updates (`PauseRule`). The rule
                ignores the steps of the warm-up.
            always: True if early updates are never paused.
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
        """Return the noise of the iteration times that were measured without early updates, in percent.

        The noise is the distance between the quartiles of these times, divided by their median. Early
        updates start before the gradient norm is known.
        """
        low, middle, high = statistics.quantiles(self._blocks, n=4)
        return 100 * (high - low) / middle

    def ends_as_stock(self) -> bool:
        """Destroy the engine, and return True if it has trained the same bits as stock DeepSpeed."""
        ours = self._bench.close()
        theirs = stock_state(self._setting, len(self.clipped), self.clipped.__getitem__, **self._zero)
        return differences(ours, theirs) == ()


class _Watched:
    """A wrapper around `PauseRule`, which decides whether the next step has early updates.

    An early update starts before the gradient norm is known. The wrapper also records whether the early
    updates of each step were kept, or redone because the step clipped.
    """

    def __init__(self, account: PauseRule, outcomes: Outcomes, *, counts: bool) -> None:
        self._account, self._outcomes, self._counts = account, outcomes, counts
        self.steps, self.clipped = account.steps, account.clipped

    @property
    def on(self) -> bool:
        """Return True if the next step may update before the gradient norm is known."""
        return self._account.on

    def stepped(self, right: bool | None) -> None:
        """Record whether the early updates of a finished training step were kept.

        An early update starts before the gradient norm is known.

        Args:
            right: True if they were kept. False if they were redone, because the step clipped or overflowed. None if
                the step had no early updates.
        """
        self._outcomes.append(right)
        if self._counts:
            self._account.stepped(right)

    def counted(self, clipped: bool) -> None:
        if self._counts:
            self._account.counted(clipped)


class _Steps:
    """The measured steps of one training sequence in one mode, such as with early updates.

    A sequence is trained in several sections, because steps in other modes are trained in between.

    Attributes:
        periods: For each section, a list of the seconds from the end of each backward to the end of the next one.
        outcomes: For each section, a list with one value for each step: True if the step's early updates were kept,
            False if they were redone, None if there were none. This list has one value more than the list of periods,
            because a period lies between two steps.
    """

    def __init__(self, account: PauseRule) -> None:
        self.account = account
        self.periods, self.outcomes = list[Sequence[float]](), list[Outcomes]()

    @property
    def mean_s(self) -> float:
        """Return the mean iteration time, in seconds, over all steps that this object has recorded."""
        return statistics.fmean(period for part in self.periods for period in part)

    @property
    def iteration_s(self) -> float:
        """Return the mean time of an iteration in seconds, made robust against disturbances of the machine.

        An iteration is measured from the end of one step's backward to the end of the next step's backward. So its time
        depends on the early updates of both steps. Iterations are grouped by two facts: whether the first step's early
        updates were kept, were redone or did not exist, and whether the second step has early updates. The result is
        the mean of the groups' median times, weighted by the number of iterations in each group.
        """
        kinds: dict[tuple[bool | None, bool], list[float]] = defaultdict(list)
        for periods, outcomes in zip(self.periods, self.outcomes, strict=True):
            for period, began, ended in zip(periods, outcomes[:-1], outcomes[1:], strict=True):
                kinds[began, ended is None].append(period)
        count = sum(map(len, kinds.values()))
        return sum(len(some) * statistics.median(some) for some in kinds.values()) / count


if __name__ == "__main__":
    main()
