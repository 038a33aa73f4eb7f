"""Goodput over the checkpoint interval: predicted, and measured on training that gets killed.

Predicted from the simulated stall, interference and time to commit, with Young's, Daly's and
CheckFreq's interval and the tuner's marked. Measured on real runs of a small model under ebbtide's
runtime: SIGKILL at exponential moments, restart from the newest checkpoint, useful steps counted.

    python -m studies.checkpoint_interval --json studies/results/checkpoint/interval.json
"""

from __future__ import annotations

import argparse
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
from simulator.checkpoint_cost import CheckpointCost, CheckpointSimulation
from simulator.goodput import expected_goodput
from studies.interval_run import (
    Child,
    Training,
    profile,
    read_notes,
    read_profile,
    train,
    under,
    warm_up,
)
from studies.record import write_record
from tuner.checkpointing import Choice, Failures, best_checkpointing, rules_of_thumb

CYCLE = 8  # steps between the checkpoints whose cost is measured
FACTORS = (0.0, 0.25, 1.0, 4.0, 16.0)  # measured intervals over the tuner's; at least 1 step
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
        begin = time.monotonic()
        Child(lambda n=notes, s=last: train(training, saving, n, s), folder / "log").wait()  # type: ignore[misc]
        length_s = time.monotonic() - begin
    ((step, set_up_s),) = read_notes(notes, "start")
    steps = {int(n): s for n, s in read_notes(folder / "notes0", "step")}
    by_place = [
        median(steps[n] for n in steps if n % CYCLE == place and n > 2 * CYCLE - 1)
        for place in range(CYCLE)
    ]
    quiet = median(by_place[CYCLE // 2 :])
    stall, waited, persist, copied = read_notes(folder / "notes0", "report")[-1]
    assert step > 0, "the second run must resume"
    del length_s
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
    training: Training, plan: Plan, steps: int, gaps_s: Sequence[float], folder: Path
) -> dict[str, Any]:
    """Trains with a checkpoint every ``steps``, killed behind each gap; what was not lost."""
    from runtime.checkpoint.inspect import verify
    from runtime.checkpoint.restore import newest_valid

    folder.mkdir()
    saving, checkpoints = under(plan, steps, folder / "ck"), folder / "ck"
    rows, begin, useful = [], time.monotonic(), 0
    for number, gap_s in enumerate(gaps_s):
        start, notes = time.monotonic(), folder / f"notes{number}"
        child = Child(lambda n=notes: train(training, saving, n), folder / "log")  # type: ignore[misc]
        time.sleep(max(0.0, gap_s - (time.monotonic() - start)))
        child.kill()
        rows.append({"gap_s": time.monotonic() - start, **_progress(notes)})
    wall_s = time.monotonic() - begin
    if checkpoints.is_dir():
        found = newest_valid(checkpoints, lambda tag: verify(checkpoints, tag))
        useful = int((found.tag or "step0").removeprefix("global_step") or 0) if found.tag else 0
    shutil.rmtree(folder)
    return {
        "interval_steps": steps, "kills": len(rows), "useful_steps": useful, "wall_s": wall_s,
        "useful_steps_per_s": useful / wall_s, "failures": rows,
    }  # fmt: skip


def _progress(notes: Path) -> dict[str, Any]:
    started, steps = read_notes(notes, "start"), read_notes(notes, "step")
    return {
        "resumed_step": int(started[0][0]) if started else None,
        "restart_s": started[0][1] if started else None,
        "reached_step": int(steps[-1][0]) if steps else None,
    }


def compare(
    row: dict[str, Any], iteration_s: float, restart_s: float, cost: CheckpointCost
) -> dict[str, Any]:
    """Goodput as measured, and as predicted for just these failures."""
    steps = row["interval_steps"]
    expected = sum(
        useful_steps(f["gap_s"], steps, iteration_s, restart_s, cost) for f in row["failures"]
    )
    scale = iteration_s / row["wall_s"]
    return {
        **row, "goodput": row["useful_steps"] * scale,
        "predicted_goodput_same_failures": expected * scale,
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
    intervals = sorted({max(1, round(best * factor)) for factor in FACTORS})
    rows = []
    for steps in intervals[: 1 if args.quick else None]:
        gaps = failure_gaps(args.mtbf, args.failures, seed=1)
        rows.append(campaign(training, plan, steps, gaps, folder / f"every{steps}"))
        print(f"every {steps} steps: {rows[-1]['useful_steps']} useful", flush=True)
    restarts = [f["restart_s"] for row in rows for f in row["failures"] if f["restart_s"]]
    failures = Failures(args.mtbf, median(restarts) if restarts else seen.restart_s)
    rows = [compare(r, seen.iteration_s, failures.restart_s, choice.cost) for r in rows]
    return {
        "what": "a small model on this machine's cores, no GPU; ebbtide's runtime, real kills",
        "model": training.model, "checkpoint_bytes": work.checkpoint_bytes,
        "mtbf_s": args.mtbf, "restart_s": failures.restart_s,
        "measured_cost": vars(seen),
        "predicted": predict(simulation, choice, failures),
        "measured": rows, **distance(rows, simulation.iteration_s, choice.cost, failures),
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
