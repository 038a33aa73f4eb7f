"""How far the tuner's plans can be from the best: 200 random machines and workloads.

    python -m studies.optimality --json optimality.json

The gap is to the linear program's bound (`simulator.bounds`), which no plan can beat and which even
the best plan need not reach; so it is an upper limit of the distance to the optimum.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track

from simulator import Layer, Machine, Quantity, Workload
from simulator.bounds import bound
from studies.record import write_record
from tuner.memory import Limits
from tuner.search import plan

GIB = 2**30


def main() -> None:
    """Entry point of ``python -m studies.optimality``."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True, help="where the figures go")
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    figures = measure(args.pairs, args.seed)
    write_record(args.json, "optimality", figures)
    Console().print(
        f"{args.pairs} pairs, gap to the bound: {figures['median_gap_pct']:.2f}% median, "
        f"{figures['p90_gap_pct']:.2f}% at 90%, {figures['max_gap_pct']:.2f}% at most"
    )


def measure(pairs: int, seed: int) -> dict[str, Any]:
    """Plans each pair and compares with its bound."""
    rng = np.random.default_rng(seed)
    rows = [gap(*random_pair(rng)) for _ in track(range(pairs), description="planning")]
    gaps = sorted(row["gap_pct"] for row in rows)
    return {
        "pairs": pairs,
        "seed": seed,
        "median_gap_pct": statistics.median(gaps),
        "p90_gap_pct": float(np.quantile(gaps, 0.9)),
        "max_gap_pct": gaps[-1],
        "gap_to": "the linear program's lower bound",
        "rows": rows,
    }


def gap(workload: Workload, machine: Machine) -> dict[str, float]:
    """The chosen plan against the bound with all the device memory that is allowed."""
    found = plan(workload, machine)
    assert found.prediction is not None
    floor_s = bound(workload, machine, Limits.of(workload, machine).device_bytes).iteration_s
    seconds = found.prediction.iteration_s
    return {
        "iteration_s": seconds,
        "bound_s": floor_s,
        "gap_pct": 100 * (seconds / floor_s - 1),
        "subgroups": len(workload.subgroups),
    }


def random_pair(rng: np.random.Generator) -> tuple[Workload, Machine]:
    """Rates over an order of magnitude around published machines; 10 to 100 subgroups."""
    count = int(rng.integers(10, 101))
    size = int(rng.integers(10, 101)) * 10**6
    forward_s = float(rng.uniform(0.2, 3.0)) * count * size / 7e9
    layer = Layer(
        params=size, forward_s=forward_s / count, backward_s=2 * forward_s / count,
        activation_bytes=int(rng.integers(0, 200)) * 2**20,
    )  # fmt: skip
    workload = Workload(
        name="random", layers=(layer,) * count, subgroups=(size,) * count,
        device_base_bytes=2 * count * size,
    )  # fmt: skip
    rates = {
        "h2d_bytes_per_s": rng.uniform(10e9, 100e9), "d2h_bytes_per_s": rng.uniform(10e9, 100e9),
        "dram_bytes_per_s": rng.uniform(100e9, 500e9),
        "host_adam_params_per_s": rng.uniform(0.5e9, 8e9),
        "stock_host_adam_params_per_s": 0.5e9, "storage_write_bytes_per_s": 2e9,
        "device_adam_params_per_s": rng.uniform(20e9, 150e9),
    }  # fmt: skip
    needed = workload.device_base_bytes + sum(w.activation_bytes for w in workload.layers)
    machine = Machine(
        name="random", device_kind="cuda", cpu_cores=32, host_memory_bytes=2**41,
        device_memory_bytes=int(needed * rng.uniform(1.3, 2.5)) + 4 * GIB,
        duplex_factor=Quantity.exact(float(rng.uniform(0.6, 1.0))),
        **{name: Quantity.exact(float(value)) for name, value in rates.items()},
    )  # fmt: skip
    return workload, machine


if __name__ == "__main__":
    main()
