"""Prediction errors of published runs after a calibration on a few other runs."""

import random
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import numpy as np
from ebbtide.simulator.quantity import Quantity
from ebbtide.tuner.calibrate.calibration import LEAST_LOOP_S

from studies.bench.offload_runs import PublishedRun, testbeds
from studies.published_runs.judging import Pair, by_testbed, errors, intervals, predictions
from studies.published_runs.shipped import calibrated, machine_of

FOLDS: dict[str, Callable[[PublishedRun], Hashable]] = {
    "model": lambda run: run.params_b,
    "ranks": lambda run: run.dp * run.tp,
    "campaign": lambda run: run.family,
    "micro-batch": lambda run: run.micro_batch,
    "offload ratio": lambda run: run.offload_ratio,
}
RUNS = 3  # number of runs that a user probably has for a calibration
FEWER_AND_MORE = (1, 10)


def cross_validation(runs: Sequence[PublishedRun]) -> dict[str, Any]:
    """Return the prediction errors of published runs by cross-validation."""
    return {name: _left_out(runs, key) for name, key in FOLDS.items()}


def _left_out(runs: Sequence[PublishedRun], key: Callable[[PublishedRun], Hashable]) -> dict[str, Any]:
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


FROM = ("same campaign", "other campaigns", "anywhere")
LEAST_ROWS = 6  # least rows of a campaign, so that as many rows are left out as were calibrated on
JUDGED_INTERVALS = 6  # for each triple, number of left-out runs with an interval, which takes twenty simulations


def random_draws(runs: Sequence[PublishedRun], count: int, size: int = RUNS) -> dict[str, Any]:
    """Return how well published runs are predicted after a calibration on only a few other runs."""
    return {whence: {name: _over_draws(runs, name, whence, count, size) for name in testbeds(runs)} for whence in FROM}


def _over_draws(runs: Sequence[PublishedRun], testbed: str, whence: str, count: int, size: int) -> dict[str, Any]:
    own = [run for run in runs if run.testbed == testbed and len(run.measured) > 1]
    pairs: list[Pair] = []
    unfitted: list[Pair] = []
    unaware: list[Pair] = []
    shipped = machine_of(testbed)
    no_loop = shipped.model_copy(update={"loop_s": Quantity.exact(LEAST_LOOP_S)})
    each: list[dict[str, float]] = []
    held: list[float] = []
    rng = random.Random(f"{testbed} {whence}")
    for picked, left in _draws(own, whence, count, size, rng):
        machines = {testbed: calibrated({testbed: shipped}, picked)[testbed].machine}
        judged = predictions(machines, left, picked)
        pairs += judged
        unfitted += predictions({testbed: shipped}, left, picked)
        unaware += predictions({testbed: no_loop}, left, picked)
        each.append(errors(judged)["iteration"])
        some = rng.sample(left, min(JUDGED_INTERVALS, len(left)))
        held.append(intervals(machines, some, picked)[testbed]["held_pct"])
    if not each:
        return {"triples": 0}
    spread = {
        name: dict(
            zip(("p10", "median", "p90"), np.percentile([e[name] for e in each], (10, 50, 90)).tolist(), strict=True)
        )
        for name in ("median_abs_pct_error", "p90_abs_pct_error")
    }
    return {
        "triples": len(each),
        "runs_left_out": errors(pairs)["iteration"],
        "nothing_fitted": errors(unfitted)["iteration"],
        "no_loop": errors(unaware)["iteration"],
        "over_triples": spread,
        "intervals_held_pct": float(np.mean(held)),
    }


def _draws(
    runs: Sequence[PublishedRun], whence: str, count: int, size: int, rng: random.Random
) -> Iterator[tuple[list[PublishedRun], list[PublishedRun]]]:
    # A campaign is a series of runs by one source. The runs to calibrate on are never predicted.
    campaigns = [f for f in sorted({run.family for run in runs}) if sum(run.family == f for run in runs) >= LEAST_ROWS]
    for _ in range(count):
        chosen = rng.choice(campaigns) if campaigns else None
        inside = [run for run in runs if run.family == chosen]
        outside = [run for run in runs if run.family != chosen]
        pool = {FROM[0]: inside, FROM[1]: outside, FROM[2]: list(runs)}[whence]
        if len(pool) < size + (whence == FROM[0]):
            continue
        picked = rng.sample(pool, size)
        predicted = runs if whence == FROM[2] else inside
        yield picked, [run for run in predicted if all(run is not one for one in picked)]
