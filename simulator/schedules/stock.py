"""The schedule builder of DeepSpeed's ZeRO-3 offload, and of published improvements on it."""

from collections.abc import Sequence

from ebbtide.simulator.optimizer import ADAM, FP32_BYTES
from ebbtide.simulator.quantity import RateName
from ebbtide.simulator.schedule import Kind, Lane, OpKind, Schedule
from ebbtide.simulator.schedules.footprint import with_base
from ebbtide.simulator.schedules.loop import ALL_CORES, TrainingLoop
from ebbtide.simulator.schedules.stock_options import (
    ADAM_BYTES,
    FRESH_PASSES,
    GRADIENT_KERNEL_BYTES,
    HOST_GRADIENT_BYTES,
    OVERFLOW_CHECK_BYTES,
    OVERFLOW_CHECK_S,
    PAGEABLE_PASSES,
    PRODUCTS_WAITED_FOR,
    STOCK_PASS_BYTES,
    TORCH_ADAM_PASSES,
    WIDENING_BYTES,
    WIDENING_S,
    StockOptions,
)
from ebbtide.simulator.update.steps import Bytes
from ebbtide.simulator.workload import Workload


class StockLoop(TrainingLoop):
    """The simulated training loop of DeepSpeed's ZeRO-3 offload, and of improvements on it (`StockOptions`)."""

    def __init__(self, workload: Workload, options: StockOptions) -> None:
        super().__init__(workload)
        self.options = options
        self.leave_last = {left.layer for left in self.leavings[0]}
        self.state_bytes = workload.optimizer_state.state_bytes
        count = len(self.sizes)
        self.resident = int((1 - options.host_ratio) * count)  # DeepSpeed keeps the first subgroups on the GPU
        self.staged = {
            s for i, s in enumerate(range(self.resident, count), start=1) if options.stride and i % options.stride == 0
        }
        self.slots = min(options.staging_slots, len(self.staged))
        self.gradients_on_host: dict[int, int] = {}  # layer -> op
        self.stream: list[int] = []  # the last op of the stream of reductions
        self.missing: list[int] = []
        self.updated: dict[int, int] = {}  # op of each subgroup that is updated during backward
        self.written_back: list[int] = []

    def schedule(self, iterations: int, name: str) -> Schedule:
        """Return the ops appended so far as a schedule.

        The schedule's field ``held`` says how many bytes are in use all the time, such as for optimizer state.
        """
        w = self.workload
        on_device = sum(self.sizes[: self.resident])
        staging = self.slots * max((self.sizes[s] for s in self.staged), default=0)
        state = w.optimizer_state.state_bytes
        hosted = w.params - on_device
        device: dict[Kind, int] = {
            "state": on_device * state,
            "gradients": on_device * FP32_BYTES,
            "staging": staging * (state + FP32_BYTES),
        }
        host: dict[Kind, int] = {
            "state": hosted * state,
            "gradients": hosted * HOST_GRADIENT_BYTES + on_device * FP32_BYTES,
        }
        return Schedule(
            ops=tuple(self.out.ops),
            iterations=iterations,
            ranks_per_node=w.ranks_per_node,
            strategy=name,
            held={"device": with_base(w, device, self.gone_bytes), "host": host},
        )

    @property
    def gone_bytes(self) -> int:
        """Return the bytes of parameters that take no GPU memory because they are kept in host memory."""
        # The result is 0 in `StockLoop`, because this class simulates training with all parameters in GPU memory.
        return 0

    # -- gradients ---------------------------------------------------------------------------

    def gradients(self, layer: int, micro_step: int, after: int) -> None:
        """Append to the schedule the copies of one layer's gradients to the host in one micro-batch.

        CPU updates that may run during backward are appended too.
        """
        on_host = self._send_to_host(layer, micro_step, after)
        self.gradients_on_host[layer] = on_host
        self.stream = [on_host]  # on the stream of reductions, where the copies of the next layer queue up behind these
        for subgroup, _ in reversed(self.shares[layer]):
            self.missing[subgroup] -= 1
            complete = self.missing[subgroup] == 0 and micro_step == self.boundary
            early = self.options.updates == "with_backward" and subgroup >= self.resident
            if complete and early:
                self.updated[subgroup] = self._update_host(subgroup, [on_host])

    def backward(self, micro_step: int) -> None:
        """Append to the schedule the backward of one micro-batch.

        It ends when all gradient copies to the host have ended, because DeepSpeed waits for them.
        """
        self.missing = [len(layers) for layers in self.layers_of]
        super().backward(micro_step)
        copied = list(self.gradients_on_host.values())
        self.out.add(OpKind.GRADIENT_PASS, Lane.COMPUTE, 0.0, after=copied)

    def _send_to_host(self, layer: int, micro_step: int, after: int) -> int:
        hosted = sum(n for s, n in self.shares[layer] if self._goes_to_host(s))
        hosted *= micro_step == self.boundary  # gradients of earlier micro-batches stay in DeepSpeed's partition buffer
        elements = self.workload.layers[layer].params
        if not elements:
            return after
        measured = self.workload.stock_backward_extra_s is not None and self.options.measured_copies
        if measured and self._copies_behind_backward:
            return self._measured_path(layer, after)
        size_bytes = elements * self.workload.grad_bytes_per_param
        after = self._gradient_kernels(elements, layer, [after, *self.stream])
        first, then = OpKind.GRADIENT_D2H, OpKind.GRADIENT_H2D
        if micro_step:  # the earlier sum is first copied to the GPU, to be added to
            first, then = then, first
        moved = self._move(then, size_bytes, layer, self._move(first, size_bytes, layer, after))
        if hosted and not self.options.async_gradients:
            return self._widened_on_host(hosted, layer, moved)
        if hosted:
            moved = self._move(OpKind.GRADIENT_D2H, hosted * FP32_BYTES, layer, moved)
        return moved if self.options.pinned else self._waited_for(layer, moved)

    @property
    def _copies_behind_backward(self) -> bool:
        return self.options.pinned and self.options.async_gradients

    def _goes_to_host(self, subgroup: int) -> bool:
        return subgroup >= self.resident and not self._waits_on_device(subgroup)

    def _waits_on_device(self, subgroup: int) -> bool:
        return self.options.updates == "interleaved" and subgroup in self.staged

    def gradient_alloc_bytes(self, layer: int, micro_step: int) -> int:
        """Return the bytes of GPU memory that a layer's backward allocates for gradients of staged updates.

        For a staged update, a subgroup's state is copied from host memory to the GPU. The subgroup's gradient waits in
        GPU memory for this update. Memory for the whole gradient is allocated in the backward of the subgroup's last
        layer. Backward reaches this layer before the subgroup's other layers.
        """
        if micro_step > 0:
            return 0
        waits = sum(
            self.sizes[s] for s, _ in self.shares[layer] if self._waits_on_device(s) and max(self.layers_of[s]) == layer
        )
        return waits * self.workload.grad_bytes_per_param

    def _measured_path(self, layer: int, after: int) -> int:
        # A profile measured how much time all copies of gradients add to the backwards of a step.
        w = self.workload
        part = w.layers[layer].params / (w.params * w.gradient_accumulation_steps)
        elements = w.layers[layer].params
        return self.out.add(
            OpKind.GRADIENT_PASS,
            Lane.COMPUTE,
            (w.stock_backward_extra_s or 0.0) * part,
            after=[after],
            dram_bytes=elements * (2 * w.grad_bytes_per_param + FP32_BYTES),
            layer=layer,
        )

    def _widened_on_host(self, elements: int, layer: int, after: int) -> int:
        # The host thread launches no other work until the conversion ends. If the gradients are in bf16 and the number
        # of the rank's CPU threads is known, the conversion takes the computing time of these threads. In all other
        # cases it takes the time of writing the fp32 values at the speed of a copy to unpinned memory.
        size_bytes = elements * self.workload.grad_bytes_per_param
        moved = self.out.add(
            OpKind.GRADIENT_D2H,
            Lane.D2H,
            size_bytes,
            "pageable_d2h_bytes_per_s",
            [after],
            dram_bytes=size_bytes * FRESH_PASSES,
            layer=layer,
        )
        threads, core_s = self.workload.stock_threads, WIDENING_S.get(self.workload.wire_dtype, 0.0)
        work: tuple[float, RateName] = (elements * FP32_BYTES, "pageable_d2h_bytes_per_s")
        if threads is not None and core_s:
            work = (elements * core_s / threads, "wall_s")
        return self.out.add(
            OpKind.GRADIENT_PASS, Lane.COMPUTE, *work, [moved], dram_bytes=elements * WIDENING_BYTES, layer=layer
        )

    def _gradient_kernels(self, elements: int, layer: int, waits: list[int]) -> int:
        # If gradients are copied asynchronously, these kernels run during the backward of other layers. They are then
        # delayed by that backward's matrix products, so a wait is appended before them. For gradients that leave
        # DeepSpeed's bucket at the end of backward, there is no wait, because no other backward runs.
        w = self.workload
        waited_s = w.layers[layer].backward_s * PRODUCTS_WAITED_FOR
        alone = self.bucket and layer in self.leave_last
        if self._copies_behind_backward and not alone:
            waits = [self.out.add(OpKind.GRADIENT_PASS, Lane.DEVICE_UPDATE, waited_s, after=waits, layer=layer)]
        return self.out.add(
            OpKind.GRADIENT_PASS,
            Lane.DEVICE_UPDATE,
            elements * GRADIENT_KERNEL_BYTES,
            "device_memory_bytes_per_s",
            waits,
            device_share=1.0,
            layer=layer,
        )

    def _waited_for(self, layer: int, after: int) -> int:
        return self.out.add(OpKind.GRADIENT_PASS, Lane.COMPUTE, 0.0, after=[after], layer=layer)

    def _move(self, kind: OpKind, size_bytes: float, layer: int, after: int) -> int:
        direction = "d2h" if kind == OpKind.GRADIENT_D2H else "h2d"
        pageable = not self.options.pinned
        rate = f"pageable_{direction}_bytes_per_s" if pageable else f"{direction}_bytes_per_s"
        return self.out.add(
            kind,
            Lane.D2H if direction == "d2h" else Lane.H2D,
            size_bytes,
            rate,  # type: ignore[arg-type]
            [after],
            dram_bytes=size_bytes * (PAGEABLE_PASSES if pageable else 1),
            layer=layer,
        )

    # -- step --------------------------------------------------------------------------------

    def step(self) -> None:
        """Append to the schedule an optimizer step: the gradient norm, and then one update after the other.

        The step returns when all updates have ended.
        """
        waits = [*self.gradients_done, *self.gradients_on_host.values(), *self.updated.values()]
        if self.checks_on_host:
            waits = [self._overflow_check(waits)]
        norm = self.out.add(OpKind.NORM, Lane.COMPUTE, self.workload.step_issue_s, after=waits)
        ends: list[int] = []
        for subgroup in range(len(self.sizes)):
            sequential = self.options.updates != "interleaved" and bool(ends)
            ends.append(self._update(subgroup, ends[-1] if sequential else norm))
        waits = [norm, *ends, *self.written_back[len(self.written_back) - len(self.staged) :]]
        self.step_ends(waits)
        self.updated, self.gradients_on_host = {}, {}

    @property
    def checks_on_host(self) -> bool:
        """Return True if the simulated DeepSpeed checks the gradients in host memory for infinities and NaNs, on the
        CPU and before the gradient norm is computed.
        """
        place = self.options.overflow_check
        return place == "host" or (place == "host_fp16" and self.workload.wire_dtype == "fp16")

    def _overflow_check(self, waits: Sequence[int]) -> int:
        w = self.workload
        traffic = w.params * OVERFLOW_CHECK_BYTES
        adam_bytes = 2 * ADAM.state_bytes + STOCK_PASS_BYTES
        work: tuple[float, RateName] = (traffic / adam_bytes, "stock_host_adam_params_per_s")
        if w.stock_threads is not None:
            work = (w.params * OVERFLOW_CHECK_S[w.wire_dtype] / w.stock_threads, "wall_s")
        return self.out.add(
            OpKind.NORM, Lane.HOST, *work, waits, dram_bytes=traffic, cores=w.stock_threads or ALL_CORES
        )

    def _update(self, subgroup: int, after: int) -> int:
        if subgroup < self.resident:
            return self._update_device(subgroup, [after])
        if subgroup in self.staged:
            return self._stage(subgroup, after)
        done = self.updated.get(subgroup)
        if done is None:
            done = self._update_host(subgroup, [after])
        return self._parameters_to_device(subgroup, [after, done])

    def _update_host(self, subgroup: int, waits: Sequence[int]) -> int:
        # The machine's rate for DeepSpeed's CPU update covers all three.
        size = self.sizes[subgroup]
        traffic = 2 * self.state_bytes + STOCK_PASS_BYTES
        if self.options.torch_adam:
            traffic += (TORCH_ADAM_PASSES - 1) * ADAM_BYTES
        adams = traffic / (2 * ADAM.state_bytes + STOCK_PASS_BYTES)
        return self.out.add(
            OpKind.UPDATE_HOST,
            Lane.HOST,
            size * adams,
            "stock_host_adam_params_per_s",
            waits,
            dram_bytes=size * traffic,
            cores=self.workload.stock_threads or ALL_CORES,
            subgroup=subgroup,
        )

    def _result_copied(self, subgroup: int, waits: Sequence[int]) -> list[int]:
        size = self.sizes[subgroup] * FP32_BYTES
        copied = self.out.add(
            OpKind.PARAMETER_CAST,
            Lane.HOST,
            size,
            "host_copy_bytes_per_s",
            waits,
            dram_bytes=2 * size,
            cores=ALL_CORES,
            subgroup=subgroup,
        )
        return [copied]

    def _parameters_to_device(self, subgroup: int, waits: Sequence[int]) -> int:
        size = self.sizes[subgroup] * self.workload.wire_bytes
        if self.options.result_copy:
            waits = self._result_copied(subgroup, waits)
        pageable = self.options.pageable_parameters
        return self._sent_back(subgroup, waits, size, FRESH_PASSES if pageable else 1, pageable=pageable)

    def _sent_back(self, subgroup: int, waits: Sequence[int], size: float, passes: float, *, pageable: bool) -> int:
        return self.out.add(
            OpKind.PARAMETER_H2D,
            Lane.H2D_PARAMETERS,
            size,
            "pageable_h2d_bytes_per_s" if pageable else "h2d_bytes_per_s",
            waits,
            dram_bytes=size * passes,
            subgroup=subgroup,
        )

    def _update_device(self, subgroup: int, waits: Sequence[int], gradient_bytes: int = 0) -> int:
        return self.out.add(
            OpKind.UPDATE_DEVICE,
            Lane.DEVICE_UPDATE,
            self.sizes[subgroup] * Bytes.of(self.workload).adams,
            "device_adam_params_per_s",
            waits,
            device_share=1.0,
            device_free_bytes=gradient_bytes,
            subgroup=subgroup,
        )

    def _stage(self, subgroup: int, after: int) -> int:
        waits = [after]
        if len(self.written_back) >= self.slots:
            waits.append(self.written_back[-self.slots])
        size, stays = self.sizes[subgroup], self._waits_on_device(subgroup)
        moved = size * (self.state_bytes + (0 if stays else FP32_BYTES))
        arrived = self.out.add(
            OpKind.STATE_H2D, Lane.H2D, moved, "h2d_bytes_per_s", waits, dram_bytes=moved, subgroup=subgroup
        )
        gradient = size * self.workload.grad_bytes_per_param if stays else 0
        update = self._update_device(subgroup, [arrived], gradient)
        back = self.out.add(
            OpKind.STATE_D2H,
            Lane.D2H,
            size * self.state_bytes,
            "d2h_bytes_per_s",
            [update],
            dram_bytes=size * self.state_bytes,
            subgroup=subgroup,
        )
        self.written_back.append(back)
        return update
