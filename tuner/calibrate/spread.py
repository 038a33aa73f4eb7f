"""Machines as the spread of the measured rates allows them."""

import random

from simulator.machine import Machine
from simulator.quantity import Quantity

SAMPLES = 16
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
    # Four sigma or a quarter of the median: a rate is never negative.
    return max(quantity.median / 4, rng.gauss(quantity.median, quantity.sigma))
