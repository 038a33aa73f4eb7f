"""What the spread of the measured rates does to a prediction."""

from __future__ import annotations

import random

import numpy as np

from simulator.engines.compiled import compile_schedule, simulate_fast
from simulator.machine import Machine
from simulator.plan import Plan
from simulator.quantity import Quantity
from simulator.schedules.ebbtide import build_schedule
from simulator.workload import Workload

SAMPLES = 16
IQR_OVER_SIGMA = 1.349  # of a normal distribution
_SPREAD = (
    "h2d_bytes_per_s", "d2h_bytes_per_s", "dram_bytes_per_s",
    "host_adam_params_per_s", "device_adam_params_per_s",
)  # fmt: skip


def sampled_machines(machine: Machine, seed: int, samples: int = SAMPLES) -> list[Machine]:
    """The machine with each rate drawn from a normal distribution of its quartiles' width."""
    rng = random.Random(seed)
    return [
        machine.with_rates(**{name: _drawn(getattr(machine, name), rng) for name in _SPREAD})
        for _ in range(samples)
    ]


def _drawn(quantity: Quantity, rng: random.Random) -> float:
    sigma = (quantity.q3 - quantity.q1) / IQR_OVER_SIGMA
    # Four sigma or a quarter of the median: a rate is never negative.
    return max(quantity.median / 4, rng.gauss(quantity.median, sigma))


def prediction_interval(
    workload: Workload, machine: Machine, plan: Plan, seed: int = 0
) -> tuple[float, float]:
    """(10th, 90th percentile) of iteration_s over the rates' spread."""
    schedule = compile_schedule(build_schedule(workload, plan))
    seconds = [simulate_fast(schedule, m).iteration_s for m in sampled_machines(machine, seed)]
    low, high = np.quantile(seconds, [0.1, 0.9])
    return float(low), float(high)
