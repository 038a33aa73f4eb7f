"""Goodput over the checkpoint interval: predicted, and measured on training that gets killed.

Predicted from the simulated stall, interference and time to commit, with Young's, Daly's and
CheckFreq's interval and the tuner's marked. Measured on real runs of a small model under ebbtide's
runtime at each of these intervals: SIGKILL at exponential moments, the same for all, restart from
the newest checkpoint, useful steps counted.

    python -m studies.checkpoint_interval --json studies/results/checkpoint/interval.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from simulator import Machine, Plan, Workload
from simulator.analysis.checkpoint_cost import CheckpointCost, CheckpointSimulation
from simulator.analysis.goodput import expected_goodput
from studies.bench.record import write_record
from studies.checkpoints.interval_run import (
    Child,
    Training,
    profile,
    read_notes,
    read_profile,
    train,
    under,
    warm_up,
)
from tuner.checkpointing import Choice, Failures, best_checkpointing, rules_of_thumb

CYCLE = 8  # steps between the checkpoints whose cost is measured
FACTORS = (0.0, 16.0)  # measured intervals over the tuner's, besides the rules'; at least 1 step
SPARE_BYTES = 2**30  # host memory that the tuner may give to checkpoints
RECORDED_STALL = Path("studies/results/checkpoint/stall.json")


@dataclass(frozen=True)
class Measured:
    """What uninterrupted training with checkpoints showed. Medians over its cycles.

    Attributes:
        iteration_s: of the second half of each cycle, when nothing is written any more.
        stall_s: of the step that saves, above that; interference_s: of all others, summed up.
        told: the runtime's own report of the last checkpoint.
    """

    iteration_s: float
    restart_s: float
    stall_s: float
    interference_s: float
    persist_s: float
    told: dict[str, float]


def measure(training: Training, plan: Plan, folder: Path, cycles: int) -> Measured:
    """Trains under the plan, with a checkpoint every `CYCLE` steps; then once more, resumed."""
    saving = under(plan, CYCLE, folder / "ck")
    for run, last in enumerate((CYCLE * (cycles + 2) - 1, CYCLE * (cycles + 2) + 1)):
        notes = folder / f"notes{run}"
        Child(lambda n=notes, s=last: train(training, saving, n, s), folder / "log").wait()  # type: ignore[misc]
    ((step, set_up_s),) = read_notes(notes, "start")
    steps = {int(n): s for n, s in read_notes(folder / "notes0", "step")}
    by_place = [
        median(steps[n] for n in steps if n % CYCLE == place and n > 2 * CYCLE - 1)
        for place in range(CYCLE)
    ]
    quiet = median(by_place[CYCLE // 2 :])
    stall, waited, persist, copied = read_notes(folder / "notes0", "report")[-1]
    assert step > 0, "the second run must resume"
    return Measured(
        iteration_s=quiet, restart_s=set_up_s,
        stall_s=by_place[0] - quiet, interference_s=sum(by_place[1:]) - quiet * (CYCLE - 1),
        persist_s=persist,
        told={"stall_s": stall, "update_wait_s": waited, "copied_bytes": copied},
    )  # fmt: skip


def host_plan(work: Workload) -> Plan:
    """All on the host: without a GPU there is no other placement."""
    return Plan(
        subgroup_size=work.subgroup_size or max(work.subgroups), subgroups=work.subgroups,
        placement=Plan.runs(["host"] * len(work.subgroups)), staging_slots=0,
    )  # fmt: skip


def as_fast_as_measured(
    work: Workload, plan: Plan, machine: Machine, iteration_s: float
) -> Workload:
    """Forward and backward stretched until an iteration takes as long as it does here and now."""
    for _ in range(4):
        factor = iteration_s / CheckpointSimulation(work, plan, machine).iteration_s
        layers = [
            layer.model_copy(
                update={
                    "forward_s": layer.forward_s * factor,
                    "backward_s": layer.backward_s * factor,
                }
            )
            for layer in work.layers
        ]
        work = work.model_copy(update={"layers": tuple(layers)})
    return work


# -- predicted ---------------------------------------------------------------------------------


def goodput_at(
    steps: int, iteration_s: float, cost: CheckpointCost, failures: Failures, busy: str = "wait"
) -> float:
    """Expected in the long run, also where the next checkpoint has to wait for the last one."""
    every, paid = cost.at_interval(steps, iteration_s, busy)
    return expected_goodput(
        iteration_s, paid.stall_s, paid.interference_s, every, failures.mtbf_s, failures.restart_s,
        paid.persist_s,
    )  # fmt: skip


def predict(simulation: CheckpointSimulation, choice: Choice, failures: Failures) -> dict[str, Any]:
    """The curve, and the rules on it."""
    iteration_s, cost = simulation.iteration_s, choice.cost
    marks = {
        "ebbtide": choice.saving.interval_steps,
        **rules_of_thumb(iteration_s, cost, failures),
    }
    most = 40 * max(marks.values())
    steps = sorted({round(k) for k in np.geomspace(1, most, 80)} | set(marks.values()))
    return {
        "iteration_s": iteration_s,
        "cost": {name: getattr(cost, name) for name in
                 ("stall_s", "interference_s", "persist_s", "slowdown", "copied_bytes",
                  "waited_bytes", "reserved_bytes")},
        "checkpoint": choice.saving.model_dump(),
        "curve": [[k, goodput_at(k, iteration_s, cost, failures)] for k in steps],
        "rules": {
            name: {"interval_steps": k, "goodput": goodput_at(k, iteration_s, cost, failures)}
            for name, k in marks.items()
        },
    }  # fmt: skip


def useful_steps(
    gap_s: float, steps: int, iteration_s: float, restart_s: float, cost: CheckpointCost
) -> int:
    """Committed between two failures that lie so far apart, as predicted."""
    every, paid = cost.at_interval(steps, iteration_s, "wait")
    interval_s = every * iteration_s + paid.stall_s + paid.interference_s
    return every * max(0, math.floor((gap_s - restart_s - paid.persist_s) / interval_s))


# -- measured ----------------------------------------------------------------------------------


def failure_gaps(mtbf_s: float, count: int, seed: int) -> list[float]:
    """Exponential, one from each of ``count`` equal parts of the distribution, in random order.

    All intervals get the same failures.
    """
    gaps = [-mtbf_s * math.log(1 - (i + 0.5) / count) for i in range(count)]
    random.Random(seed).shuffle(gaps)
    return gaps


def campaign(
    training: Training, plan: Plan, intervals: Sequence[int], gaps_s: Sequence[float], folder: Path
) -> list[dict[str, Any]]:
    """Trains with a checkpoint every so many steps, killed behind each gap.

    The intervals take turns, failure by failure: what neighbours do to the machine meets them all.
    """
    failures: dict[int, list[dict[str, Any]]] = {steps: [] for steps in intervals}
    for number, gap_s in enumerate(gaps_s):
        for steps, rows in failures.items():
            home = folder / f"every{steps}"
            home.mkdir(exist_ok=True)
            notes, saving = home / f"notes{number}", under(plan, steps, home / "ck")
            begin = time.monotonic()
            child = Child(lambda n=notes, p=saving: train(training, p, n), folder / "log")  # type: ignore[misc]
            time.sleep(max(0.0, gap_s - (time.monotonic() - begin)))
            child.kill()
            rows.append({"gap_s": time.monotonic() - begin, **_progress(notes, steps)})
        print(f"failure {number + 1} of {len(gaps_s)}", flush=True)
    return [
        {"interval_steps": steps, "kills": len(rows), "failures": rows,
         "useful_steps": _committed(folder / f"every{steps}" / "ck")}
        for steps, rows in failures.items()
    ]  # fmt: skip


def _committed(folder: Path) -> int:
    """The step of the newest checkpoint that verifies: what a restart would go on from."""
    from runtime.checkpoint.inspect import verify
    from runtime.checkpoint.restore import newest_valid

    if not folder.is_dir():
        return 0
    tag = newest_valid(folder, lambda name: verify(folder, name)).tag
    return int(tag.removeprefix("global_step")) if tag else 0


def _progress(notes: Path, interval_steps: int) -> dict[str, Any]:
    started, steps = read_notes(notes, "start"), read_notes(notes, "step")
    # The second half of an interval has no checkpoint beside it; the first steps warm up.
    quiet = [s for n, s in steps[2:] if 2 * (n % interval_steps) > interval_steps]
    return {
        "resumed_step": int(started[0][0]) if started else None,
        "restart_s": started[0][1] if started else None,
        "reached_step": int(steps[-1][0]) if steps else None,
        "quiet_s": quiet,
    }


def with_speed(rows: list[dict[str, Any]], usual_s: float) -> list[dict[str, Any]]:
    """Adds to each failure what an iteration took around then, on any interval's turn."""
    for turn in zip(*(row["failures"] for row in rows), strict=True):
        quiet = [s for failure in turn for s in failure["quiet_s"]]
        for failure in turn:
            del failure["quiet_s"]
            failure["iteration_s"] = median(quiet) if len(quiet) >= CYCLE else usual_s
    return rows


def compare(row: dict[str, Any], restart_s: float, cost: CheckpointCost) -> dict[str, Any]:
    """Goodput as measured, and as predicted for just these failures.

    Time counts in iterations of that moment: neighbours make this machine faster and slower.
    """
    steps, failures = row["interval_steps"], row["failures"]
    expected = sum(
        useful_steps(f["gap_s"], steps, f["iteration_s"], restart_s, cost) for f in failures
    )
    iterations = sum(f["gap_s"] / f["iteration_s"] for f in failures)
    wall_s = sum(f["gap_s"] for f in failures)
    return {
        **row, "wall_s": wall_s, "useful_steps_per_s": row["useful_steps"] / wall_s,
        "goodput": row["useful_steps"] / iterations,
        "predicted_goodput_same_failures": expected / iterations,
    }  # fmt: skip


def against_stall_study(simulation: CheckpointSimulation, training: Training) -> dict[str, Any]:
    """Beside the recorded `studies.checkpoint_stall` of the same model: its own optimizer's run."""
    if not RECORDED_STALL.exists():
        return {}
    found = json.loads(RECORDED_STALL.read_text())
    same = {"model": training.model, "sequence": training.sequence}
    if {key: found["workload"].get(key) for key in same} != same:
        return {}
    ours, cost = found["writers"]["ebbtide"], simulation.cost(simulation.plan.checkpoint)
    slowdowns = {}
    for key, steps in (("every_1", 1), ("every_10", 10)):
        _, paid = cost.at_interval(steps, simulation.iteration_s, "wait")
        slowdowns[key] = {
            "predicted": paid.cost_s / steps / simulation.iteration_s,
            "measured": ours[key]["slowdown"],
        }
    return {
        "measured_stall_s": ours["every_10"]["stall_s"], "predicted_stall_s": cost.stall_s,
        "slowdown": slowdowns,
        "note": "measured in another run, with DeepSpeed's own optimizer and other threads",
    }  # fmt: skip


# -- the study ---------------------------------------------------------------------------------


def study(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All figures."""
    training = Training("tiny", 32, 20_000) if args.quick else Training()
    seconds, cycles = (2.0, 2) if args.quick else (12.0, 8)
    warm_up()
    Child(lambda: profile(training, folder, seconds), folder / "log").wait()
    machine, work = read_profile(folder)
    plan = host_plan(work)
    seen = measure(training, plan, folder, cycles)
    work = as_fast_as_measured(work, plan, machine, seen.iteration_s)
    simulation = CheckpointSimulation(work, plan, machine)
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
        "model": training.model, "checkpoint_bytes": work.checkpoint_bytes,
        "mtbf_s": args.mtbf, "restart_s": failures.restart_s,
        "measured_cost": vars(seen),
        "predicted": predict(simulation, choice, failures),
        "measured": rows, **distance(rows, simulation.iteration_s, choice.cost, failures),
        "rules": judged_rules(rows, predicted["rules"]),
        "kills": sum(row["kills"] for row in rows),
        "stall_study": against_stall_study(simulation, training),
    }  # fmt: skip


def distance(
    rows: list[dict[str, Any]], iteration_s: float, cost: CheckpointCost, failures: Failures
) -> dict[str, Any]:
    """How far apart prediction and measurement are, in percentage points of goodput."""
    for row in rows:
        row["predicted_goodput"] = goodput_at(row["interval_steps"], iteration_s, cost, failures)
    apart = [100 * abs(r["goodput"] - r["predicted_goodput_same_failures"]) for r in rows]
    long_run = [100 * abs(r["goodput"] - r["predicted_goodput"]) for r in rows]
    best = max(rows, key=lambda r: r["goodput"])
    return {
        "median_abs_error_points": median(apart), "max_abs_error_points": max(apart),
        "median_abs_error_points_long_run": median(long_run),
        "best_measured_interval_steps": best["interval_steps"],
    }  # fmt: skip


def judged_rules(
    rows: Sequence[dict[str, Any]], rules: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """Each rule's interval as measured; and of pairs of rules that name different intervals, how
    many the prediction ranks as the measurement does. All have met the same failures.
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
    pairs = [
        (a, b) for a, b in itertools.combinations(seen.values(), 2)
        if a["interval_steps"] != b["interval_steps"]
    ]  # fmt: skip
    right = sum(
        (a["goodput"] - b["goodput"]) * (a["predicted"] - b["predicted"]) > 0 for a, b in pairs
    )
    apart = [abs(a["goodput"] - b["goodput"]) * 100 for a, b in pairs]
    return {
        "measured": seen, "pairs": len(pairs), "pairs_ranked_as_predicted": right,
        "most_points_apart": max(apart, default=0.0),
        "best": max(seen, key=lambda name: seen[name]["goodput"]) if seen else None,
    }  # fmt: skip


def print_table(figures: dict[str, Any]) -> None:
    """Costs, rules, then interval by interval."""
    from rich.console import Console
    from rich.table import Table

    seen, predicted = figures["measured_cost"], figures["predicted"]
    for name in ("stall_s", "interference_s", "persist_s"):
        print(f"{name}: predicted {predicted['cost'][name] * 1e3:.1f} ms, "
              f"measured {seen[name] * 1e3:.1f} ms")  # fmt: skip
    for name, rule in predicted["rules"].items():
        print(f"{name}: every {rule['interval_steps']} steps, goodput {rule['goodput']:.1%}")
    table = Table(
        "every", "kills", "measured", "predicted, same kills", "in the long run", box=None
    )
    for row in figures["measured"]:
        values = (row["goodput"], row["predicted_goodput_same_failures"], row["predicted_goodput"])
        table.add_row(str(row["interval_steps"]), str(row["kills"]), *(f"{v:.1%}" for v in values))
    Console(width=100).print(table)
    judged = figures["rules"]
    for name, rule in judged["measured"].items():
        print(f"{name}: every {rule['interval_steps']} steps, measured {rule['goodput']:.1%}")
    print(
        f"pairs of rules ranked as measured: {judged['pairs_ranked_as_predicted']} of "
        f"{judged['pairs']}; at most {judged['most_points_apart']:.1f} points apart"
    )
    print(f"apart: median {figures['median_abs_error_points']:.1f} points of goodput")


def draw(figures: dict[str, Any], path: Path) -> None:
    """Predicted with the rules, measured beside it."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(
        1, 2, figsize=(11, 4.2), sharex=True, sharey=True, layout="constrained"
    )
    predicted = figures["predicted"]
    for ax in (left, right):
        ax.plot(*np.array(predicted["curve"]).T, color="#999999", label="predicted, long run")
        ax.set_xscale("log")
        ax.xaxis.set_major_formatter("{x:g}")
        ax.set_xlabel("steps between checkpoints")
        ax.spines[["top", "right"]].set_visible(False)
    styles = (("o", 13, "none"), ("s", 9, "none"), ("D", 5, "none"), ("^", 8, "none"))
    colours = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
    marks = zip(predicted["rules"].items(), styles, colours, strict=True)
    for (name, rule), (marker, size, face), colour in marks:
        left.plot(
            rule["interval_steps"], rule["goodput"], marker, ms=size, mfc=face, mec=colour, mew=1.8,
            label=f"{name}: {rule['interval_steps']}", ls="none",
        )  # fmt: skip
    rows = figures["measured"]
    x = [row["interval_steps"] for row in rows]
    right.plot(x, [row["predicted_goodput_same_failures"] for row in rows], "o", mfc="none",
               mec="#0072b2", ms=9, label="predicted for these very kills")  # fmt: skip
    right.plot(x, [row["goodput"] for row in rows], "o-", color="#d55e00", ms=5, label="measured")
    left.set(ylabel="goodput", ylim=(0, 1))
    left.set_title(f"Predicted: MTBF {figures['mtbf_s']:g} s, restart {figures['restart_s']:.1f} s",
                   fontsize=10)  # fmt: skip
    right.set_title(f"Measured: {figures['kills']} real kills ({figures['model']} on CPU cores)",
                    fontsize=10)  # fmt: skip
    for ax in (left, right):
        ax.legend(frameon=False, fontsize=9, loc="lower left")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m studies.checkpoint_interval", description=__doc__
    )
    parser.add_argument("--json", required=True, metavar="PATH")
    parser.add_argument("--mtbf", type=float, default=25.0, help="seconds between failures")
    parser.add_argument("--failures", type=int, default=5, help="kills per interval")
    parser.add_argument("--folder", help="where checkpoints go; a temporary folder")
    parser.add_argument("--quick", action="store_true", help="a tiny model, one interval, one kill")
    args = parser.parse_args(arguments)
    if not 0 < args.mtbf < math.inf or args.failures < 1:
        parser.error(f"--mtbf must be > 0 and --failures >= 1, but got {args.mtbf} and "
                     f"{args.failures}")  # fmt: skip
    if args.quick:
        args.failures = 1
    folder = Path(tempfile.mkdtemp(prefix="ebbtide-interval-", dir=args.folder))
    try:
        figures = study(args, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print_table(figures)
    write_record(args.json, "checkpoint_interval", figures)
    draw(figures, Path(args.json).with_suffix(".png"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
