"""Comparison of the measured and the predicted number of useful steps of training that is killed at random times.

The times between kills are exponentially distributed. A step is useful if no kill undoes it, because a checkpoint
contains it.
"""

import math
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from ebbtide.simulator import Plan
from ebbtide.simulator.analysis.goodput import CheckpointCost, Failures, expected_goodput

from studies.bench.forked import Child
from studies.checkpoints.interval_run import IntervalTraining, read_notes, train, under

QUIET_STEPS = 8  # number of steps needed to know the time of an iteration around a failure


def paid_at(steps: int, iteration_s: float, cost: CheckpointCost) -> CheckpointCost:
    """Return the cost of each checkpoint if one is due every ``steps`` steps and a save waits for the previous one."""
    wait_s = cost.persist_s - steps * iteration_s - cost.cost_s
    return replace(cost, stall_s=cost.stall_s + wait_s) if wait_s > 1e-9 * cost.persist_s else cost


def goodput_at(steps: int, iteration_s: float, cost: CheckpointCost, failures: Failures) -> float:
    """Return the expected goodput (useful training per time) of training with a checkpoint every ``steps`` steps."""
    # The time for which a checkpoint waits for the previous one to be written is included.
    return expected_goodput(iteration_s, paid_at(steps, iteration_s, cost), failures, steps)


def useful_steps(gap_s: float, steps: int, iteration_s: float, restart_s: float, cost: CheckpointCost) -> int:
    """Return the predicted number of training steps between two failures that are not lost, because a checkpoint
    contains them when the second failure comes.
    """
    paid = paid_at(steps, iteration_s, cost)
    interval_s = steps * iteration_s + paid.cost_s
    return steps * max(0, math.floor((gap_s - restart_s - paid.persist_s) / interval_s))


def failure_gaps(mtbf_s: float, count: int, seed: int) -> list[float]:
    """Return a list of ``count`` times in seconds between failures, exponentially distributed and in random order."""
    gaps = [-mtbf_s * math.log(1 - (i + 0.5) / count) for i in range(count)]
    random.Random(seed).shuffle(gaps)
    return gaps


def campaign(
    training: IntervalTraining, plan: Plan, intervals: Sequence[int], gaps_s: Sequence[float], folder: Path
) -> list[dict[str, Any]]:
    """Train with each checkpoint interval, kill the training again and again, and return a list with the results of
    each interval.

    Kill number ``n``, counted from 0, comes ``gaps_s[n]`` seconds after the start of the training process. The
    intervals alternate: training with every interval is killed for the first time before any is killed for the second
    time, and so on. So a disturbance of the machine affects all intervals.
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
        {
            "interval_steps": steps,
            "kills": len(rows),
            "failures": rows,
            "useful_steps": _committed(folder / f"every{steps}" / "ck"),
        }
        for steps, rows in failures.items()
    ]


def _committed(folder: Path) -> int:
    # Training would resume from this step.
    from ebbtide.runtime.checkpoint.deepspeed.loading import newest_whole

    if not folder.is_dir():
        return 0
    newest = newest_whole([folder])
    return 0 if newest is None else newest.manifest.step


def _progress(notes: Path, interval_steps: int) -> dict[str, Any]:
    started, steps = read_notes(notes, "start"), read_notes(notes, "step")
    # No checkpoint is written in the second half of an interval. The first steps warm up.
    quiet = [s for n, s in steps[2:] if 2 * (n % interval_steps) > interval_steps]
    return {
        "resumed_step": int(started[0][0]) if started else None,
        "restart_s": started[0][1] if started else None,
        "reached_step": int(steps[-1][0]) if steps else None,
        "quiet_s": quiet,
    }


def with_speed(rows: list[dict[str, Any]], usual_s: float) -> list[dict[str, Any]]:
    """Add to each failure in the results the usual time of an iteration around this failure, from which goodput is
    computed.

    The study trains once with each checkpoint interval, and kills all these trainings after the same times. So the n-th
    failures of all trainings get the same iteration time: the median over the iterations of all trainings between
    failures n - 1 and n during which no checkpoint was in progress. If fewer than `QUIET_STEPS` such iterations were
    measured, the iteration time is ``usual_s``.

    Args:
        rows: Results, one dict for each checkpoint interval, with a list of its failures. The failures are changed in
            place.
        usual_s: Iteration time if too few iterations were measured, in seconds.
    """
    for turn in zip(*(row["failures"] for row in rows), strict=True):
        quiet = [s for failure in turn for s in failure["quiet_s"]]
        for failure in turn:
            del failure["quiet_s"]
            failure["iteration_s"] = median(quiet) if len(quiet) >= QUIET_STEPS else usual_s
    return rows


def compare(row: dict[str, Any], restart_s: float, cost: CheckpointCost) -> dict[str, Any]:
    """Return the results with one checkpoint interval, with the measured and the predicted goodput added.

    Goodput is the number of useful steps, divided by the number of steps that training without failures and checkpoints
    would make in the same time. The divisor is added up over the periods before the failures. Each period has its own
    measured iteration time, because other load changes the machine's speed. The prediction assumes failures at the same
    times as in the measurement.

    Args:
        row: Results with this interval: the useful steps, and for each failure the length of the period before it and
            the iteration time in this period.
    """
    steps, failures = row["interval_steps"], row["failures"]
    expected = sum(useful_steps(f["gap_s"], steps, f["iteration_s"], restart_s, cost) for f in failures)
    iterations = sum(f["gap_s"] / f["iteration_s"] for f in failures)
    wall_s = sum(f["gap_s"] for f in failures)
    return {
        **row,
        "wall_s": wall_s,
        "useful_steps_per_s": row["useful_steps"] / wall_s,
        "goodput": row["useful_steps"] / iterations,
        "predicted_goodput_same_failures": expected / iterations,
    }
