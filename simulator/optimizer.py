"""The table of optimizers: the fp32 state of each, per parameter, and the bytes that an update reads and writes.

All such numbers of bytes come from this module. A new optimizer needs only a new row in `OPTIMIZERS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

FP32_BYTES = 4


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """A description of an optimizer's state: the fp32 tensors that an update reads and writes for each parameter.

    Attributes:
        tensors: State tensors except the master, named as in DeepSpeed's ``optimizer.state``.
        master: True if an fp32 master parameter is part of the state.
    """

    name: str
    tensors: tuple[str, ...]
    master: bool = True

    @property
    def tensor_count(self) -> int:
        """Return the number of fp32 tensors in an optimizer's state: the moments and the master parameter, if any."""
        return len(self.tensors) + self.master

    @property
    def state_bytes(self) -> int:
        """Return the bytes per parameter of an optimizer's fp32 state."""
        return FP32_BYTES * self.tensor_count

    def host_traffic_bytes(self, gradient_bytes: int, wire_bytes: int) -> int:
        """Return the bytes of host memory traffic per parameter that ebbtide's fused CPU update causes."""
        return 2 * self.state_bytes + gradient_bytes + wire_bytes

    def adams(self, gradient_bytes: int, wire_bytes: int) -> float:
        """Return the cost of an update relative to Adam's: the ratio of memory traffic, which limits both."""
        traffic = self.host_traffic_bytes(gradient_bytes, wire_bytes)
        return traffic / ADAM.host_traffic_bytes(gradient_bytes, wire_bytes)


ADAM = OptimizerState("adam", ("exp_avg", "exp_avg_sq"))

OPTIMIZERS: Mapping[str, OptimizerState] = {
    state.name: state
    for state in (ADAM, OptimizerState("lion", ("exp_avg",)), OptimizerState("adagrad", ("exp_avg_sq",)))
}
