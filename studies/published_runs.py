"""How well the simulator predicts published runs of offloaded training that it was not fitted to.

``python -m studies.published_runs --calibrate CSV --predict CSV --json PATH``
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from studies.bench.offload_runs import MEMORY, Run, RunError, read_runs, testbeds
from studies.bench.record import write_record
from studies.published.calibration import FEWEST_ROWS, Calibration, calibrate, fully_measured
from studies.run_memory import TERMS

TIMES = {"forward": "fwd_ms", "backward": "bwd_ms", "step": "step_ms", "iteration": "iter_ms"}
QUANTITIES = (*TIMES, "memory")
CHOICES = ("stride", "offload_ratio")
NEAR_BEST_PCT = 3.0
ROW_FOLDS = 5
FOLDS: dict[str, Callable[[Run], Hashable]] = {  # None: a run that is never left out
    "model": lambda run: run.params_b,
    "ranks": lambda run: run.dp * run.tp,
    "campaign": lambda run: run.family,
    "micro-batch": lambda run: run.micro_batch,
    "offload ratio": lambda run: run.offload_ratio,
    "stride": lambda run: run.stride or None,
}
Pair = tuple[Run, dict[str, float]]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 2 on input that cannot be used."""
    args = _parser().parse_args(arguments)
    try:
        fitted_on = read_runs(args.calibrate)
        asked = read_runs(args.predict, "--predict", blanks=True)
        before = _cross_validation_of(args.before)
        calibration = calibrate(fitted_on, testbeds(asked))
        pairs = predictions(calibration, asked)
        crossed = {} if args.quick else cross_validation(fitted_on)
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    figures = figures_of(calibration, pairs, crossed)
    known = {(run, tuple(sorted(run.measured.items()))) for run in fitted_on}
    repeated = sum((run, tuple(sorted(run.measured.items()))) in known for run in asked)
    figures["predicted_rows_that_were_fitted"] = repeated
    if before:
        figures["before_and_after"] = before_and_after(before, crossed)
    print_tables(figures)
    if repeated:
        print(f"note: {repeated} of the {len(asked)} predicted rows were fitted too")
    write_record(args.json, "published_runs", figures)
    draw(pairs, Path(args.json).with_suffix(".png"))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m studies.published_runs", description=__doc__)
    parser.add_argument("--calibrate", required=True, metavar="CSV", help="runs to fit rates on")
    parser.add_argument("--predict", required=True, metavar="CSV", help="runs to predict")
    parser.add_argument("--json", required=True, metavar="PATH", help="figures; a PNG goes beside")
    parser.add_argument("--quick", action="store_true", help="no cross-validation")
    parser.add_argument(
        "--before", metavar="PATH", help="figures of an earlier model, put beside these"
    )
    return parser


def _cross_validation_of(path: str | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        found = json.loads(Path(path).read_text())["cross_validation"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"--before must be figures with 'cross_validation', but got {path}: {error!r}"
        ) from None
    return dict(found)


def before_and_after(before: dict[str, Any], after: dict[str, Any]) -> list[dict[str, Any]]:
    """A row per way of leaving out, testbed and quantity: medians and 90th percentiles."""
    return [
        {
            "left_out": left_out, "testbed": bed, "quantity": quantity,
            "before": _percentages(before[left_out]["all"][bed][quantity]),
            "after": _percentages(found[quantity]),
        }
        for left_out, crossed in after.items()
        for bed, found in crossed["all"].items()
        for quantity in QUANTITIES
        if quantity in found and quantity in before.get(left_out, {}).get("all", {}).get(bed, {})
    ]  # fmt: skip


def _percentages(found: dict[str, float]) -> list[float]:
    return [round(found[name], 1) for name in ("median_abs_pct_error", "p90_abs_pct_error")]


def predictions(calibration: Calibration, runs: Sequence[Run]) -> list[Pair]:
    """Each run with what is predicted for it."""
    return [(run, calibration.predict(run)) for run in runs]


def measured_and_predicted(pair: Pair, quantity: str) -> tuple[float, float] | None:
    """Milliseconds, or GiB of peak device memory; None where it was not measured."""
    run, predicted = pair
    if quantity == "memory":
        peaks = [run.measured[c] for c in MEMORY if c in run.measured and "peak" in c]
        return (max(peaks), predicted["memory_gb"]) if peaks else None
    column = TIMES[quantity]
    return (run.measured[column], predicted[column]) if column in run.measured else None


def errors(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Median and 90th percentile of absolute percentage errors, by quantity."""
    table: dict[str, Any] = {"rows": len(pairs)}
    for quantity in QUANTITIES:
        both = [measured_and_predicted(pair, quantity) for pair in pairs]
        found = [abs(b[1] / b[0] - 1) * 100 for b in both if b is not None]
        if found:
            table[quantity] = {
                "median_abs_pct_error": float(np.median(found)),
                "p90_abs_pct_error": float(np.percentile(found, 90)),
                "n": len(found),
            }
    return table


def ranking(pairs: Sequence[Pair], choice: str) -> dict[str, Any]:
    """Runs that differ in ``choice`` only: how much slower the predicted best is than the best."""
    groups: dict[tuple[object, ...], list[Pair]] = {}
    for run, predicted in pairs:
        if "iter_ms" in run.measured and not (choice == "stride" and not run.prefetch):
            groups.setdefault(_all_but(run, choice), []).append((run, predicted))
    regrets = [_regret_pct(g) for g in groups.values() if _distinct(g, choice) > 1]
    if not regrets:
        return {"groups": 0}
    return {
        "groups": len(regrets),
        "regret_pct": float(np.median(regrets)),
        "max_regret_pct": max(regrets),
        "within_3_pct_share": sum(r <= NEAR_BEST_PCT for r in regrets) / len(regrets),
    }


def _all_but(run: Run, choice: str) -> tuple[object, ...]:
    fields = (
        "testbed", "params_b", "layers", "hidden", "seq", "tp", "dp", "micro_batch",
        "offload_ratio", "subgroup", "prefetch", "async_grads", "stride", "family",
    )  # fmt: skip
    return tuple(getattr(run, name) for name in fields if name != choice)


def _distinct(group: Sequence[Pair], choice: str) -> int:
    return len({getattr(run, choice) for run, _ in group})


def _regret_pct(group: Sequence[Pair]) -> float:
    chosen = min(group, key=lambda pair: pair[1]["iter_ms"])[0].measured["iter_ms"]
    best = min(run.measured["iter_ms"] for run, _ in group)
    return (chosen / best - 1) * 100


def cross_validation(runs: Sequence[Run]) -> dict[str, Any]:
    """Errors on rows left out: all of a model, all of a number of ranks, ..., a random fifth."""
    shuffled = np.random.default_rng(0).permutation(len(runs)) % ROW_FOLDS
    fold_of = {id(run): int(fold) for run, fold in zip(runs, shuffled, strict=True)}
    keys = {**FOLDS, "fifth of the rows": lambda run: fold_of[id(run)]}
    return {name: _left_out(runs, key) for name, key in keys.items()}


def _left_out(runs: Sequence[Run], key: Callable[[Run], Hashable]) -> dict[str, Any]:
    pairs: list[Pair] = []
    folds: dict[str, Any] = {}
    unpredicted = 0
    for value in sorted({key(run) for run in runs} - {None}, key=str):
        kept = [run for run in runs if key(run) != value]
        usable = [name for name in testbeds(runs) if _enough(kept, name)]
        asked = [run for run in runs if key(run) == value]
        possible = [run for run in asked if run.testbed in usable]
        unpredicted += len(asked) - len(possible)
        if possible:
            found = predictions(calibrate(kept, {run.testbed for run in possible}), possible)
            pairs += found
            folds[str(value)] = _by_testbed(found)
    said = [pair for pair in pairs if pair[0].async_grads is not None]
    return {
        "all": _by_testbed(pairs),
        "rows_that_say_how_gradients_flow": _by_testbed(said),
        "ranking": {choice: ranking(pairs, choice) for choice in CHOICES},
        "rows_without_calibration": unpredicted,
        "folds": folds,
    }


def _enough(runs: Sequence[Run], name: str) -> bool:
    return sum(run.testbed == name and fully_measured(run) for run in runs) >= FEWEST_ROWS


def _by_testbed(pairs: Sequence[Pair]) -> dict[str, Any]:
    names = testbeds([run for run, _ in pairs])
    return {name: errors([p for p in pairs if p[0].testbed == name]) for name in names}


def figures_of(
    calibration: Calibration, pairs: Sequence[Pair], crossed: dict[str, Any]
) -> dict[str, Any]:
    """All that is written."""
    return {
        "what": "published runs (Deep Optimizer States, 2024) against rates fitted to other rows; "
        "forward and backward are closed forms, the step is simulated",
        "predicted": _by_testbed(pairs),
        "ranking": {choice: ranking(pairs, choice) for choice in CHOICES},
        "cross_validation": crossed,
        "rates": {name: _rates(calibration, name) for name in calibration.testbeds},
        "memory_coefficients": dict(zip(TERMS, calibration.memory.coefficients, strict=True)),
        "label_trust": calibration.memory.trust,
        "rows": [_row(calibration, pair) for pair in pairs],
    }


def _rates(calibration: Calibration, name: str) -> dict[str, Any]:
    bed = calibration.testbeds[name]
    return {
        "fitted": {
            key: {"value": float(value), "ci95": list(calibration.intervals[name][key])}
            for key, value in bed.rates.items()
        },
        "dram_of_campaign": dict(bed.dram_of_family),
        "asynchronous_campaigns": sorted(bed.async_families),
    }


def _row(calibration: Calibration, pair: Pair) -> dict[str, Any]:
    run, predicted = pair
    facts = {
        name: getattr(run, name)
        for name in ("testbed", "model", "family", "tp", "dp", "micro_batch", "offload_ratio",
                     "subgroup", "prefetch", "async_grads", "stride")
    }  # fmt: skip
    for name in run.unknown:
        facts[name] = None
    facts["asynchronous_probability"] = calibration.testbeds[run.testbed].asynchronous_probability(
        run
    )
    return {**facts, "predicted": predicted, "measured": run.measured}


def print_tables(figures: dict[str, Any]) -> None:
    """Errors of the predicted rows and of rows left out, per testbed."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="absolute error, median / 90th percentile, %", box=None)
    for heading in ("rows", "testbed", "n", *QUANTITIES):
        text = heading in ("rows", "testbed")
        table.add_column(heading, justify="left" if text else "right", no_wrap=True)
    shown = {"as asked": figures["predicted"]}
    for name, crossed in figures["cross_validation"].items():
        shown[f"without its {name}"] = crossed["all"]
    for label, beds in shown.items():
        for bed, found in beds.items():
            cells = [_cell(found.get(quantity)) for quantity in QUANTITIES]
            table.add_row(label, bed, str(found["rows"]), *cells)
    console = Console(width=120)
    console.print(table)
    for choice, found in figures["ranking"].items():
        if found["groups"]:
            console.print(
                f"best {choice}: regret {found['regret_pct']:.1f}% (worst "
                f"{found['max_regret_pct']:.1f}%), within {NEAR_BEST_PCT:g}% of the best in "
                f"{found['within_3_pct_share']:.0%} of {found['groups']} groups"
            )


def _cell(found: dict[str, float] | None) -> str:
    if found is None:
        return "-"
    return f"{found['median_abs_pct_error']:.1f}/{found['p90_abs_pct_error']:.1f}"


def draw(pairs: Sequence[Pair], path: Path) -> None:
    """Predicted over measured, a panel per quantity."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(QUANTITIES), figsize=(17, 3.9), layout="constrained")
    colours = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
    for ax, quantity in zip(axes, QUANTITIES, strict=True):
        scale, unit = (1.0, "GiB") if quantity == "memory" else (1e-3, "s")
        for name, colour in zip(testbeds([run for run, _ in pairs]), colours, strict=False):
            both = [measured_and_predicted(p, quantity) for p in pairs if p[0].testbed == name]
            points = np.array([b for b in both if b is not None]).reshape(-1, 2) * scale
            ax.scatter(*points.T, s=20, alpha=0.75, color=colour, label=name, linewidths=0)
        _diagonal(ax)
        ax.set_title(f"{quantity} ({unit})" if quantity != "memory" else "peak device memory (GiB)")
        ax.set_xlabel("measured")
    axes[0].set_ylabel("predicted")
    axes[0].legend(frameon=False)
    figure.suptitle("Published runs: predicted over measured, grey band ±10%")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _diagonal(ax: Any) -> None:
    low = min(ax.get_xlim()[0], ax.get_ylim()[0])
    high = max(ax.get_xlim()[1], ax.get_ylim()[1])
    line = np.array([max(low, 0), high])
    ax.fill_between(line, 0.9 * line, 1.1 * line, color="#dddddd", zorder=0, linewidth=0)
    ax.plot(line, line, color="#777777", linewidth=0.8, zorder=1)
    ax.set_xlim(*line)
    ax.set_ylim(*line)
    ax.set_aspect("equal")


if __name__ == "__main__":
    sys.exit(main())
