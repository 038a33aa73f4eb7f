"""Stock ZeRO-1 and ZeRO-2 with the optimizer's state in host memory, as DeepSpeed 0.19.8 runs them.

Source: ``DeepSpeedZeroOptimizer`` of ``deepspeed/runtime/zero/stage_1_and_2.py``: gradients cross
the link once, widened on the device; each rank's partition is updated in one piece, copied to the
device, and gathered by all ranks.
"""

from dataclasses import replace

from ebbtide.simulator.schedule import Kind, OpKind, Schedule
from ebbtide.simulator.schedules.peers import StockLoop, StockOptions
from ebbtide.simulator.update.optimizer import FP32_BYTES
from ebbtide.simulator.workload import Workload


class FlatOffloadLoop(StockLoop):
    """Updates follow the norm one pass after the other, and nothing overlaps them."""

    def __init__(self, workload: Workload) -> None:
        options = StockOptions(gradients="asynchronous", pageable_parameters=False)
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

    def _send_home(self, layer: int, micro_step: int, after: int) -> int:
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
