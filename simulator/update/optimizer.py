"""An optimizer's state per parameter, and the bytes that its update moves.

Every byte count of the update comes from here. A new optimizer is a row of `OPTIMIZERS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

FP32_BYTES = 4


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """The fp32 tensors of one parameter that an update reads and writes.

    Attributes:
        name: as plans and workloads call it.
        tensors: beside the master, by the keys of DeepSpeed's ``optimizer.state``.
        master: an fp32 master parameter is part of the state.
    """

    name: str
    tensors: tuple[str, ...]
    master: bool = True

    @property
    def tensor_count(self) -> int:
        """Tensors of a subgroup's state, the master included."""
        return len(self.tensors) + self.master

    @property
    def state_bytes(self) -> int:
        """Per parameter, where the state lives."""
        return FP32_BYTES * self.tensor_count

    @property
    def staged_bytes(self) -> int:
        """Per parameter, each way: all of the state comes in, and all of it goes back."""
        return self.state_bytes

    def host_traffic_bytes(self, gradient_bytes: int, wire_bytes: int) -> int:
        """DRAM traffic of the fused host update per parameter: state read and written, the
        gradient read, the new wire parameter written, in one pass.
        """
        return 2 * self.state_bytes + gradient_bytes + wire_bytes

    def adams(self, gradient_bytes: int, wire_bytes: int) -> float:
        """Return the cost of a parameter's update in Adam's parameters.

        Updates are bound by memory, and machines' rates are Adam's.
        """
        traffic = self.host_traffic_bytes(gradient_bytes, wire_bytes)
        return traffic / ADAM.host_traffic_bytes(gradient_bytes, wire_bytes)


ADAM = OptimizerState("adam", ("exp_avg", "exp_avg_sq"))

OPTIMIZERS: Mapping[str, OptimizerState] = {
    state.name: state
    for state in (ADAM, OptimizerState("lion", ("exp_avg",)), OptimizerState("adagrad", ("exp_avg_sq",)))
}
