"""Fifty workloads and machines for the plan search, with the recorded plan, iteration time and memory of each.

    python -m tests.tuner.golden           # plans all of them again and prints differences
    python -m tests.tuner.golden --write   # records them again: say in CHANGELOG.md why

All numbers of the workloads and machines are drawn with a fixed random seed, and none comes from a machine preset.
So a change of a preset does not change the cases.
"""

import argparse
import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path

from ebbtide.simulator import Layer, Machine, Plan, Quantity, Workload, build_schedule
from ebbtide.simulator.analysis.many_plans import expected
from ebbtide.simulator.engines.compiled import simulate_fast
from ebbtide.tuner.placements.planning import plan as search

PATH = Path(__file__).with_name("golden.json")
CASES = 50
GIB = 2**30
FIELDS = {"subgroup_size", "ways", "order", "staging_slots", "prefetch", "host_slots", "threads", "overlap_forward"}


@dataclass(frozen=True)
class Row:
    """A row of golden.json: the plan that the search once found for a numbered case, and its simulated time and memory.

    The plan has only the fields `FIELDS`, which the simulation depends on.
    """

    plan: dict
    iteration_s: float
    device_bytes: int
    host_bytes: int


def case(number):
    """Return the workload and machine of a numbered test case. The number alone decides both."""
    rng = random.Random(f"golden {number}")
    workload = _workload(rng, number)
    return workload, _machine(rng, number, workload)


def _workload(rng, number):
    count = rng.randint(4, 40)
    size = rng.randint(10, 100) * 10**6
    sizes = [size if number % 3 else int(size * rng.uniform(0.4, 1)) for _ in range(count)]
    total = sum(sizes)
    layers = count if number % 2 else rng.randint(3, 50)
    micro_batches = (1, 1, 2, 4)[number % 4]
    forward_s = rng.uniform(0.2, 3.0) * total / 7e9 / micro_batches
    share, left, made = total // layers, total, []
    for position in range(layers):
        params = left if position == layers - 1 else share
        left -= params
        made.append(
            Layer(
                params=params,
                forward_s=forward_s / layers,
                backward_s=rng.uniform(1.8, 2.2) * forward_s / layers,
                activation_bytes=rng.randint(0, 200) * 2**20,
                network_gather_bytes=share if number % 11 == 5 else 0,
                network_reduce_bytes=share if number % 11 == 5 else 0,
            )
        )
    return Workload(
        name=f"golden {number}",
        layers=tuple(made),
        subgroups=tuple(sizes),
        wire_dtype="fp32" if number % 10 == 4 else "bf16",
        grad_bytes_per_param=4 if number % 5 == 4 else 2,
        clip=number % 4 != 1,
        gradient_accumulation_steps=micro_batches,
        ranks_per_node=(1, 1, 4, 1, 8)[number % 5],
        device_base_bytes=2 * total,
        pipeline_idle_s=0.2 * micro_batches * forward_s if number % 9 == 7 else 0.0,
    )


def _machine(rng, number, workload):
    def rate(low, high):
        median = rng.uniform(low, high)
        return Quantity(median=median, q1=0.97 * median, q3=1.03 * median, n=5)

    adam = rate(0.5e9, 8e9)
    threads = {n: Quantity.exact(adam.median * (n / 32) ** 0.6) for n in (4, 8, 16)}
    needed = workload.device_base_bytes + sum(w.activation_bytes for w in workload.layers)
    gradients = workload.device_base_bytes + workload.grad_bytes_per_param * workload.params
    loose = (1.02, 1.1, 1.4, 2.5, 6.0)[number % 5]
    state = 12 + workload.grad_bytes_per_param
    tight = number % 7 == 3
    return Machine(
        name=f"golden {number}",
        device_kind="cuda",
        cpu_cores=32,
        host_memory_bytes=int((1.2 if tight else 40) * state * workload.params) * workload.ranks_per_node + GIB,
        device_memory_bytes=int(max(needed, gradients / 2) * loose) + GIB,
        h2d_bytes_per_s=rate(8e9, 100e9),
        d2h_bytes_per_s=rate(8e9, 100e9),
        dram_bytes_per_s=rate(100e9, 500e9),
        host_adam_params_per_s=adam,
        stock_host_adam_params_per_s=rate(0.3e9, 0.5e9),
        device_adam_params_per_s=rate(20e9, 150e9),
        storage_write_bytes_per_s=rate(1e9, 5e9),
        network_bytes_per_s=rate(10e9, 50e9),
        host_adam_by_threads=threads if number % 6 == 2 else {},
        duplex_factor=Quantity.exact(rng.uniform(0.6, 1.0)),
        device_shares_host_cores=number % 13 == 8,
        unified_memory=number % 17 == 9,
    )


def planned(number):
    """Search a plan for the workload and machine of a numbered test case, and return it as a row of golden.json."""
    made = search(*case(number))
    return simulated(number, {k: v for k, v in made.model_dump(mode="json").items() if k in FIELDS})


def simulated(number, fields):
    """Simulate a plan, given by its fields, in a numbered test case. Return a row of golden.json.

    The iteration time is a mean over steps that clip and steps that do not.
    """
    workload, machine = case(number)

    def run(plan):
        return simulate_fast(build_schedule(workload, plan), machine)

    plan = Plan.from_fields(fields)
    found = run(plan)
    return Row(
        fields, expected(workload, machine, plan, run).iteration_s, found.device_peak_bytes, found.host_peak_bytes
    )


def recorded():
    """Return the rows of golden.json, one for each numbered test case."""
    return [Row(**fields) for fields in json.loads(PATH.read_text())["rows"]]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--cases", type=int, default=CASES)
    args = parser.parse_args()
    now = [planned(number) for number in range(args.cases)]
    if args.write:
        lines = ",\n".join(json.dumps(asdict(row)) for row in now)
        PATH.write_text(f'{{"rows": [\n{lines}\n]}}\n')
        return
    for number, (before, after) in enumerate(zip(recorded(), now, strict=False)):
        slower = after.iteration_s / before.iteration_s - 1
        host = after.host_bytes - before.host_bytes
        if before != after:
            print(f"{number}: time {slower:+.4%}, host {host:+d} bytes")


if __name__ == "__main__":
    main()
