"""The gain of updates before the gradient norm, and the cost of steps that clip.

    python -m studies.guessed_overlap --json guessed.json

Trains on the emulated device with real copies, updates and bits, in sequences of steps that clip at a rate, in
bursts or more and more often. Each sequence runs twice under one plan: with early updates under the rule that
pauses them (`ebbtide.simulator.update.pausing`), and without. No figure from here is a GPU figure.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from random import Random
from typing import Any

import ebbtide.tuner
from ebbtide.simulator import Plan

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
Clips = Callable[[int], bool]


@dataclass(frozen=True)
class Row:
    """One sequence of steps. Times in seconds of the mean iteration.

    Attributes:
        plain_s, rule_s: without early updates, and with them under the rule.
        always_s: with early updates in every step. 0: not measured.
        over_plain: ``rule_s`` over ``plain_s``.
    """

    subgroups: str
    sequence: str
    plain_s: float
    rule_s: float
    always_s: float
    over_plain: float


def sequences(steps: int) -> Mapping[str, Clips]:
    """Return the sequences by their names: whether a step clips."""

    def at(rate: float) -> Clips:
        return lambda step: Random(f"{rate} {step}").random() < rate

    return {
        **{f"{rate:.0%}": at(rate) for rate in RATES},
        f"bursts of {BURST}": lambda step: step // BURST % 2 == 1,
        "drift to 100%": lambda step: Random(f"drift {step}").random() < step / steps,
    }


def main() -> None:
    parser = study_parser("guessed_overlap", __doc__)
    parser.add_argument("--steps", type=int, default=60, help="timed steps of each sequence")
    parser.add_argument("--factor", type=float, default=0.15, help="of the layers' times")
    args = parser.parse_args()
    become_only_rank()
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    base = Setting(layers=8, hidden=256).scaled(args.factor)
    publish("guessed_overlap", args.json, measure(setting_of(base, RATIO), args.steps))


def measure(setting: Setting, steps: int, *, some: Mapping[str, Clips] | None = None) -> dict[str, Any]:
    """Return the figures of whole subgroups and of pieces."""
    asked = sequences(steps) if some is None else some
    rows, same = list[Row](), True
    for name, zero in (("whole", {}), ("pieces", {"sub_group_size": PIECES_OF * setting.subgroup})):
        found, equal = _measured(name, setting, steps, asked, zero)
        rows += found
        same = same and equal
    compared = [row for row in rows if row.always_s]
    return {
        "worst_over_plain": max(row.over_plain for row in rows),
        "rule_over_always_at_10_pct": max((row.rule_s / row.always_s for row in compared), default=0.0),
        "bit_identical": same,
        "rows": [asdict(row) for row in rows],
        "steps": steps,
        "device_kind": "emulated",
    }


def _measured(
    name: str, setting: Setting, steps: int, asked: Mapping[str, Clips], zero: Mapping[str, Any]
) -> tuple[list[Row], bool]:
    """Return a row for each sequence, and whether the bits are DeepSpeed's own."""
    bench, clipped = Bench(setting, clips=lambda _: False, **zero), list[bool]()
    work, machine = bench.workload(5), setting.machine()
    clipped += [False] * bench.steps
    planned = ebbtide.tuner.plan(work.model_copy(update={"clip_rate": COMPARED}), machine, memory_margin=0)
    plain = planned.with_bits(early=False)

    def mean_s(plan: Plan, clips: Clips, *, always: bool = False) -> float:
        first = bench.steps
        bench.clips = lambda number: clips(number - first)
        bench.apply(plan)
        if always:
            bench.engine.optimizer._ebbtide.pausing.stepped = lambda _right: None
        found = bench.measure_on(steps).mean_s
        clipped.extend(map(clips, range(bench.steps - first)))
        return found

    rows = []
    for sequence, clips in asked.items():
        plain_s, rule_s = mean_s(plain, clips), mean_s(planned, clips)
        always_s = mean_s(planned, clips, always=True) if sequence == f"{COMPARED:.0%}" else 0.0
        rows.append(Row(name, sequence, plain_s, rule_s, always_s, rule_s / plain_s))
    early = sum(bench.engine.optimizer._ebbtide.plan.updated_early)
    same = differences(bench.close(), stock_state(setting, len(clipped), clipped.__getitem__, **zero)) == ()
    return rows, same and early > 0


if __name__ == "__main__":
    main()
