"""Distance of the tuner's plans from the best possible plans, on 200 random machines and workloads.

    python -m studies.optimality --json optimality.json
    python -m studies.optimality --json optimality.json --real-models   # and models people train

A plan's gap is the distance of its iteration time to a lower bound (`ebbtide.simulator.analysis.bounds`), which no plan
can beat. Even the best plan may be slower than the bound. So the plan is at most this gap away from the best plan. For
workloads with few subgroups, an exhaustive search finds the best plan (`studies.optimality.optimum`), so that the
distance to it is known. The bound holds for subgroups of any size. So the plans that are compared with it may choose
the size of their subgroups, and may use parameters in host memory and early updates. In the exhaustive search, the
sizes of the subgroups are fixed.
"""

import statistics
import time
from collections.abc import Iterable
from typing import Any

import numpy as np
from ebbtide.simulator import Machine, Placement, Workload
from ebbtide.simulator.analysis.bounds import lower_bound
from ebbtide.simulator.limits import Limits
from ebbtide.tuner.placements.candidate import Candidate
from ebbtide.tuner.placements.planning import plan
from ebbtide.tuner.placements.search import Search
from rich.progress import track

from studies.bench.console import publish, study_parser
from studies.bench.record import write_record
from studies.optimality.optimum import optimum
from studies.optimality.pairs import further_pairs, random_pair, real_pairs

FEW = (4, 8)
PROVEN_PCT = 0.01  # if a plan is closer to the bound than this, no better plan can be found


def main() -> None:
    parser = study_parser("optimality", __doc__)
    parser.add_argument(
        "--pairs",
        type=int,
        default=200,
        help="number of random pairs (a machine and a workload) for which a plan is compared with its lower bound",
    )
    parser.add_argument(
        "--few",
        type=int,
        default=20,
        help="number of random pairs (a machine and a workload with few subgroups), in addition to --pairs. For each "
        "such pair, the tuner's plan is compared with the best plan, which an exhaustive search finds",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--real-models",
        action="store_true",
        help="also plan for models that people train, such as Llama 8B and Qwen 3B, over links of 55, 20 and 10 GB/s",
    )
    parser.add_argument(
        "--machine",
        default="h100-node",
        help="machine preset for which --real-models makes plans over links of 55, 20 and 10 GB/s (default: h100-node)",
    )
    args = parser.parse_args()
    figures = measure(args.pairs, args.few, args.seed)
    if args.real_models:
        for name, pairs, machine in (
            ("real_models", real_pairs(args.machine), args.machine),
            ("further_models", further_pairs(), "several"),
        ):
            # Written after each row, so that an interrupted study keeps its rows.
            write_record(args.json, "optimality", figures)
            figures[name] = real_models(pairs, machine)
    publish("optimality", args.json, figures)


def measure(pairs: int, few: int, seed: int) -> dict[str, Any]:
    """Make plans for random pairs of a workload and a machine, and compare the iteration times with lower bounds.

    No plan can beat a lower bound. Some small pairs are also compared with the best possible plan.
    """
    rng = np.random.default_rng(seed)
    rows = [
        gap(*random_pair(rng), offload_parameters=True)
        for _ in track(range(pairs), description="comparing plans for random machines and workloads with lower bounds")
    ]
    gaps, seconds = ([row[key] for row in rows] for key in ("gap_pct", "planning_s"))
    return {
        "pairs": pairs,
        "seed": seed,
        **_spread(gaps),
        "gap_to": "the proven lower bound (ebbtide.simulator.analysis.bounds)",
        "pairs_within_2_pct": sum(g <= 2 for g in gaps),
        "pairs_proven_optimal": sum(g <= PROVEN_PCT for g in gaps),
        "seconds_per_plan_median": statistics.median(seconds),
        "seconds_per_plan_max": max(seconds),
        "few_subgroups": few_subgroups(few, seed),
        "rows": rows,
    }


def real_models(some: Iterable[tuple[dict[str, Any], Workload, Machine]], machine: str) -> dict[str, Any]:
    """Return how far the tuner's plans for real models are from the lower bound of an iteration, which no plan can
    beat.

    Args:
        some: For each case, a description, the workload and the `Machine`.
    """
    pairs = list(some)
    rows = [
        what | gap(workload, node, offload_parameters=True)
        for what, workload, node in track(pairs, description="Computing plans for Llama and Qwen models")
    ]
    gaps = [row["gap_pct"] for row in rows]
    return {
        "machine": machine,
        "pairs": len(rows),
        **_spread(gaps),
        "pairs_within_3_pct": sum(g <= 3 for g in gaps),
        "rows": rows,
    }


def _spread(gaps: list[float]) -> dict[str, float]:
    quantiles = {"median_gap_pct": statistics.median(gaps), "p90_gap_pct": float(np.quantile(gaps, 0.9))}
    return quantiles | {"max_gap_pct": max(gaps)}


def few_subgroups(pairs: int, seed: int) -> dict[str, Any]:
    """Compare the iteration times of the tuner's plans, and the lower bounds, with those of the best possible plans.

    The workloads are random, with few subgroups each, so that an exhaustive search finds the best plan.
    """
    rng = np.random.default_rng([seed, 1])
    rows = []
    for _ in track(range(pairs), description="exhaustive searches"):
        workload, machine = random_pair(rng, counts=FEW)
        workload = workload.model_copy(update={"clip_rate": 1.0})  # a clip rate of 1, so that no update is early
        best_s = exact_s(workload, machine)
        row = gap(workload, machine, subgroup_sizes=())
        rows.append(
            {
                "subgroups": row["subgroups"],
                "plan_above_optimum_pct": 100 * (row["iteration_s"] / best_s - 1),
                "bound_below_optimum_pct": 100 * (1 - row["bound_s"] / best_s),
            }
        )
    return {
        "pairs": pairs,
        "plan_above_optimum_max_pct": max(r["plan_above_optimum_pct"] for r in rows),
        "bound_below_optimum_median_pct": statistics.median(r["bound_below_optimum_pct"] for r in rows),
        "rows": rows,
    }


def exact_s(workload: Workload, machine: Machine) -> float:
    """Return the predicted seconds of an iteration under the best possible plan, found by an exhaustive search."""
    search = Search(workload, machine, Limits.of(workload, machine))
    placements: list[Placement] = ["host"] * len(workload.subgroups)
    search.score(Candidate.of(placements))
    return optimum(search).iteration_s


def gap(workload: Workload, machine: Machine, **freedom: Any) -> dict[str, float]:
    """Return a dict that tells how close the tuner's plan comes to the lower bound of the iteration time, which no plan
    can beat.

    ``gap_pct`` is the percentage by which an iteration under the plan is longer than the lower bound. The dict also has
    both times, the number of subgroups, and the seconds that it took to find the plan (``planning_s``) and to compute
    the lower bound (``proof_s``).

    Args:
        freedom: Further arguments of `plan`, such as ``offload_parameters``.
    """
    began_s = time.perf_counter()
    result = plan(workload, machine, **freedom)
    planning_s = time.perf_counter() - began_s
    assert result.prediction is not None
    began_s = time.perf_counter()
    floor_s = lower_bound(workload, machine, Limits.of(workload, machine)).iteration_s
    seconds = result.prediction.iteration_s
    return {
        "iteration_s": seconds,
        "bound_s": floor_s,
        "gap_pct": 100 * (seconds / floor_s - 1),
        "subgroups": result.subgroup_count,
        "planning_s": planning_s,
        "proof_s": time.perf_counter() - began_s,
    }


if __name__ == "__main__":
    main()
