"""How fast plans can be simulated, and how the cost grows with the subgroups.

python -m studies.simulator_speed --json simulator_speed.json
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from simulator import Layer, Plan, Workload
from simulator.strategies import spread
from simulator.sweep import PLACEMENT_CODES, PlanSweep
from studies.optimality import random_pair
from studies.record import write_record

SIZES = (10, 30, 100, 300, 1000, 3000, 10_000)
ITERATIONS = 3  # that one evaluation simulates


def main() -> None:
    """Entry point of ``python -m studies.simulator_speed``."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True, help="where the figures go")
    parser.add_argument("--quick", action="store_true", help="small sizes only")
    args = parser.parse_args()
    figures = measure(SIZES[:3] if args.quick else SIZES)
    write_record(args.json, "simulator_speed", figures)
    Console().print(
        f"{figures['iterations_per_s']:,.0f} iterations of 100 subgroups per second on one core; "
        f"cost grows with exponent {figures['scaling_exponent']:.2f}"
    )


def measure(sizes: tuple[int, ...]) -> dict[str, Any]:
    """Seconds per simulated iteration for each number of subgroups; one thread."""
    seconds = {size: _iteration_s(size) for size in sizes}
    large = [size for size in sizes if size >= 30]
    exponent = np.polyfit(np.log(large), np.log([seconds[s] for s in large]), 1)[0]
    return {
        "iterations_per_s": 1 / seconds[100],
        "scaling_exponent": float(exponent),
        "seconds_per_iteration": {str(size): s for size, s in seconds.items()},
    }


def _iteration_s(subgroups: int) -> float:
    _, machine = random_pair(np.random.default_rng(1))
    layer = Layer(params=10**6, forward_s=1e-3, backward_s=2e-3)
    workload = Workload(name="w", layers=(layer,) * subgroups, subgroups=(10**6,) * subgroups)
    sweep = PlanSweep(workload, machine, ITERATIONS)
    placements = spread(subgroups // 2, subgroups)
    assert Plan.runs(placements)
    codes = np.array([PLACEMENT_CODES[p] for p in placements], dtype=np.int8)
    sweep.evaluate(codes, 3, 2)  # compiles
    repeats = max(3, 3000 // subgroups)
    samples = []
    for _ in range(5):
        begun = time.perf_counter()
        for _ in range(repeats):
            sweep.evaluate(codes, 3, 2)
        samples.append((time.perf_counter() - begun) / repeats / ITERATIONS)
    return statistics.median(samples)


if __name__ == "__main__":
    main()
