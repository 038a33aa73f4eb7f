"""Predicted goodput (useful training per time) of jobs from one node to 100,000 GPUs, for several checkpoint intervals.

    python -m studies.goodput --json PATH

The study shows how the best checkpoint interval and the goodput change with the number of GPUs. All numbers are
computed, and none is measured. They are not compared with a published goodput: the prediction depends almost only on
the assumed time of a restart, so this time could be chosen to make both agree. The formula for goodput is compared
with a Monte Carlo simulation here, and with killed training in `studies.checkpoint_interval`.
"""

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from ebbtide.simulator.analysis.goodput import (
    CheckpointCost,
    Failures,
    best_interval_steps,
    check_commit,
    checkfreq_interval_steps,
    daly_interval,
    expected_goodput,
    young_interval,
)

from studies.bench.console import publish, study_parser

# Llama 3 405B (arXiv 2407.21783): 419 unexpected interruptions in 54 days on 16,384 GPUs.
GPUS, GPUS_PER_NODE, INTERRUPTIONS, DAYS = 16_384, 8, 419, 54
LLAMA_EFFECTIVE = 0.90
NODE_MTBF_S = DAYS * 86_400 / INTERRUPTIONS * GPUS / GPUS_PER_NODE
STORAGE_BYTES_PER_S = 2e12  # sustained rate, from the same paper
ASSUMED = {
    "restart_s": 600.0,
    "iteration_s": 20.0,
    "stall_s": 1.0,
    "interference_s": 0.5,
    "node_write_bytes_per_s": 2e9,
    "checkpoint_bytes": 405e9 * 14,
}
SCALES = (8, 64, 512, 4_096, 16_384, 32_768, 65_536, 100_000)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = study_parser("goodput", __doc__)
    parser.add_argument(
        "--quick", action="store_true", help="simulate fewer failures (a shorter Monte Carlo simulation), for tests"
    )
    args = parser.parse_args(arguments)
    figures = {
        "what": "computed from published failure rates and an assumed restart; nothing was measured or validated",
        "assumed": ASSUMED,
        "node_mtbf_s": NODE_MTBF_S,
        "llama3_405b": llama3(20_000 if args.quick else 200_000),
        "scales": [at_scale(gpus) for gpus in SCALES],
        "intervals": intervals(),
    }
    publish("goodput", args.json, figures)
    return 0


def failures_of(gpus: int) -> Failures:
    """Return the failure rate and the restart time of a job on ``gpus`` GPUs. Any failing node stops the job."""
    # Nodes fail at the rate that was published for Llama 3.
    return Failures(NODE_MTBF_S / math.ceil(gpus / GPUS_PER_NODE), ASSUMED["restart_s"])


def cost(gpus: int) -> CheckpointCost:
    """Return the cost of a checkpoint of a job on ``gpus`` GPUs. The job's model grows in proportion to the GPUs."""
    # All nodes write together, as fast as the nodes can write and the storage that was published for Llama 3 can take.
    nodes_bytes_per_s = math.ceil(gpus / GPUS_PER_NODE) * ASSUMED["node_write_bytes_per_s"]
    persist_s = ASSUMED["checkpoint_bytes"] * gpus / GPUS / min(nodes_bytes_per_s, STORAGE_BYTES_PER_S)
    return CheckpointCost(ASSUMED["stall_s"], ASSUMED["interference_s"], persist_s)


def at_scale(gpus: int) -> dict[str, Any]:
    """Return a row with the best checkpoint interval of a job on ``gpus`` GPUs, and the goodput with this interval.

    Goodput is useful training per time.
    """
    iteration_s, paid, failures = ASSUMED["iteration_s"], cost(gpus), failures_of(gpus)
    steps = best_interval_steps(iteration_s, paid, failures)
    return {
        "gpus": gpus,
        "iteration_s": iteration_s,
        "stall_s": paid.stall_s,
        "interference_s": paid.interference_s,
        "mtbf_s": failures.mtbf_s,
        "restart_s": failures.restart_s,
        "persist_s": paid.persist_s,
        "interval_steps": steps,
        "goodput": expected_goodput(iteration_s, paid, failures, steps),
    }


def llama3(samples: int) -> dict[str, Any]:
    """Return the predicted goodput (useful training per time) at the failure rate that was published for Llama 3.

    The restart time is assumed. The dict also has the longest restart time with which the published "over 90%
    effective" is still reached.
    """
    failures, best = failures_of(GPUS), at_scale(GPUS)
    asked = (ASSUMED["iteration_s"], cost(GPUS))
    steps, mtbf_s = best["interval_steps"], failures.mtbf_s
    simulated = simulated_goodput(*asked, failures, steps, intervals=samples, seed=1)
    without = expected_goodput(*asked, Failures(mtbf_s), steps)
    return {
        "published": f"over {LLAMA_EFFECTIVE:.0%} effective; {INTERRUPTIONS} interruptions, {DAYS} days, {GPUS} GPUs",
        "mtbf_s": mtbf_s,
        "goodput": best["goodput"],
        "monte_carlo": simulated,
        "over_90_pct": best["goodput"] > LLAMA_EFFECTIVE,
        "slowest_restart_for_90_pct_s": mtbf_s * math.log(without / LLAMA_EFFECTIVE),
    }


def intervals() -> dict[str, Any]:
    """Return the predicted goodput of a job on 16,384 GPUs over the checkpoint interval, as a dict.

    ``curve`` is a list of (steps, goodput) pairs. ``rules`` has the best interval, and the intervals by
    rules of thumb such as Young's, each with its goodput.
    """
    iteration_s, paid, failures = ASSUMED["iteration_s"], cost(GPUS), failures_of(GPUS)
    fewest, cost_s = paid.fewest_steps(iteration_s), paid.cost_s
    seconds = {
        "Young": young_interval(cost_s, failures.mtbf_s),
        "Daly": daly_interval(cost_s, failures.mtbf_s),
        "availability": availability_interval(cost_s, failures) - cost_s,
    }
    rules = {
        "best": best_interval_steps(iteration_s, paid, failures),
        **{name: max(fewest, round(s / iteration_s)) for name, s in seconds.items()},
        "CheckFreq": checkfreq_interval_steps(iteration_s, paid),
    }
    steps = sorted({int(k) for k in np.geomspace(fewest, 1_000, 60)} | set(rules.values()))
    curve = {k: expected_goodput(iteration_s, paid, failures, k) for k in steps}
    return {
        "iteration_s": iteration_s,
        "curve": [[k, goodput] for k, goodput in curve.items()],
        "rules": {name: {"interval_steps": k, "goodput": curve[k]} for name, k in rules.items()},
    }


def availability_interval(cost_s: float, failures: Failures) -> float:
    """Return the checkpoint interval in seconds with the best availability: ``d + sqrt(2 (M + R) d + d^2)``."""
    return cost_s + math.sqrt(2 * (failures.mtbf_s + failures.restart_s) * cost_s + cost_s**2)


def simulated_goodput(
    iteration_s: float,
    cost: CheckpointCost,
    failures: Failures,
    interval_steps: int,
    *,
    intervals: int = 100_000,
    seed: int = 0,
    gap_s: Callable[[], float] | None = None,
) -> float:
    """Return the goodput (useful training per time) of one long simulated job, to check `expected_goodput`.

    The simulation draws random failures and follows the job from one to the next.

    Args:
        intervals: Number of checkpoints that the job commits before its end.
        gap_s: Function that draws the seconds until the next failure. By default they are exponentially
            distributed with mean ``mtbf_s``.

    Raises:
        ValueError: If `expected_goodput` refuses the values, or if there is no interval to simulate.
    """
    if intervals < 1 or interval_steps < 1:
        raise ValueError(f"intervals and interval_steps must be >= 1, but got {intervals} and {interval_steps}")
    work_s = interval_steps * iteration_s
    interval_s = work_s + cost.cost_s
    persist_s, restart_s = cost.persist_s, failures.restart_s
    check_commit(persist_s, interval_s)
    if gap_s is None:
        random = np.random.default_rng(seed)
        gap_s = lambda: float(random.exponential(failures.mtbf_s))
    now_s, committed, failure_s = 0.0, 0, gap_s()
    while True:
        finished_s = now_s + (intervals - committed) * interval_s + persist_s
        if failure_s >= finished_s:
            return intervals * work_s / finished_s
        survived = math.floor((failure_s - now_s - persist_s) / interval_s)
        committed += max(0, survived)
        now_s, failure_s = failure_s, failure_s + gap_s()
        while failure_s - now_s < restart_s:  # the restart fails too, and starts again
            now_s, failure_s = failure_s, failure_s + gap_s()
        now_s += restart_s


if __name__ == "__main__":
    sys.exit(main())
