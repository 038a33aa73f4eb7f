"""The intervals of predicted times, and of the ratio of two of them.

The times of two ways to train depend on the same rates, such as the speed of the CPU's updates. So the interval of
their ratio is drawn from the same causes (`ebbtide.tuner.calibrate.causes`), and what both ways share cancels.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from ebbtide.simulator.machine import Machine
from ebbtide.simulator.quantity import NINETY_PERCENT
from ebbtide.simulator.workload import Workload
from ebbtide.tuner.calibrate.causes import causes, own_spread, shared_spread

STEP = 0.5  # step of the numerical derivatives, in standard deviations of a cause


@dataclass(frozen=True)
class Spread:
    """The uncertainty of a predicted time, by cause.

    Attributes:
        parts: For each cause by name, the change of the time's logarithm if the cause moves by one standard deviation.
        own: Standard deviation of the logarithm that no cause explains and no other way to train shares.
        shared: Standard deviation of the logarithm that all ways to train on the machine share.
    """

    parts: dict[str, float]
    own: float
    shared: float

    @classmethod
    def of(
        cls, seconds: Callable[[Machine, Workload], float], workload: Workload, machine: Machine, strategy: str
    ) -> "Spread":
        """Simulate the effect of each cause.

        Args:
            seconds: Function that predicts the time for a machine and a workload.
        """
        parts = {}
        for cause in causes(machine, workload):
            high, low = (seconds(*cause.moved(machine, workload, turn)) for turn in (STEP, -STEP))
            parts[cause.name] = math.log(high / low) / (2 * STEP)
        return cls(parts, own_spread(machine, strategy), shared_spread(machine))

    @property
    def factor(self) -> float:
        """Return the largest factor between the predicted time and nine times in ten."""
        return math.exp(NINETY_PERCENT * math.hypot(*self.parts.values(), self.own, self.shared))

    def factor_over(self, other: "Spread") -> float:
        """Return the same factor for the ratio of this time to another one on the same machine."""
        names = self.parts.keys() | other.parts.keys()
        apart = (self.parts.get(name, 0.0) - other.parts.get(name, 0.0) for name in names)
        return math.exp(NINETY_PERCENT * math.hypot(*apart, self.own, other.own))
