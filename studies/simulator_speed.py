"""Simulated plans per second on one core, and how the time grows with the number of subgroups.

    python -m studies.simulator_speed --json simulator_speed.json

Each evaluation builds and simulates another plan on one of several random machines, without any cache. Placements,
order, staging buffers, prefetch, threads and overlap of a plan are drawn at random. One thread computes. The time is
CPU time of the process, so that other load does not count. The wall time is printed beside it. Some plans of each size
are also simulated by the reference engine, and the largest difference is reported.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from ebbtide.simulator import Layer, Machine, Plan, Way, Workload, build_schedule, simulate
from ebbtide.simulator.analysis.many_plans import PlanSweep
from ebbtide.simulator.engines.summary import ITERATION_S
from ebbtide.simulator.plan import Placement
from ebbtide.simulator.update.order import order_of
from ebbtide.simulator.update.way import PLACEMENT_CODES

from studies.bench.console import publish, study_parser
from studies.optimality.pairs import random_pair

SIZES = (10, 30, 100, 300, 1000, 3000, 10_000)
ITERATIONS = 3  # iterations of one simulation: the fewest that show the steady state
PASSES = 15  # passes over all plans of a size, of which the median counts
MACHINES, PLANS_PER_MACHINE = 4, 8
COMPARED_UP_TO = 300  # subgroups. With more, the reference engine takes seconds
PLACEMENTS: tuple[Placement, ...] = ("host", "device", "resident")


def main() -> None:
    parser = study_parser("simulator_speed", __doc__)
    parser.add_argument("--quick", action="store_true", help="measure only small models, for tests")
    args = parser.parse_args()
    publish("simulator_speed", args.json, measure(SIZES[:3] if args.quick else SIZES))


def measure(sizes: Sequence[int]) -> dict[str, Any]:
    """Measure the seconds that the simulator takes per iteration of training, for each number of subgroups.

    One thread computes. The dict also has the exponent with which the time grows with the number of subgroups.
    """
    cpu_s, wall_s, differences = {}, {}, []
    for size in sizes:
        pairs = varied_plans(size, np.random.default_rng(size))
        cpu_s[size], wall_s[size] = _iteration_s(pairs)
        if size <= COMPARED_UP_TO:
            differences.append(difference(pairs[::PLANS_PER_MACHINE]))
    large = [size for size in sizes if size >= 30]
    exponent = np.polyfit(np.log(large), np.log([cpu_s[s] for s in large]), 1)[0]
    return {
        "iterations_per_s": 1 / cpu_s[100],
        "iterations_per_wall_s": 1 / wall_s[100],
        "scaling_exponent": float(exponent),
        "max_relative_difference": max(differences),
        "what": f"iterations_per_s: of 100 subgroups, per second of CPU time of one thread; median "
        f"of {PASSES} passes over {MACHINES * PLANS_PER_MACHINE} plans, all different, on "
        f"{MACHINES} machines; building each schedule is counted",
        "seconds_per_iteration": {str(size): s for size, s in cpu_s.items()},
        "wall_seconds_per_iteration": {str(size): s for size, s in wall_s.items()},
    }


def varied_plans(subgroups: int, rng: np.random.Generator) -> list[tuple[PlanSweep, Plan]]:
    """Return random plans, each paired with the simulator of a random machine. Each subgroup has one layer.

    The plans of one machine come one after the other.
    """
    layers = tuple(
        Layer(params=10**6, forward_s=forward_s, backward_s=2 * forward_s, activation_bytes=10**6)
        for forward_s in rng.uniform(0.5e-3, 2e-3, subgroups).tolist()
    )
    workload = Workload(name="w", layers=layers, subgroups=(10**6,) * subgroups)
    machines = [random_pair(rng)[1] for _ in range(MACHINES)]
    return [
        (sweep, random_plan(subgroups, machine, rng))
        for machine in machines
        for sweep in [PlanSweep(workload, machine, ITERATIONS)]
        for _ in range(PLANS_PER_MACHINE)
    ]


def random_plan(subgroups: int, machine: Machine, rng: np.random.Generator) -> Plan:
    """Return a random plan, to measure how long the simulation of a plan takes.

    All features of the plan that may affect the duration of the simulation are random.
    """
    shares = rng.dirichlet((4, 3, 1))  # shares of host, device and resident
    slots = int(rng.integers(1, 6))
    placements = [PLACEMENTS[i] for i in rng.choice(3, subgroups, p=shares)]
    issue = rng.permutation(subgroups).tolist() if rng.random() < 0.5 else range(subgroups)
    return Plan(
        subgroup_size=10**6,
        ways=Way.each(placements),
        order=order_of(issue, placements),
        staging_slots=slots,
        prefetch=int(rng.integers(0, slots + 1)),
        threads=int(rng.integers(0, machine.cpu_cores + 1)),
        overlap_forward=bool(rng.random() < 0.8),
    )


def difference(pairs: Sequence[tuple[PlanSweep, Plan]]) -> float:
    """Return the largest relative difference between iteration times by the fast simulator and the reference engine.

    The times of the given plans are compared.
    """
    result = []
    for sweep, plan in pairs:
        schedule = build_schedule(sweep.workload, plan, ITERATIONS)
        expected_s = simulate(schedule, sweep.machine).iteration_s
        result.append(abs(float(sweep.evaluate_plan(plan)[ITERATION_S]) / expected_s - 1))
    return max(result)


def _iteration_s(pairs: Sequence[tuple[PlanSweep, Plan]]) -> tuple[float, float]:
    calls = [_call(sweep, plan) for sweep, plan in pairs]
    calls[0]()  # the first call compiles
    samples = []
    for _ in range(PASSES):
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        for call in calls:
            call()
        samples.append((time.process_time() - cpu_s, time.perf_counter() - wall_s))
    iterations = len(calls) * ITERATIONS
    cpu, wall = zip(*samples, strict=True)
    return statistics.median(cpu) / iterations, statistics.median(wall) / iterations


def _call(sweep: PlanSweep, plan: Plan) -> Callable[[], object]:
    codes = np.array([PLACEMENT_CODES[p] for p in plan.placements], dtype=np.int8)
    issue = np.array(plan.issue_order, dtype=np.int64)
    return lambda: sweep.evaluate(codes, plan.staging_slots, plan.prefetch, plan.threads, plan.overlap_forward, issue)


if __name__ == "__main__":
    main()
