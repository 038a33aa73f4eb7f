"""Prediction errors of published training runs, by family of runs, such as runs on A100s or offloaded training.

Some constants of ebbtide's preset machines were fitted to a part of these runs. The errors of this part are kept apart
from those of the held-out runs.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from ebbtide.simulator.quantity import NINETY_PERCENT

from studies.published_runs.training import FAMILIES, RunPrediction, TrainingRun

Judged = tuple[TrainingRun, RunPrediction]
SIDES: dict[str, Callable[[TrainingRun], bool]] = {
    "fitted": lambda run: not run.held_out,
    "held_out": lambda run: run.held_out,
}


def by_family(judged: Sequence[Judged]) -> dict[str, Any]:
    """Return the prediction errors of each family of training runs, separately for fitted and held-out runs.

    A run is fitted if a constant of a machine preset was fitted to it, and held out otherwise. The dict has a second
    set of errors. They come from a simpler prediction, in which every GPU reaches the same fraction of its data
    sheet's FLOP/s. The dict also has the percentage of runs with a measured time inside the predicted interval
    (``interval_held_pct``), and the width that the intervals need (`interval_needed`).
    """
    return {
        family: {
            side: _figures([(run, said) for run, said in judged if run.family == family and belongs(run)])
            for side, belongs in SIDES.items()
        }
        for family in FAMILIES
    }


def by_preset(judged: Sequence[Judged]) -> dict[str, Any]:
    """Return, for each machine preset, the percentage of published training runs with a measured time inside the
    predicted interval.

    Only held-out runs count: runs to which no constant of a preset was fitted.
    """
    presets = sorted({run.fields["preset"] for run, _ in judged})
    held = {
        name: [_holds(*one) for one in judged if one[0].fields["preset"] == name and one[0].held_out]
        for name in presets
    }
    return {
        name: {"rows": len(found), "held_pct": 100 * float(np.mean(found))} for name, found in held.items() if found
    }


def spread(judged: Sequence[Judged], family: str = "offloaded") -> dict[str, float]:
    """Return the errors of predicted times for a family of training runs, and the width that prediction intervals need.

    Only runs to which a constant of a machine preset was fitted are used. An error is the logarithm of the predicted
    time divided by the measured time. The intervals should hold the measured times of nine in ten sources whose
    runs are not used here. A source is a repository or web page that published runs.

    Returns:
        A dict. ``sources``: number of sources. ``root_mean_square`` and ``largest``: root mean square and largest
        absolute value of the errors. ``needed``: width of the intervals, given as the standard deviation of normally
        distributed errors. It follows from ``root_mean_square`` and Student's t distribution.
    """
    found: dict[str, list[float]] = {}
    for run, said in judged:
        if run.family == family and not run.held_out:
            found.setdefault(_source(run), []).append(math.log(run.measured_s / said.seconds))
    largest = max(abs(error) for own in found.values() for error in own)
    return {
        "sources": len(found),
        "root_mean_square": _root_mean_square(found),
        "largest": largest,
        "needed": _needed(found),
    }


def _source(run: TrainingRun) -> str:
    return run.fields["source"].split("/blob/")[0]


def _root_mean_square(errors: Mapping[str, Sequence[float]]) -> float:
    return math.sqrt(float(np.mean([np.mean(np.square(own)) for own in errors.values()])))


def _needed(errors: Mapping[str, Sequence[float]]) -> float:
    """Return the standard deviation with which an interval holds nine in ten runs of a further source."""
    from scipy.stats import t

    sources = len(errors)
    return float(t.ppf(0.95, sources)) / NINETY_PERCENT * math.sqrt(1 + 1 / sources) * _root_mean_square(errors)


def interval_needed(judged: Sequence[Judged]) -> float:
    """Return the width that the prediction intervals of training runs need, divided by the width that they have.

    Widths are logarithmic. The intervals should hold the measured times of nine in ten further sources. Runs of one
    source resemble each other. So a family with few sources needs intervals that hold all of its runs: a number below 1
    says that the intervals may be narrower, and 1 that their width is right.
    """
    found: dict[str, list[float]] = {}
    for run, said in judged:
        off = math.log(run.measured_s / math.sqrt(said.low_s * said.high_s))
        half = math.log(said.high_s / said.low_s) / 2 / NINETY_PERCENT
        found.setdefault(_source(run), []).append(off / half)
    return _needed(found)


def memory(judged: Sequence[Judged]) -> dict[str, Any]:
    """Return the errors of the predicted GPU memory of published training runs, as a dict with the groups ``fitted``
    and ``held_out``.

    Constants of the machine presets were fitted to the runs of the first group, and not to those of the second
    group. The dict has three kinds of errors for each group. The first kind uses all settings of a run.
    ``as_published`` uses only the settings that the run's source publishes, and none that were inferred.
    ``without_slack`` is like ``as_published``, but does not add the memory that PyTorch's allocator holds unused
    (`ALLOCATOR_SLACK`, found on fitted runs).
    """
    found: dict[str, Any] = {}
    for side, belongs in SIDES.items():
        own = [(run, said) for run, said in judged if run.measured_gib and belongs(run)]
        found[side] = errors(said.gib / (run.measured_gib or 1) - 1 for run, said in own)
        told = [(run, said.gib if said.told_gib is None else said.told_gib) for run, said in own]
        found[side]["as_published"] = errors(gib / (run.measured_gib or 1) - 1 for run, gib in told)
        bare = [
            (run, gib if said.bare_gib is None else said.bare_gib)
            for (run, said), (_, gib) in zip(own, told, strict=True)
        ]
        found[side]["without_slack"] = errors(gib / (run.measured_gib or 1) - 1 for run, gib in bare)
    return found


def errors(relative: Iterable[float]) -> dict[str, float]:
    """Return the median and the 90th percentile of absolute prediction errors, and the signed median, in percent.

    ``relative`` has one relative error per training run, such as 0.1 for a prediction that is 10% too high.
    """
    percent = 100 * np.array(list(relative))
    if not percent.size:
        return {"rows": 0}
    return {
        "rows": int(percent.size),
        "median_abs_pct_error": float(np.median(np.abs(percent))),
        "p90_abs_pct_error": float(np.percentile(np.abs(percent), 90)),
        "median_pct_error": float(np.median(percent)),
    }


def _figures(judged: Sequence[Judged]) -> dict[str, Any]:
    found = errors(said.seconds / run.measured_s - 1 for run, said in judged)
    if not judged:
        return found
    return {
        **found,
        "one_share": errors(said.one_share_s / run.measured_s - 1 for run, said in judged),
        "sources": len({_source(run) for run, _ in judged}),
        "interval_held_pct": 100 * float(np.mean([_holds(run, said) for run, said in judged])),
        "interval_needed": interval_needed(judged),
        "median_high_over_low": float(np.median([said.high_s / said.low_s for _, said in judged])),
    }


def _holds(run: TrainingRun, said: RunPrediction) -> bool:
    return said.low_s <= run.measured_s <= said.high_s


def rows_of(judged: Sequence[Judged]) -> list[dict[str, Any]]:
    """Return a list with a row per training run: its settings, and its measured and predicted time and memory."""
    names = ("preset", "gpus", "model", "sequence", "micro_batch", "accumulation", "offload", "source")
    return [
        {
            **{name: run.fields[name] for name in names},
            "family": run.family,
            "held_out": run.held_out,
            "measured_s": run.measured_s,
            "predicted_s": said.seconds,
            "interval_s": [said.low_s, said.high_s],
            "measured_gib": run.measured_gib,
            "predicted_gib": said.gib,
        }
        for run, said in judged
    ]
