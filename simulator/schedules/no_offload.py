"""The schedule builder of training without offload."""

from ebbtide.simulator.optimizer import FP32_BYTES
from ebbtide.simulator.schedule import Lane, OpKind, Schedule
from ebbtide.simulator.schedules.footprint import with_base
from ebbtide.simulator.schedules.loop import TrainingLoop
from ebbtide.simulator.schedules.stock_options import FP64_BYTES
from ebbtide.simulator.update.steps import Bytes


class DeviceLoop(TrainingLoop):
    """The simulated training loop without offload: all optimizer state is in GPU memory."""

    def gradient_alloc_bytes(self, layer: int, micro_step: int) -> int:
        """Return the bytes of GPU memory that a layer's backward allocates for gradients, which stay until the step."""
        if micro_step > 0:
            return 0
        return self.workload.layers[layer].params * self.workload.grad_bytes_per_param

    def gradients(self, layer: int, micro_step: int, after: int) -> None:
        """Append no ops to the schedule, because gradients stay on the GPU in training without offload."""

    def step(self) -> None:
        """Append an optimizer step to the schedule: the gradient norm, and the GPU's update of each subgroup.

        Each update includes the conversion of the subgroup's gradients to fp32.
        """
        norm = self._norm()
        ends, adams = [norm], Bytes.of(self.workload).adams
        summed = self.workload.grad_bytes_per_param
        for subgroup, size in enumerate(self.sizes):
            # Gradients are first flattened into a copy and then converted to fp32. Both exist during the conversion.
            widened = size * (summed + (FP32_BYTES if summed < FP32_BYTES else 0))
            ends.append(
                self.out.add(
                    OpKind.UPDATE_DEVICE,
                    Lane.DEVICE_UPDATE,
                    size * adams,
                    "device_adam_params_per_s",
                    [norm],
                    device_share=1.0,
                    device_alloc_bytes=widened,
                    device_free_bytes=widened + size * self.workload.grad_bytes_per_param,
                    subgroup=subgroup,
                )
            )
        self.step_ends(ends)

    def _norm(self) -> int:
        # DeepSpeed copies each gradient to float64 for the norm.
        largest = max((n for group in self.workload.parameters for n in group), default=0)
        return self.out.add(
            OpKind.NORM,
            Lane.COMPUTE,
            self.workload.step_issue_s,
            after=self.gradients_done,
            device_alloc_bytes=largest * FP64_BYTES,
            device_free_bytes=largest * FP64_BYTES,
        )

    def schedule(self, iterations: int) -> Schedule:
        """Return a schedule of the ops appended so far.

        The schedule also states the bytes of GPU memory, such as for optimizer state, that are in use throughout an
        iteration.
        """
        w = self.workload
        return Schedule(
            ops=tuple(self.out.ops),
            iterations=iterations,
            ranks_per_node=w.ranks_per_node,
            strategy="no_offload",
            held={"device": with_base(w, {"state": w.params * w.optimizer_state.state_bytes})},
        )
