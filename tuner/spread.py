"""What the spread of the measured rates does to a prediction."""

from __future__ import annotations

import math
import random

import numpy as np

from simulator.engines.compiled import compile_schedule, simulate_fast
from simulator.machine import Machine
from simulator.plan import Plan
from simulator.quantity import Quantity
from simulator.schedules.ebbtide import build_schedule
from simulator.workload import Workload
from tuner.interval import EIGHTY_PERCENT, MODEL_SPREAD

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
    """(low, high) of iteration_s that hold eight measurements in ten.

    The rates' spread, by sampling; that of forward and backward where they were estimated from a
    model; and what the simulator leaves out (`tuner.interval.MODEL_SPREAD`).
    """
    schedule = compile_schedule(build_schedule(workload, plan))
    centre = simulate_fast(schedule, machine).iteration_s
    seconds = [simulate_fast(schedule, m).iteration_s for m in sampled_machines(machine, seed)]
    low, high = np.quantile(seconds, [0.1, 0.9])
    rates = math.log(high / low) / (2 * EIGHTY_PERCENT)
    sigma = math.hypot(rates, _passes_sigma(workload, machine, centre), MODEL_SPREAD)
    factor = math.exp(EIGHTY_PERCENT * sigma)
    return centre / factor, centre * factor


def _passes_sigma(workload: Workload, machine: Machine, iteration_s: float) -> float:
    """What estimated forward and backward add: by their part of the iteration."""
    flops = machine.device_flops_per_s
    if flops is None or not workload.provenance.startswith("estimated"):
        return 0.0
    part = min(1.0, (workload.forward_s + workload.backward_s) / iteration_s)
    return part * math.log(flops.q3 / flops.q1) / IQR_OVER_SIGMA
