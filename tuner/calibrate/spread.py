"""Random variants of a machine, with each rate drawn from the spread of its measurements."""

import random

from ebbtide.simulator.machine import RATES, Machine
from ebbtide.simulator.quantity import Quantity

SAMPLES = 16
_SPREAD = tuple(name for name, known in RATES.items() if known.scatters)


def sampled_machines(machine: Machine, seed: int) -> list[Machine]:
    """Return a list of copies of a machine with random speeds.

    Each speed is drawn from a normal distribution with the median and the interquartile range that the machine has for
    this speed.
    """
    rng = random.Random(seed)
    return [
        machine.with_rates(**{name: _drawn(getattr(machine, name), rng) for name in _SPREAD}) for _ in range(SAMPLES)
    ]


def _drawn(quantity: Quantity, rng: random.Random) -> float:
    # A rate is at least a quarter of its median, so it is never negative.
    return max(quantity.median / 4, rng.gauss(quantity.median, quantity.sigma))
