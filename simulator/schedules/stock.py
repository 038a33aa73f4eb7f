"""The schedule builders of DeepSpeed without a plan: ZeRO-3 offload with its published improvements, such as Twin-Flow
and SuperOffload, the offload of ZeRO-1 and 2, and training without offload.

The costs of the strategies' work in memory traffic and time, such as for the conversion of gradients to fp32, are those
of DeepSpeed 0.19.8.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ebbtide.simulator.optimizer import ADAM, FP32_BYTES
from ebbtide.simulator.quantity import RateName
from ebbtide.simulator.rules import RuleError
from ebbtide.simulator.schedule import Kind, Lane, OpKind, Schedule
from ebbtide.simulator.schedules.footprint import with_base
from ebbtide.simulator.schedules.loop import ALL_CORES, TrainingLoop
from ebbtide.simulator.update.steps import Bytes
from ebbtide.simulator.workload import Workload

# Host memory per parameter, in addition to the optimizer's state.
HOST_GRADIENT_BYTES = 2 * FP32_BYTES  # `.grad` and the gradient partition buffer
# DRAM traffic of DeepSpeed's passes in host memory, without the reads and writes of the state: unscaling 8, the
# gradient that the update reads 4, conversion to 16 bits 8.
STOCK_PASS_BYTES = 20
FP64_BYTES = 8
# Number of times that DRAM is read or written: into the driver's staging buffer, out of it, and by the link.
PAGEABLE_PASSES = 3
# The same if unpinned memory was allocated for this copy: the kernel also zeroes its pages, and the cache line that is
# written is read first.
FRESH_PASSES = PAGEABLE_PASSES + 2
WIDENING_BYTES = 10  # DRAM traffic: 2 bytes read, and 4 written after the cache line was read
# Seconds per element on one thread. PyTorch's check for infinities and NaNs (``isinf``, ``isnan``, each with ``any``)
# and its conversion of bf16 to fp32 are limited by computation, not by memory. Measured on an AMD EPYC (Zen 5, torch
# 2.13). Older cores take longer. Conversions of fp16 are limited by memory.
OVERFLOW_CHECK_S: Mapping[str, float] = {"fp16": 3.6e-9, "bf16": 4.0e-9, "fp32": 4.0e-9}
WIDENING_S: Mapping[str, float] = {"bf16": 1.6e-9}
# DRAM traffic of the check per 16-bit element: the buffer is read four times. Its absolute values and two masks are
# written (after their cache lines were read), and read once.
OVERFLOW_CHECK_BYTES = 16
# GPU memory traffic of the kernels after the reductions: the norm in float64 (2 read, 8 written and read), and the
# conversion to fp32 (2 read, 4 written).
GRADIENT_KERNEL_BYTES = 18 + 6
# Backward's matrix products that a parameter's gradient stream waits for, as a share of the three products of its
# backward. The small kernels of the stream start when the running product ends, so they wait for half a product on
# average, twice per parameter: before the reduction, and after the copies.
PRODUCTS_WAITED_FOR = 2 * 0.5 / 3
# Time of torch's own Adam divided by that of DeepSpeedCPUAdam: PyTorch runs a dozen ops one after the other, two of
# them into fresh memory. DeepSpeed's documentation says 5 to 7 times (deepspeed.ai/tutorials/zero-offload), and its
# pull request 735 reports 56 s instead of 8.2 s. One core of an AMD EPYC took 10 times as long (torch 2.13).
TORCH_ADAM_PASSES = 6
# DRAM traffic of one update by DeepSpeedCPUAdam: the state, read and written, and the gradient, read.
ADAM_BYTES = 2 * ADAM.state_bytes + FP32_BYTES
Updates = Literal["sequential", "interleaved", "with_backward"]
OverflowCheck = Literal["host", "host_fp16", "device"]


@dataclass(frozen=True, slots=True)
class StockOptions:
    """The options that distinguish the offload strategies of DeepSpeed's ZeRO-3 from one another.

    Attributes:
        pinned: True if the host buffers of gradients are pinned. In all versions of ZeRO-3 a gradient is copied three
            times: to a 16-bit host buffer, back to the GPU, and to an fp32 host buffer. If the buffers are not pinned
            (the default before DeepSpeed 0.19.5), backward waits for each copy.
        async_gradients: True if the GPU converts gradients to fp32, and the copies run on the stream of the reductions
            while backward of the next layers runs (DeepSpeed 0.19.8, and ``part_grads_async`` of Deep Optimizer
            States). False if training waits for the last copy, and the host converts through newly allocated unpinned
            memory (DeepSpeed before 0.19.5: ``copy_`` of a 16-bit GPU tensor to an fp32 host tensor).
        measured_copies: True to use a profile's time of the copies, if it has one and they are pinned and asynchronous.
        updates: Order of updates. ``sequential``: one subgroup after the other, with its copies, in the step.
            ``interleaved``: CPU updates, copies and updates on the GPU run at the same time, in the step.
            ``with_backward``: the CPU update of a subgroup starts when its gradient is in host memory. Only the copy of
            new parameters to the GPU is left for the step.
        host_ratio: Fraction of the subgroups with state in host memory (Twin-Flow's ``ratio``). DeepSpeed keeps the
            first subgroups in GPU memory.
        stride: ``n`` if the GPU updates every ``n``-th of the subgroups in host memory. 0 if it updates none of them.
        staging_slots: Number of staging buffers. Each is GPU memory for the state of one subgroup.
        result_copy: True if another process does the CPU updates, so that new masters are copied once more.
        pageable_parameters: True if parameters are converted into newly allocated unpinned memory and copied from
            there, as DeepSpeed does for any value of ``pin_memory``.
        torch_adam: True if torch's own Adam updates on the CPU (``optimizer.params.torch_adam``, or a client's
            optimizer with ``zero_force_ds_cpu_optimizer`` off) instead of DeepSpeedCPUAdam.
        overflow_check: Place where ZeRO-3 looks for infinities and NaNs in gradients before the norm. ``device``: on
            the GPU, while backward runs (DeepSpeed before 0.9.4). ``host``: in the host's 16-bit buffer (0.9.4 to
            0.11.1). ``host_fp16``: like ``host``, but only for fp16 (since 0.11.2). Source: ``has_overflow`` and
            ``_overflow_check_and_loss_scale_update`` of ``deepspeed/runtime/zero/stage3.py``.
    """

    pinned: bool = True
    async_gradients: bool = True
    measured_copies: bool = True
    updates: Updates = "sequential"
    host_ratio: float = 1.0
    stride: int = 0
    staging_slots: int = 1
    result_copy: bool = False
    pageable_parameters: bool = True
    torch_adam: bool = False
    overflow_check: OverflowCheck = "host_fp16"

    def __post_init__(self) -> None:
        if not 0 <= self.host_ratio <= 1:
            raise RuleError(
                "ratio (fraction of the subgroups with optimizer state in host memory) must lie in [0, 1], but got "
                f"{self.host_ratio}",
                key="options.ratio",
            )
        if not (isinstance(self.stride, int) and self.stride >= 0):
            raise RuleError(
                "stride must be 0 (no staged updates) or a whole number >= 1 (every stride-th subgroup "
                f"is staged to the GPU), but got {self.stride}",
                key="options.stride",
            )
        if self.staging_slots < 1:
            raise RuleError(f"staging_slots must be >= 1, but got {self.staging_slots}", key="options.staging_slots")


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
        hosted = sum(n for s, n in self.shares[layer] if s >= self.resident and not self._waits_on_device(s))
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
        """Return True if DeepSpeed checks gradients for infinities and NaNs on the CPU before the norm."""
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

    Gradients are converted to fp32 on the GPU and copied to the host once. All updates run on the CPU after the
    gradient norm, and no other op runs at the same time. The partition of each rank is updated as a whole, copied to
    the GPU, and gathered by all ranks. Source: ``DeepSpeedZeroOptimizer`` of
    ``deepspeed/runtime/zero/stage_1_and_2.py``.
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
