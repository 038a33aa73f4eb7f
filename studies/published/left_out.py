"""Calibrated on three runs of other campaigns, models, micro-batches: errors on those left out."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from studies.bench.offload_runs import Run, testbeds
from studies.published.judging import Pair, by_testbed, predictions
from studies.published.shipped import calibrated, machine_of

FOLDS: dict[str, Callable[[Run], Hashable]] = {
    "model": lambda run: run.params_b,
    "ranks": lambda run: run.dp * run.tp,
    "campaign": lambda run: run.family,
    "micro-batch": lambda run: run.micro_batch,
    "offload ratio": lambda run: run.offload_ratio,
}
RUNS = 3  # what a user has


def cross_validation(runs: Sequence[Run]) -> dict[str, Any]:
    """By what is left out: errors of the runs left out, and of each value's."""
    return {name: _left_out(runs, key) for name, key in FOLDS.items()}


def _left_out(runs: Sequence[Run], key: Callable[[Run], Hashable]) -> dict[str, Any]:
    pairs: list[Pair] = []
    folds: dict[str, Any] = {}
    for name in testbeds(runs):
        own = [run for run in runs if run.testbed == name]
        for value in sorted({key(run) for run in own}, key=str):
            others = [run for run in own if key(run) != value and len(run.measured) > 1]
            if len(others) < RUNS:
                continue
            picked = random.Random(f"{name} {value}").sample(others, RUNS)
            machine = calibrated({name: machine_of(name)}, picked)[name].machine
            left = [run for run in own if key(run) == value]
            judged = predictions({name: machine}, left, picked)
            pairs += judged
            folds[f"{name} {value}"] = by_testbed(judged)[name]
    return {"all": by_testbed(pairs), "folds": folds}
