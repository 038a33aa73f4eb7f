"""Accuracy of ebbtide's predictions of published training runs, without and with calibration.

    python -m studies.published_runs --json PATH [--predict CSV] [--training CSV] [--calibrate CSV]

A prediction is made as a user would make it before training: from a preset machine, `workload_from_model`,
`build_strategy` and the simulator (`studies.published_runs.shipped`).

- ``--predict``: File of runs with offload to predict. Default: the repository's `published_offload_runs.csv`.
- ``--training``: File of further runs to predict. Default: the repository's `published_training_runs.csv`, or no file
  if ``--predict`` is given. The errors of these runs are shown by family: A100, H100, consumer cards, and offloaded
  training. Some constants of presets were fitted to some of these runs, so the errors of these runs are shown
  separately (`studies.published_runs.families`).
- ``--calibrate``: File of runs that correct the presets, as `tune calibrate` does. The errors with and without the
  correction are printed side by side.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ebbtide.simulator import Machine
from ebbtide.tuner.calibrate.interval import CAMPAIGN_SPREAD, OFFLOAD_SPREAD
from rich.console import Console

from studies.bench.console import study_parser, tables
from studies.bench.offload_runs import PublishedRun, RunError, read_runs, testbeds
from studies.bench.record import write_record
from studies.published_runs import families, judging
from studies.published_runs.judging import CHOICES
from studies.published_runs.left_out import FEWER_AND_MORE, RUNS, cross_validation, random_draws
from studies.published_runs.makers import between_makers
from studies.published_runs.shipped import as_logged, calibrated, fits, machine_of, workload_of
from studies.published_runs.training import ROWS, predict_training, read_training_runs

Machines = Mapping[str, Machine]
OFFLOAD_ROWS = ROWS.with_name("published_offload_runs.csv")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command of the study of published training runs. Return 0, or 2 if an input file cannot be used."""
    args = _parser().parse_args(arguments)
    if args.predict is None:
        args.predict, args.training = OFFLOAD_ROWS, args.training or ROWS
    try:
        asked = read_runs(args.predict, "--predict", blanks=True)
        presets = {name: machine_of(name) for name in testbeds(asked)}
        for run in asked:  # report runs that cannot be predicted before the calibration, which takes minutes
            workload_of(run, presets[run.testbed])
        seen = read_runs(args.calibrate) if args.calibrate else []
        corrected = calibrated(presets, seen) if seen else {}
        crossed = {} if args.quick or not seen else cross_validation(seen)
        sizes = (RUNS, *FEWER_AND_MORE) if seen and args.triples else ()
        draws = {size: random_draws(seen, args.triples, size) for size in sizes}
        figures = figures_of(presets, corrected, seen, asked, crossed)
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    figures["random_triples"] = draws.pop(RUNS, {})
    figures["random_draws"] = draws
    figures["training"] = training_figures(args.training) if args.training else {}
    print_tables(figures)
    write_record(args.json, "published_runs", figures)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = study_parser("published_runs", __doc__)
    parser.add_argument(
        "--calibrate",
        metavar="CSV",
        help="file with published runs. The machine presets are calibrated on these runs before the prediction "
        "(default: no calibration)",
    )
    parser.add_argument(
        "--predict",
        metavar="CSV",
        help="file with published runs of offloaded training to predict (default: "
        "studies/data/published_offload_runs.csv)",
    )
    parser.add_argument(
        "--training",
        metavar="CSV",
        help="file with published training runs. Their prediction errors are shown for each family of runs, such as "
        "all runs on A100 GPUs",
    )
    parser.add_argument("--quick", action="store_true", help="skip the cross-validation of the calibration")
    parser.add_argument(
        "--triples",
        type=int,
        default=0,
        metavar="N",
        help="also repeat N times: calibrate on three random runs of the file --calibrate, and predict other runs",
    )
    return parser


def figures_of(
    presets: Machines,
    corrected: Mapping[str, Any],
    seen: Sequence[PublishedRun],
    asked: Sequence[PublishedRun],
    crossed: dict[str, Any],
) -> dict[str, Any]:
    """Return all results of the study of published runs as a dict for the result file.

    Args:
        presets: Machines of the testbeds, not calibrated.
        corrected: Calibrated machines of the testbeds. Empty if ``--calibrate`` was not given.
        seen: Runs that the machines were calibrated on.
        crossed: Errors of the cross-validation.
    """
    unfitted = judging.predictions(presets, asked)
    machines = {name: c.machine for name, c in corrected.items()} or presets
    pairs = judging.predictions(machines, asked, seen)
    known = {(run, tuple(sorted(run.measured.items()))) for run in seen}
    return {
        "what": "published runs (Deep Optimizer States, 2024) predicted by the shipped path: "
        "preset, workload_from_model, build_strategy, simulate",
        "calibrated_on": len(seen),
        "predicted": judging.by_testbed(pairs),
        "nothing_fitted": {
            "predicted": judging.by_testbed(unfitted),
            "as_logged": judging.by_testbed(judging.predictions(presets, [as_logged(run) for run in asked])),
            "pairs": judging.pairs_by_testbed(unfitted),
            "intervals": judging.intervals(presets, asked),
            "intervals_left_out": judging.left_out_intervals(presets, asked),
        },
        "campaign_spread": _campaign_spread(),
        "pairs": judging.pairs_by_testbed(pairs),
        "intervals": judging.intervals(machines, asked, seen) if corrected else {},
        "ranking": {choice: judging.ranking(pairs, choice) for choice in CHOICES},
        "cross_validation": crossed,
        "calibration": {name: _calibration(c) for name, c in corrected.items()},
        "predicted_rows_that_were_fitted": sum((run, tuple(sorted(run.measured.items()))) in known for run in asked),
        "predicted_rows_that_do_not_fit": sum(not fits(predicted) for _, predicted in pairs),
        "rows": [_row(pair) for pair in pairs],
    }


def _campaign_spread() -> dict[str, float]:
    sigma, freedom = between_makers()
    return {"shipped": CAMPAIGN_SPREAD, "between_makers": sigma, "degrees_of_freedom": freedom}


def _calibration(calibrated: Any) -> dict[str, Any]:
    return {
        "changes": {
            c.field: {"before": c.before, "after": c.after, "quartiles": [c.low, c.high]} for c in calibrated.changes
        },
        "contradictions": list(calibrated.contradictions),
        "left_pct": calibrated.left_pct,
    }


def _row(pair: judging.Pair) -> dict[str, Any]:
    run, predicted = pair
    facts = {
        name: getattr(run, name)
        for name in (
            "testbed",
            "model",
            "family",
            "tp",
            "dp",
            "micro_batch",
            "accumulation",
            "offload_ratio",
            "subgroup",
            "prefetch",
            "async_grads",
            "stride",
        )
    }
    for name in run.unknown:
        facts[name] = None
    return {**facts, "fits": fits(predicted), "predicted": predicted, "measured": run.measured}


def print_tables(figures: dict[str, Any]) -> None:
    """Print tables of the prediction errors of published runs.

    There are tables for predictions from presets with nothing fitted, from calibrated machines, and from machines
    calibrated on other runs than the predicted ones. Runs that do not fit into memory as predicted are named.
    """
    unfitted = {name: figures["nothing_fitted"][name] for name in ("predicted", "pairs", "intervals")}
    shown: dict[str, Any] = {"nothing_fitted": unfitted}
    if figures["calibrated_on"]:
        shown["calibrated"] = figures["predicted"]
    shown["calibrated_on_others"] = {name: one["all"] for name, one in figures["cross_validation"].items()}
    shown |= {name: figures[name] for name in ("ranking", "random_triples")}
    training = figures["training"]
    shown["training"] = {name: training[name] for name in ("families", "memory") if name in training}
    console = Console(width=120)
    console.print(*tables("published_runs", shown))
    repeated = figures["predicted_rows_that_were_fitted"]
    if repeated:
        console.print(
            f"note: {repeated} of the {len(figures['rows'])} predicted runs were also used for the calibration, so "
            "their errors do not test the predictions"
        )
    for row in figures["rows"]:
        if not row["fits"]:
            missing = row["predicted"]
            console.print(
                f"does not fit: {row['testbed']}, {row['model']}, tp {row['tp']}, dp {row['dp']}, "
                f"micro-batch {row['micro_batch']} would need {missing['missing_gb']:.1f} GiB more "
                f"GPU memory and {missing['missing_host_gb']:.1f} GiB more host memory"
            )


def training_figures(path: str | Path) -> dict[str, Any]:
    """Predict published training runs, and return the errors in time (by family of runs) and in memory.

    The dict also has, by preset machine, the percentage of runs whose measured time lies in the predicted interval.
    """
    judged = [(run, predict_training(run)) for run in read_training_runs(Path(path))]
    return {
        "families": families.by_family(judged),
        "presets": families.by_preset(judged),
        "memory": families.memory(judged),
        "offload_spread": {"shipped": OFFLOAD_SPREAD, **families.spread(judged)},
        "rows": families.rows_of(judged),
    }


if __name__ == "__main__":
    raise SystemExit(main())
