"""Goodput from one node to 100,000 GPUs, and over the checkpoint interval.

``python -m studies.goodput --json PATH``. Computed, not measured, and not validated: goodput at a
published failure rate is little else than the restart time that is assumed, so that its agreement
with the published share of effective time shows nothing. What the study shows is how the best
interval and goodput move with the number of GPUs; the formula itself is tried against a Monte Carlo
here, and against training that gets killed in `studies.checkpoint_interval`.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from simulator.analysis.goodput import (
    Cluster,
    availability_interval,
    best_interval_steps,
    checkfreq_interval_steps,
    daly_interval,
    expected_goodput,
    simulated_goodput,
    young_interval,
)
from studies.bench.record import write_record

# Llama 3 405B (arXiv 2407.21783): 419 unexpected interruptions in 54 days on 16,384 GPUs.
GPUS, GPUS_PER_NODE, INTERRUPTIONS, DAYS = 16_384, 8, 419, 54
LLAMA_EFFECTIVE = 0.90
NODE_MTBF_S = DAYS * 86_400 / INTERRUPTIONS * GPUS / GPUS_PER_NODE
STORAGE_BYTES_PER_S = 2e12  # sustained, published there
ASSUMED = {
    "restart_s": 600.0, "iteration_s": 20.0, "stall_s": 1.0, "interference_s": 0.5,
    "node_write_bytes_per_s": 2e9, "checkpoint_bytes": 405e9 * 14,
}  # fmt: skip
SCALES = (8, 64, 512, 4_096, 16_384, 32_768, 65_536, 100_000)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m studies.goodput", description=__doc__)
    parser.add_argument("--json", required=True, metavar="PATH")
    parser.add_argument("--quick", action="store_true", help="a shorter Monte Carlo")
    args = parser.parse_args(arguments)
    figures = {
        "what": "computed from published failure rates and an assumed restart; nothing was "
        "measured or validated",
        "assumed": ASSUMED,
        "node_mtbf_s": NODE_MTBF_S,
        "llama3_405b": llama3(20_000 if args.quick else 200_000),
        "scales": [at_scale(gpus) for gpus in SCALES],
        "intervals": intervals(cluster(GPUS)),
    }
    print_table(figures)
    write_record(args.json, "goodput", figures)
    draw(figures, Path(args.json).with_suffix(".png"))
    return 0


def cluster(gpus: int) -> Cluster:
    """So many GPUs in Llama 3's nodes, on its storage."""
    return Cluster(
        math.ceil(gpus / GPUS_PER_NODE), NODE_MTBF_S, ASSUMED["restart_s"],
        ASSUMED["node_write_bytes_per_s"], STORAGE_BYTES_PER_S,
    )  # fmt: skip


def costs(of: Cluster, gpus: int) -> dict[str, float]:
    """What a checkpoint of a model that grows with the cluster costs."""
    checkpoint_bytes = ASSUMED["checkpoint_bytes"] * gpus / GPUS
    return {
        "iteration_s": ASSUMED["iteration_s"], "stall_s": ASSUMED["stall_s"],
        "interference_s": ASSUMED["interference_s"], "mtbf_s": of.mtbf_s,
        "restart_s": of.restart_s, "persist_s": of.persist_s(checkpoint_bytes),
    }  # fmt: skip


def at_scale(gpus: int) -> dict[str, Any]:
    """The best interval of a job of this size, and what it brings."""
    asked = costs(cluster(gpus), gpus)
    steps = best_interval_steps(**asked)
    goodput = expected_goodput(interval_steps=steps, **asked)
    return {"gpus": gpus, **asked, "interval_steps": steps, "goodput": goodput}


def llama3(samples: int) -> dict[str, Any]:
    """The published failure rate: goodput with the assumed restart, and what "over 90% effective"
    tells: the slowest restart that it allows.
    """
    asked: dict[str, Any] = costs(cluster(GPUS), GPUS)
    best = at_scale(GPUS)
    simulated = simulated_goodput(
        interval_steps=best["interval_steps"], intervals=samples, seed=1, **asked
    )
    without = expected_goodput(interval_steps=best["interval_steps"], **{**asked, "restart_s": 0.0})
    return {
        "published": f"over {LLAMA_EFFECTIVE:.0%} effective; {INTERRUPTIONS} interruptions, "
        f"{DAYS} days, {GPUS} GPUs",
        "mtbf_s": asked["mtbf_s"],
        "goodput": best["goodput"],
        "monte_carlo": simulated,
        "over_90_pct": best["goodput"] > LLAMA_EFFECTIVE,
        "slowest_restart_for_90_pct_s": asked["mtbf_s"] * math.log(without / LLAMA_EFFECTIVE),
    }


def intervals(of: Cluster) -> dict[str, Any]:
    """Goodput over the interval, with the rules of thumb beside the optimum."""
    asked = costs(of, GPUS)
    cost_s, iteration_s = asked["stall_s"] + asked["interference_s"], asked["iteration_s"]
    fewest = max(1, math.ceil((asked["persist_s"] - cost_s) / iteration_s))
    rules = {
        "best": best_interval_steps(**asked),
        "Young": max(fewest, round(young_interval(cost_s, of.mtbf_s) / iteration_s)),
        "Daly": max(fewest, round(daly_interval(cost_s, of.mtbf_s) / iteration_s)),
        "availability": max(
            fewest,
            round((availability_interval(cost_s, of.mtbf_s, of.restart_s) - cost_s) / iteration_s),
        ),
        "CheckFreq": checkfreq_interval_steps(
            iteration_s, asked["stall_s"], asked["interference_s"], asked["persist_s"]
        ),
    }
    steps = sorted({int(k) for k in np.geomspace(fewest, 1_000, 60)} | set(rules.values()))
    return {
        "iteration_s": iteration_s,
        "curve": [[k, expected_goodput(interval_steps=k, **asked)] for k in steps],
        "rules": {
            name: {"interval_steps": k, "goodput": expected_goodput(interval_steps=k, **asked)}
            for name, k in rules.items()
        },
    }


def print_table(figures: dict[str, Any]) -> None:
    """Sizes, then the rules, then the published case."""
    from rich.console import Console
    from rich.table import Table

    table = Table("GPUs", "MTBF, h", "interval, steps", "goodput", box=None)
    for row in figures["scales"]:
        hours = f"{row['mtbf_s'] / 3600:.2f}"
        table.add_row(str(row["gpus"]), hours, str(row["interval_steps"]), f"{row['goodput']:.2%}")
    console = Console(width=120)
    console.print(table)
    for name, rule in figures["intervals"]["rules"].items():
        print(f"{name}: every {rule['interval_steps']} steps, goodput {rule['goodput']:.2%}")
    case = figures["llama3_405b"]
    print(
        f"Llama 3 405B with an assumed restart of {ASSUMED['restart_s']:.0f} s: "
        f"{case['goodput']:.2%} (Monte Carlo {case['monte_carlo']:.2%}); the published over 90% "
        f"says that restarts took at most {case['slowest_restart_for_90_pct_s']:.0f} s"
    )


def draw(figures: dict[str, Any], path: Path) -> None:
    """Goodput over the number of GPUs, and over the interval at 16,384."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    scales = figures["scales"]
    left.semilogx([r["gpus"] for r in scales], [r["goodput"] for r in scales], "o-", ms=4)
    left.set(xlabel="GPUs", ylabel="goodput", title="Best interval at each size (computed)")
    curve = figures["intervals"]["curve"]
    right.semilogx(*np.array(curve).T, color="#777777")
    marks = zip(figures["intervals"]["rules"].items(), "*osD^", strict=True)
    for (name, rule), marker in marks:
        right.plot(rule["interval_steps"], rule["goodput"], marker, label=name, alpha=0.8)
    right.set(xlabel="interval (steps)", title=f"Goodput over the interval, {GPUS:,} GPUs")
    right.legend(frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
