"""The builder of schedules for ZeRO-1 and 2 with optimizer state in host memory, as DeepSpeed 0.19.8 runs them.

Gradients are converted to fp32 on the GPU and copied to the host once. The partition of each rank is
updated as a whole, copied to the GPU, and gathered by all ranks. Source: ``DeepSpeedZeroOptimizer`` of
``deepspeed/runtime/zero/stage_1_and_2.py``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ebbtide.simulator.optimizer import FP32_BYTES
from ebbtide.simulator.quantity import RateName
from ebbtide.simulator.schedule import Kind, Lane, OpKind, Schedule
from ebbtide.simulator.schedules.stock import StockLoop
from ebbtide.simulator.schedules.stock_options import FRESH_PASSES, PAGEABLE_PASSES, StockOptions
from ebbtide.simulator.workload import Workload

SentBack = Literal["pinned_16_bit", "wide", "fresh_16_bit"]


@dataclass(frozen=True, slots=True)
class FlatOptions:
    """The options of DeepSpeed's ZeRO-1 and 2 offload that differ between versions and settings.

    Attributes:
        pinned: DeepSpeed's ``pin_memory``. If False, each copy uses unpinned memory, and backward waits for it.
        parameters: Way in which updated parameters are copied to the GPU. ``pinned_16_bit``: converted into a
            buffer that is pinned if ``pin_memory`` is on (DeepSpeed since 0.17.0, pull request 7309).
            ``wide``: copied in fp32 (0.14.1 to 0.16, pull request 5301). ``fresh_16_bit``: converted into newly
            allocated unpinned memory (before 0.14.1).
        torch_adam: True if torch's own Adam updates on the CPU.
    """

    pinned: bool = True
    parameters: SentBack = "pinned_16_bit"
    torch_adam: bool = False


class FlatOffloadLoop(StockLoop):
    """The simulated training loop of DeepSpeed's ZeRO-1 and 2 with optimizer state in host memory.

    All updates run on the CPU after the gradient norm, and no other op runs at the same time.
    """

    def __init__(self, workload: Workload, flat: FlatOptions) -> None:
        self.flat = flat
        options = StockOptions(
            pinned=flat.pinned, measured_copies=False, torch_adam=flat.torch_adam, overflow_check="device"
        )
        super().__init__(workload.one_subgroup, options)

    def schedule(self, iterations: int, name: str) -> Schedule:
        """Return the ops appended so far as a schedule, with the host memory in use throughout an iteration.

        That memory holds optimizer state, fp32 gradients and the 16-bit copy of new parameters. With several
        micro-batches it also holds the sum of their gradients.
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
        # Before the last micro-batch there are none if the gradient sum stays on the GPU. After the last micro-batch
        # the sum is copied to the host in fp32. The copies run on the stream of backward.
        after = self._others_copy(layer, micro_step, after)
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

    def _others_copy(self, layer: int, micro_step: int, after: int) -> int:
        # Each rank owns one slice of DeepSpeed's flat buffer, with consecutive parameters. So a layer's gradients
        # usually belong to a single rank, the owner. The owner copies them to the host on the stream of its reductions.
        # All other ranks wait for the owner at the reduction of the next bucket. With ``overlap_comm``, only their
        # stream of reductions waits, and backward goes on.
        elements = self.workload.layers[layer].params_of_others
        width = FP32_BYTES if micro_step == self.boundary else 0
        if not self.workload.adds_on_device:
            width += self.workload.grad_bytes_per_param * ((micro_step > 0) + (self.boundary > 0))
        if not elements * width:
            return after
        beside = self.workload.reduced_beside > 0
        lane = Lane.DEVICE_UPDATE if beside else Lane.COMPUTE
        rate: RateName = "d2h_bytes_per_s" if self.flat.pinned else "pageable_d2h_bytes_per_s"
        waits = [after, *self.stream] if beside else [after]
        return self.out.add(OpKind.GRADIENT_PASS, lane, elements * width, rate, waits, layer=layer)

    def _parameters_to_device(self, subgroup: int, waits: Sequence[int]) -> int:
        fresh = self.flat.parameters == "fresh_16_bit"
        pageable = fresh or not self.flat.pinned
        passes = FRESH_PASSES if fresh else PAGEABLE_PASSES if pageable else 1
        width = FP32_BYTES if self.flat.parameters == "wide" else self.workload.wire_bytes
        size = self.sizes[subgroup] * width
        return self._sent_back(subgroup, waits, size, passes, pageable=pageable)
