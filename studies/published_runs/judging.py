"""Judgement of ebbtide's predictions of published training runs.

The functions compute how large the errors are, whether strategies are ranked correctly, and how often the
predicted intervals hold the measured times.
"""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np
from ebbtide.simulator import Machine

from studies.bench.offload_runs import MEMORY, PublishedRun, testbeds
from studies.published_runs.shipped import as_seen, interval_ms, predict

TIMES = {"forward": "fwd_ms", "backward": "bwd_ms", "step": "step_ms", "iteration": "iter_ms"}
QUANTITIES = (*TIMES, "memory")
CHOICES = ("stride", "offload_ratio")
NEAR_BEST_PCT = 3.0
_CONFIGURATION = (
    "testbed",
    "params_b",
    "layers",
    "hidden",
    "seq",
    "tp",
    "dp",
    "micro_batch",
    "accumulation",
    "offload_ratio",
    "subgroup",
    "family",
)
Pair = tuple[PublishedRun, dict[str, float]]


def predictions(
    machines: Mapping[str, Machine], runs: Sequence[PublishedRun], seen: Sequence[PublishedRun] = ()
) -> list[Pair]:
    """Predict the time and memory of published runs, and return a list of pairs: a run and its prediction."""
    return [(run, predict(as_seen(run, seen), machines[run.testbed])) for run in runs]


def measured_and_predicted(pair: Pair, quantity: str) -> tuple[float, float] | None:
    """Return the measured and the predicted value of one quantity, such as a time, for one published run.

    Times are in milliseconds. Memory is the peak of GPU memory in GiB. None if the quantity was not measured.
    """
    run, predicted = pair
    if quantity == "memory":
        peaks = [run.measured[c] for c in MEMORY if c in run.measured and "peak" in c]
        return (max(peaks), predicted["memory_gb"]) if peaks else None
    column = TIMES[quantity]
    return (run.measured[column], predicted[column]) if column in run.measured else None


def errors(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Return the prediction errors of published runs in percent, as a dict by predicted quantity.

    Each quantity has the median and 90th percentile of the absolute errors, and the signed median, lowest
    and highest error.
    """
    table: dict[str, Any] = {"rows": len(pairs)}
    for quantity in QUANTITIES:
        both = [measured_and_predicted(pair, quantity) for pair in pairs]
        signed = [(b[1] / b[0] - 1) * 100 for b in both if b is not None]
        if signed:
            table[quantity] = {
                "median_abs_pct_error": float(np.median(np.abs(signed))),
                "p90_abs_pct_error": float(np.percentile(np.abs(signed), 90)),
                "median_pct_error": float(np.median(signed)),
                "lowest_pct_error": min(signed),
                "highest_pct_error": max(signed),
                "n": len(signed),
            }
    return table


def by_testbed(pairs: Sequence[Pair]) -> dict[str, Any]:
    return {name: errors(own) for name, own in _split(pairs).items()}


def _split(pairs: Sequence[Pair]) -> dict[str, list[Pair]]:
    names = testbeds([run for run, _ in pairs])
    return {name: [pair for pair in pairs if pair[0].testbed == name] for name in names}


def pairs_by_testbed(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Return, by testbed, how well predictions tell which of two published runs is faster."""
    return {name: _strategies(own) for name, own in _split(pairs).items()}


def _strategies(pairs: Sequence[Pair]) -> dict[str, Any]:
    right: list[bool] = []
    off: list[float] = []
    for group in _groups(pairs, lambda run: _fields(run, _CONFIGURATION)).values():
        for (a, said_a), (b, said_b) in combinations(group, 2):
            if _strategy(a) == _strategy(b):
                continue
            measured = math.log(a.measured["iter_ms"] / b.measured["iter_ms"])
            predicted = math.log(said_a["iter_ms"] / said_b["iter_ms"])
            right.append((measured > 0) == (predicted > 0))
            off.append(100 * abs(math.expm1(predicted - measured)))
    if not right:
        return {"pairs": 0}
    return {
        "pairs": len(right),
        "ranked_rightly_pct": 100 * float(np.mean(right)),
        "median_ratio_error_pct": float(np.median(off)),
    }


def _strategy(run: PublishedRun) -> tuple[object, ...]:
    return (run.prefetch, run.async_grads, run.stride if run.prefetch else 0)


def _groups(pairs: Sequence[Pair], key: Callable[[PublishedRun], Hashable]) -> dict[Hashable, list[Pair]]:
    groups: dict[Hashable, list[Pair]] = {}
    for run, predicted in pairs:
        if "iter_ms" in run.measured:
            groups.setdefault(key(run), []).append((run, predicted))
    return groups


def _fields(run: PublishedRun, names: Sequence[str]) -> tuple[object, ...]:
    return tuple(getattr(run, name) for name in names)


def ranking(pairs: Sequence[Pair], choice: str) -> dict[str, Any]:
    """Return how much slower a setting chosen by predictions is than one chosen by measurements, in percent of time.

    In each group of published runs that differ only in the setting ``choice``, the run with the best
    predicted time is compared with the run that has the best measured time.
    """
    names = [n for n in (*_CONFIGURATION, "prefetch", "async_grads", "stride") if n != choice]
    kept = [pair for pair in pairs if not (choice == "stride" and not pair[0].prefetch)]
    groups = _groups(kept, lambda run: _fields(run, names)).values()
    regrets = [_regret_pct(g) for g in groups if len({getattr(r, choice) for r, _ in g}) > 1]
    if not regrets:
        return {"groups": 0}
    return {
        "groups": len(regrets),
        "regret_pct": float(np.median(regrets)),
        "max_regret_pct": max(regrets),
        "within_3_pct_share": sum(r <= NEAR_BEST_PCT for r in regrets) / len(regrets),
    }


def _regret_pct(group: Sequence[Pair]) -> float:
    chosen = min(group, key=lambda pair: pair[1]["iter_ms"])[0].measured["iter_ms"]
    best = min(run.measured["iter_ms"] for run, _ in group)
    return (chosen / best - 1) * 100


def intervals(
    machines: Mapping[str, Machine], runs: Sequence[PublishedRun], seen: Sequence[PublishedRun] = ()
) -> dict[str, Any]:
    """Return, for each testbed (machine), how often a published run's measured time lies in the predicted 90% interval.

    The median width of the intervals is returned too, as the ratio of their ends.
    """
    result = {}
    for name in testbeds(runs):
        own = [run for run in runs if run.testbed == name and "iter_ms" in run.measured]
        ends = [interval_ms(as_seen(run, seen), machines[name]) for run in own]
        held = [low <= run.measured["iter_ms"] <= high for run, (low, high) in zip(own, ends, strict=True)]
        if held:
            result[name] = {
                "n": len(held),
                "held_pct": 100 * float(np.mean(held)),
                "median_high_over_low": float(np.median([high / low for low, high in ends])),
            }
    return result


def left_out_intervals(machines: Mapping[str, Machine], runs: Sequence[PublishedRun]) -> dict[str, Any]:
    """Cross-validate ebbtide's 90% prediction intervals of the iteration time on published runs, for each testbed
    (machine).

    A campaign is a series of published runs by one source. One campaign of a testbed after the other is left out. The
    intervals are scaled so that they hold nine in ten runs of the other campaigns. Then those runs of the left-out
    campaign are counted that lie in their scaled intervals. A testbed with a single campaign is not judged.

    Returns:
        A dict by testbed, with three entries for each. ``n``: number of runs. ``held_pct``: percentage of the runs that
        lie in their intervals when their campaign is left out. ``scale``: factor for the logarithmic width of the
        intervals, with which they hold nine in ten of all runs on the testbed, with no campaign left out.
    """
    result = {}
    for name in testbeds(runs):
        own = [run for run in runs if run.testbed == name and "iter_ms" in run.measured]
        offs = [(run.family, _in_widths(run, machines[name])) for run in own]
        families = sorted({family for family, _ in offs})
        held = [
            off <= _nine_in_ten([z for other, z in offs if other != family])
            for family in families
            if len(families) > 1
            for own_family, off in offs
            if own_family == family
        ]
        if held:
            result[name] = {
                "n": len(held),
                "held_pct": 100 * float(np.mean(held)),
                "scale": _nine_in_ten([z for _, z in offs]),
            }
    return result


def _in_widths(run: PublishedRun, machine: Machine) -> float:
    # The result is not negative. It is at most 1 if the measured time is in the interval.
    low, high = interval_ms(run, machine)
    return abs(math.log(run.measured["iter_ms"] / math.sqrt(low * high))) / math.log(high / low) * 2


def _nine_in_ten(offs: Sequence[float]) -> float:
    return float(np.quantile(offs, 0.9))
