"""Stock ZeRO-1 and ZeRO-2 with the optimizer's state in host memory, as DeepSpeed 0.19.8 runs them.

Source: ``DeepSpeedZeroOptimizer`` of ``deepspeed/runtime/zero/stage_1_and_2.py``: gradients cross
the link once, widened on the device; each rank's partition is updated in one piece, copied to the
device, and gathered by all ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from ebbtide.simulator.rules import RuleError
from ebbtide.simulator.schedule import Kind, Lane, OpKind, Schedule
from ebbtide.simulator.schedules.peers import FRESH_PASSES, PAGEABLE_PASSES, StockLoop, StockOptions
from ebbtide.simulator.update.optimizer import FP32_BYTES
from ebbtide.simulator.workload import Workload

SentBack = Literal["pinned_16_bit", "wide", "fresh_16_bit"]


@dataclass(frozen=True, slots=True)
class FlatOptions:
    """What distinguishes the versions and settings of stock ZeRO-1 and 2 offload.

    Attributes:
        pinned: ``pin_memory``. Without it each copy passes unpinned memory, and backward waits for the copy.
        parameters: the way of the updated parameters to the device. ``pinned_16_bit``: cast into a buffer that is
            pinned where ``pin_memory`` is on (DeepSpeed since 0.17.0, pull request 7309); ``wide``: sent in fp32
            (0.14.1 to 0.16, pull request 5301); ``fresh_16_bit``: cast into fresh unpinned memory (before).
        torch_adam: torch's own Adam updates on the host.
    """

    pinned: bool = True
    parameters: SentBack = "pinned_16_bit"
    torch_adam: bool = False

    def __post_init__(self) -> None:
        if self.parameters not in get_args(SentBack):
            raise RuleError(
                f"parameters must be one of {get_args(SentBack)}, but got {self.parameters!r}", key="options.parameters"
            )


class FlatOffloadLoop(StockLoop):
    """Updates follow the norm one pass after the other, and nothing overlaps them."""

    def __init__(self, workload: Workload, flat: FlatOptions | None = None) -> None:
        self.flat = flat or FlatOptions()
        options = StockOptions(
            gradients="asynchronous" if self.flat.pinned else "unpinned",
            pageable_parameters=False,
            torch_adam=self.flat.torch_adam,
        )
        super().__init__(workload.one_subgroup, options)

    def schedule(self, iterations: int, name: str) -> Schedule:
        """Host memory: state, fp32 gradients, the 16-bit copy on its way to the device, and the sum
        of the micro-batches where there are several.
        """
        w = self.workload
        crosses = w.gradient_accumulation_steps > 1 and not w.adds_on_device
        summed = w.grad_bytes_per_param if crosses else 0
        host: dict[Kind, int] = {
            "state": w.params * self.state_bytes,
            "gradients": w.params * (FP32_BYTES + summed),
            "staging": w.params * w.wire_bytes,
        }
        made = super().schedule(iterations, name)
        return replace(made, held={**made.held, "host": host})

    def _send_to_host(self, layer: int, micro_step: int, after: int) -> int:
        """Append the copies of the sum so far, in and out, unless it stays on the device.

        After the last micro-batch it also goes home in fp32. The copies are queued on backward's own stream.
        """
        elements = self.workload.layers[layer].params
        if not elements:
            return after
        size_bytes = elements * self.workload.grad_bytes_per_param
        moved, crosses = after, not self.workload.adds_on_device
        if crosses and micro_step > 0:
            moved = self._move(OpKind.GRADIENT_H2D, size_bytes, layer, moved)
        if crosses and self.boundary > 0:
            moved = self._move(OpKind.GRADIENT_D2H, size_bytes, layer, moved)
        if micro_step == self.boundary:
            moved = self._move(OpKind.GRADIENT_D2H, elements * FP32_BYTES, layer, moved)
        return self._waited_for(layer, moved)

    def _parameters_to_host(self, subgroup: int, waits: Sequence[int]) -> int:
        """Append the copy of the updated parameters to the device, as this version of DeepSpeed sends them."""
        fresh = self.flat.parameters == "fresh_16_bit"
        pageable = fresh or not self.flat.pinned
        passes = FRESH_PASSES if fresh else PAGEABLE_PASSES if pageable else 1
        width = FP32_BYTES if self.flat.parameters == "wide" else self.workload.wire_bytes
        size = self.sizes[subgroup] * width
        return self.out.add(
            OpKind.PARAMETER_H2D,
            Lane.H2D_PARAMETERS,
            size,
            "pageable_h2d_bytes_per_s" if pageable else "h2d_bytes_per_s",
            waits,
            dram_bytes=size * passes,
            subgroup=subgroup,
        )
