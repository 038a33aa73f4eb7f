"""Goodput over the checkpoint interval: predicted, and measured on training that gets killed.

Goodput is useful training per time. The prediction simulates how long a checkpoint stalls and
slows down training, and how long its commit takes. It is made for the intervals of Young, Daly and
CheckFreq, and for the interval that ebbtide's tuner chooses.

For the measurement, a small model is trained under ebbtide's runtime at each of these intervals.
Training is killed with SIGKILL after exponentially distributed times, which are the same for all
intervals. Then it restarts from the newest checkpoint. The steps that were not lost are counted.

    python -m studies.checkpoint_interval --json studies/results/checkpoint/interval.json
"""

import argparse
import itertools
import json
import math
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from ebbtide.simulator import Machine, Plan, Way, Workload
from ebbtide.simulator.analysis.goodput import CheckpointCost, CheckpointPrice, Failures
from ebbtide.tuner.placements.checkpointing import Choice, best_checkpointing, rules_of_thumb

from studies.bench.console import publish, study_parser
from studies.bench.forked import Child
from studies.checkpoint_interval.kills import campaign, compare, failure_gaps, goodput_at, paid_at, with_speed
from studies.checkpoints.interval_run import IntervalTraining, profile, read_notes, read_profile, train, under, warm_up

CYCLE = 8  # steps between the checkpoints whose cost is measured
# Measured intervals divided by the tuner's interval, in addition to those of the rules. At least 1 step.
FACTORS = (0.0, 16.0)
SPARE_BYTES = 2**30  # host memory that the tuner may use for checkpoints
RECORDED_STALL = Path("studies/results/checkpoint/stall.json")


@dataclass(frozen=True)
class UninterruptedTimes:
    """Measured times of training that saves checkpoints and is not interrupted.

    The training consists of cycles with one checkpoint each, and times are medians over the cycles.

    Attributes:
        iteration_s: Seconds of an iteration in the second half of a cycle, when no checkpoint is being written.
        stall_s: Additional seconds of the step that saves the checkpoint.
        interference_s: Additional seconds of all other steps of a cycle together.
        told: Times and bytes that ebbtide's runtime itself reported of the last checkpoint.
    """

    iteration_s: float
    restart_s: float
    stall_s: float
    interference_s: float
    persist_s: float
    told: dict[str, float]


def measure(training: IntervalTraining, plan: Plan, folder: Path, cycles: int) -> UninterruptedTimes:
    """Measure training that saves a checkpoint every `CYCLE` steps, and one resume from such a checkpoint.

    The training runs under ``plan``.
    """
    saving = under(plan, CYCLE, folder / "ck")
    for run, last in enumerate((CYCLE * (cycles + 2) - 1, CYCLE * (cycles + 2) + 1)):
        notes = folder / f"notes{run}"
        Child(lambda n=notes, s=last: train(training, saving, n, s), folder / "log").wait()  # type: ignore[misc]
    ((step, set_up_s),) = read_notes(notes, "start")
    steps = {int(n): s for n, s in read_notes(folder / "notes0", "step")}
    by_place = [median(steps[n] for n in steps if n % CYCLE == place and n > 2 * CYCLE - 1) for place in range(CYCLE)]
    quiet = median(by_place[CYCLE // 2 :])
    stall, waited, persist, copied = read_notes(folder / "notes0", "report")[-1]
    assert step > 0, "the second run must resume"
    return UninterruptedTimes(
        iteration_s=quiet,
        restart_s=set_up_s,
        stall_s=by_place[0] - quiet,
        interference_s=sum(by_place[1:]) - quiet * (CYCLE - 1),
        persist_s=persist,
        told={"stall_s": stall, "update_wait_s": waited, "copied_bytes": copied},
    )


def host_plan(work: Workload) -> Plan:
    """Return a plan with all optimizer state in host memory, updated by the CPU.

    This is the only placement on a machine without a GPU.
    """
    return Plan(
        subgroup_size=work.subgroup_size or max(work.subgroups),
        subgroups=work.subgroups,
        ways=Way.each(["host"] * len(work.subgroups)),
        staging_slots=0,
    )


def as_fast_as_measured(work: Workload, plan: Plan, machine: Machine, iteration_s: float) -> Workload:
    """Return the workload with the forward and backward times of its layers scaled to a measured iteration.

    They are scaled until the simulated iteration under ``plan`` takes ``iteration_s`` seconds.
    """
    for _ in range(4):
        factor = iteration_s / CheckpointPrice(work, plan, machine).iteration_s
        layers = [
            layer.model_copy(update={"forward_s": layer.forward_s * factor, "backward_s": layer.backward_s * factor})
            for layer in work.layers
        ]
        work = work.model_copy(update={"layers": tuple(layers)})
    return work


# -- predicted ---------------------------------------------------------------------------------


def predict(simulation: CheckpointPrice, choice: Choice, failures: Failures) -> dict[str, Any]:
    """Return the predicted goodput (useful training per time) over the checkpoint interval.

    The dict has a ``curve`` of (steps, goodput) pairs, and ``rules`` with the interval and goodput of each
    rule: Young, Daly, CheckFreq and ebbtide's tuner. It also has the predicted cost of one checkpoint.
    """
    iteration_s, cost = simulation.iteration_s, choice.cost
    marks = {"ebbtide": choice.saving.interval_steps, **rules_of_thumb(iteration_s, cost, failures)}
    most = 40 * max(marks.values())
    steps = sorted({round(k) for k in np.geomspace(1, most, 80)} | set(marks.values()))
    return {
        "iteration_s": iteration_s,
        "cost": {
            name: getattr(cost, name)
            for name in (
                "stall_s",
                "interference_s",
                "persist_s",
                "slowdown",
                "copied_bytes",
                "waited_bytes",
                "reserved_bytes",
            )
        },
        "checkpoint": choice.saving.model_dump(),
        "curve": [[k, goodput_at(k, iteration_s, cost, failures)] for k in steps],
        "rules": {
            name: {"interval_steps": k, "goodput": goodput_at(k, iteration_s, cost, failures)}
            for name, k in marks.items()
        },
    }


def against_stall_study(simulation: CheckpointPrice, training: IntervalTraining) -> dict[str, Any]:
    """Return the stalls and slowdowns that checkpoints cause: predicted here, and measured by
    `studies.checkpoint_stall`.

    The measurements come from that study's result file. If the file has none for this model and sequence length, the
    dict is empty.
    """
    if not RECORDED_STALL.exists():
        return {}
    result = json.loads(RECORDED_STALL.read_text())
    same = {"model": training.model, "sequence": training.sequence}
    if {key: result["workload"].get(key) for key in same} != same:
        return {}
    ours, cost = result["writers"]["ebbtide"], simulation.cost(simulation.plan.checkpoint)
    slowdowns = {}
    for key, steps in (("every_1", 1), ("every_10", 10)):
        paid = paid_at(steps, simulation.iteration_s, cost)
        slowdowns[key] = {"predicted": paid.cost_s / steps / simulation.iteration_s, "measured": ours[key]["slowdown"]}
    return {
        "measured_stall_s": ours["every_10"]["stall_s"],
        "predicted_stall_s": cost.stall_s,
        "slowdown": slowdowns,
        "note": "measured in another run, with DeepSpeed's own optimizer and other threads",
    }


# -- the study ---------------------------------------------------------------------------------


def study(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    training = IntervalTraining("tiny", 32, 20_000) if args.quick else IntervalTraining()
    seconds, cycles = (0.5, 1) if args.quick else (12.0, 8)
    warm_up()
    Child(lambda: profile(training, folder, seconds), folder / "log").wait()
    machine, work = read_profile(folder)
    plan = host_plan(work)
    seen = measure(training, plan, folder, cycles)
    work = as_fast_as_measured(work, plan, machine, seen.iteration_s)
    simulation = CheckpointPrice(work, plan, machine)
    failures = Failures(args.mtbf, seen.restart_s)
    choice = best_checkpointing(simulation, failures, SPARE_BYTES)
    plan = plan.model_copy(update={"checkpoint": choice.saving})
    best = choice.saving.interval_steps
    predicted = predict(simulation, choice, failures)
    named = {rule["interval_steps"] for rule in predicted["rules"].values()}
    intervals = sorted({*named, *(max(1, round(best * factor)) for factor in FACTORS)})
    gaps = failure_gaps(args.mtbf, args.failures, seed=1)
    rows = campaign(training, plan, [best] if args.quick else intervals, gaps, folder)
    rows = with_speed(rows, seen.iteration_s)
    restarts = [f["restart_s"] for row in rows for f in row["failures"] if f["restart_s"]]
    failures = Failures(args.mtbf, median(restarts) if restarts else seen.restart_s)
    rows = [compare(row, failures.restart_s, choice.cost) for row in rows]
    return {
        "what": "a small model on this machine's cores, no GPU; ebbtide's runtime, real kills",
        "model": training.model,
        "checkpoint_bytes": work.checkpoint_bytes,
        "mtbf_s": args.mtbf,
        "restart_s": failures.restart_s,
        "measured_cost": vars(seen),
        "predicted": predict(simulation, choice, failures),
        "measured": rows,
        **distance(rows, simulation.iteration_s, choice.cost, failures),
        "rules": judged_rules(rows, predicted["rules"]),
        "kills": sum(row["kills"] for row in rows),
        "stall_study": against_stall_study(simulation, training),
    }


def distance(
    rows: list[dict[str, Any]], iteration_s: float, cost: CheckpointCost, failures: Failures
) -> dict[str, Any]:
    """Compare measured goodput (useful training per time) with two predictions, and return the differences in
    percentage points.

    The first prediction assumes failures at the same times as in the measurement. The second prediction is the expected
    goodput if failures occur at a constant rate. The second prediction is added to each row as ``predicted_goodput``.

    Args:
        rows: Measured results, one row for each checkpoint interval. A row also has the first prediction, as
            ``predicted_goodput_same_failures``.

    Returns:
        A dict with the median and the largest absolute difference between the first prediction and the measurement, the
        median absolute difference between the second prediction and the measurement, and the checkpoint interval with
        the best measured goodput.
    """
    for row in rows:
        row["predicted_goodput"] = goodput_at(row["interval_steps"], iteration_s, cost, failures)
    apart = [100 * abs(r["goodput"] - r["predicted_goodput_same_failures"]) for r in rows]
    long_run = [100 * abs(r["goodput"] - r["predicted_goodput"]) for r in rows]
    best = max(rows, key=lambda r: r["goodput"])
    return {
        "median_abs_error_points": median(apart),
        "max_abs_error_points": max(apart),
        "median_abs_error_points_long_run": median(long_run),
        "best_measured_interval_steps": best["interval_steps"],
    }


def judged_rules(rows: Sequence[dict[str, Any]], rules: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Compare rules for the checkpoint interval (such as Young's or Daly's) by measured goodput.

    The returned dict has the measured goodput at each rule's interval. It also has the number of pairs of
    rules that the prediction ranks as the measurement does. Pairs that choose the same interval are left
    out. Training with each interval was killed at the same times.
    """
    by_steps = {row["interval_steps"]: row for row in rows}
    seen = {
        name: {
            "interval_steps": rule["interval_steps"],
            "goodput": by_steps[rule["interval_steps"]]["goodput"],
            "predicted": by_steps[rule["interval_steps"]]["predicted_goodput_same_failures"],
        }
        for name, rule in rules.items()
        if rule["interval_steps"] in by_steps
    }
    pairs = [(a, b) for a, b in itertools.combinations(seen.values(), 2) if a["interval_steps"] != b["interval_steps"]]
    right = sum((a["goodput"] - b["goodput"]) * (a["predicted"] - b["predicted"]) > 0 for a, b in pairs)
    apart = [abs(a["goodput"] - b["goodput"]) * 100 for a, b in pairs]
    return {
        "measured": seen,
        "pairs": len(pairs),
        "pairs_ranked_as_predicted": right,
        "most_points_apart": max(apart, default=0.0),
        "best": max(seen, key=lambda name: seen[name]["goodput"]) if seen else None,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = study_parser("checkpoint_interval", __doc__)
    parser.add_argument("--mtbf", type=float, default=25.0, help="mean seconds between failures")
    parser.add_argument(
        "--failures",
        type=int,
        default=5,
        help="number of times that a training run is killed, for each checkpoint interval that is tried",
    )
    parser.add_argument("--folder", help="where a temporary folder for checkpoints is made (default: TMPDIR)")
    parser.add_argument(
        "--quick", action="store_true", help="use a tiny model, one checkpoint interval and one kill, for tests"
    )
    args = parser.parse_args(arguments)
    if not 0 < args.mtbf < math.inf or args.failures < 1:
        parser.error(f"--mtbf must be > 0 and --failures >= 1, but got {args.mtbf} and {args.failures}")
    if args.quick:
        args.failures = 1
    folder = Path(tempfile.mkdtemp(prefix="ebbtide-interval-", dir=args.folder))
    try:
        figures = study(args, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    publish("checkpoint_interval", args.json, figures)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
