"""The data type `Quantity` for a measured or assumed number, and the list of a machine's speeds that are such numbers.

A `Quantity` also has the number's source and the spread of its measurements. An example of a speed is
``h2d_bytes_per_s``, the bytes per second of copies from host memory to the GPU.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

from ebbtide.simulator.rules import RuleError
from pydantic import BaseModel, ConfigDict, model_validator

QUARTILE = 0.6745  # distance of the quartiles from the median of a normal distribution, in standard deviations
EIGHTY_PERCENT = 1.2816  # half width of the interval that contains 80% of a normal distribution, in standard deviations
NINETY_PERCENT = 1.6449  # half width of the interval that contains 90% of it
UNSTABLE_IQR = 0.15  # a value with a larger interquartile range than this share of its median is called unstable

Source = Literal["measured", "emulated", "published", "datasheet", "assumed", "fitted"]


class Quantity(BaseModel):
    """A positive number, such as a measured rate, given by its median and quartiles, with the source of the value.

    Attributes:
        median: Value to compute with. Its unit is in the name of the field that holds the quantity.
        q1, q3: Quartiles of repeated measurements. Equal to ``median`` after a single measurement.
        n: Number of measurements.
        source: How the value was obtained. An ``emulated`` value is never shown as that of a GPU.
        detail: Command, data sheet or paper from which the value comes.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    median: float
    q1: float
    q3: float
    n: int = 1
    source: Source = "assumed"
    detail: str = ""

    @model_validator(mode="after")
    def _check(self) -> Self:
        values = (self.median, self.q1, self.q3)
        if not all(math.isfinite(v) and v > 0 for v in values):
            raise RuleError(
                "the median and the quartiles q1 and q3 of a measured value must be finite and greater than 0, but got "
                f"median={self.median}, q1={self.q1}, q3={self.q3}",
                key="median",
            )
        if not self.q1 <= self.median <= self.q3:
            raise RuleError(
                f"q1 <= median <= q3 must hold, but got q1={self.q1}, median={self.median}, q3={self.q3}", key="median"
            )
        if self.n < 1:
            raise RuleError(
                f"n, the number of measurements of a value, must be at least 1, but got n={self.n}", key="n"
            )
        return self

    @classmethod
    def exact(cls, value: float, source: Source = "assumed", detail: str = "") -> "Quantity":
        """Return a quantity (a number with its spread and source) with a single, exact value and no spread."""
        return cls(median=value, q1=value, q3=value, n=1, source=source, detail=detail)

    @classmethod
    def from_samples(cls, samples: Sequence[float], source: Source = "measured", detail: str = "") -> "Quantity":
        """Return a quantity (a number with its spread and source) with the median and the quartiles of repeated
        measurements.

        Raises:
            ValueError: there is no sample, or a sample is not finite and positive.
        """
        if not samples:
            raise ValueError("samples must have at least one measured value, but got none")
        if len(samples) == 1:
            return cls.exact(samples[0], source, detail)
        q1, median, q3 = statistics.quantiles(samples, n=4, method="inclusive")
        return cls(median=median, q1=q1, q3=q3, n=len(samples), source=source, detail=detail)

    def scaled(self, factor: float, detail: str = "") -> "Quantity":
        """Return a copy of a quantity (a measured or assumed number) with median and quartiles times ``factor``."""
        values = {name: getattr(self, name) * factor for name in ("median", "q1", "q3")}
        return self.model_copy(update={**values, "detail": detail or self.detail})

    @property
    def sigma(self) -> float:
        """Return a measured quantity's standard deviation from its quartiles, assuming a normal distribution."""
        return (self.q3 - self.q1) / (2 * QUARTILE)

    @property
    def log_sigma(self) -> float:
        """Return the standard deviation of the logarithm of a measured quantity."""
        return math.log(self.q3 / self.q1) / (2 * QUARTILE)

    @property
    def relative_iqr(self) -> float:
        """Return the interquartile range of a measured quantity divided by its median. 0 means perfectly stable."""
        return (self.q3 - self.q1) / self.median

    @property
    def stable(self) -> bool:
        """Return True if the repeated measurements of a quantity differ little. False after a single measurement."""
        return self.n > 1 and self.relative_iqr <= UNSTABLE_IQR


# The field of Machine that gives an op's full speed, or "wall_s" for work that is given in seconds.
RateName = Literal[
    "wall_s",
    "h2d_bytes_per_s",
    "d2h_bytes_per_s",
    "pageable_h2d_bytes_per_s",
    "pageable_d2h_bytes_per_s",
    "host_adam_params_per_s",
    "host_adam_out_of_place_params_per_s",
    "stock_host_adam_params_per_s",
    "device_adam_params_per_s",
    "device_flops_per_s",
    "attention_flops_per_s",
    "expert_flops_per_s",
    "storage_write_bytes_per_s",
    "storage_read_bytes_per_s",
    "host_copy_bytes_per_s",
    "network_bytes_per_s",
    "device_memory_bytes_per_s",
]
# Rates that depend on the number of an op's threads.
THREADED: tuple[RateName, ...] = (
    "host_adam_params_per_s",
    "host_adam_out_of_place_params_per_s",
    "stock_host_adam_params_per_s",
)


@dataclass(frozen=True, slots=True)
class Rate:
    """The properties of a field of `Machine` that holds a rate: limit, label and others, the same for all machines.

    Attributes:
        most: Limit far above the rate of any hardware. A higher value must have been given in a wrong unit.
        instead: Name of another rate, and a factor. If this rate was not measured, the other rate times the factor is
            used in its place.
        changeable: True if `Machine.with_rates` may change the rate.
        label: Name of the rate in tables for people. Empty: it is not shown.
    """

    most: float
    instead: tuple[str, float] | None = None
    changeable: bool = True
    label: str = ""
