"""Builders of schedules for DeepSpeed's own offloading strategies (version 0.19.8) and for published improvements."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from ebbtide.simulator.quantity import RateName
from ebbtide.simulator.rules import RuleError
from ebbtide.simulator.schedule import Kind, Lane, OpKind, Schedule
from ebbtide.simulator.schedules.loop import ALL_CORES, TrainingLoop
from ebbtide.simulator.update.footprint import with_base
from ebbtide.simulator.update.optimizer import ADAM, FP32_BYTES
from ebbtide.simulator.update.recipes import Bytes
from ebbtide.simulator.workload import Workload

# Per parameter, beside the optimizer's state.
HOST_GRADIENT_BYTES = 2 * FP32_BYTES  # `.grad` and the gradient partition buffer
# DRAM traffic of stock's host passes beside the state's way both ways: unscale 8, the gradient 4
# that the update reads, downcast 8.
STOCK_PASS_BYTES = 20
FP64_BYTES = 8
PAGEABLE_PASSES = 3  # of DRAM: into the driver's staging buffer, out of it, and the link's own
# Where the unpinned side was allocated for this copy: the kernel zeroes its pages first, and the
# line that is written is fetched before.
FRESH_PASSES = PAGEABLE_PASSES + 2
WIDENING_BYTES = 10  # DRAM traffic: 2 read, and 4 written after the line was read
# Seconds per element on one thread: PyTorch's check for infinities and NaNs (``isinf``, ``isnan``, each with ``any``)
# and its conversion of bf16 to fp32 compute longer than memory takes. Measured here (AMD EPYC, Zen 5, torch 2.13).
# Older cores take longer. Conversions of fp16 are bound by memory.
OVERFLOW_CHECK_S: Mapping[str, float] = {"fp16": 3.6e-9, "bf16": 4.0e-9, "fp32": 4.0e-9}
WIDENING_S: Mapping[str, float] = {"bf16": 1.6e-9}
# DRAM traffic of the check per 16-bit element: the buffer is read four times, its absolute values and two masks are
# written after their lines were read, and read once.
OVERFLOW_CHECK_BYTES = 16
# Of device memory, by the kernels behind the reductions: the norm in float64 (2 read, 8 written and
# read), widening (2 read, 4 written).
GRADIENT_KERNEL_BYTES = 18 + 6
# These kernels start when the running product leaves the device free, and products last longer than
# they do. A parameter's stream comes to that twice, before its reduction and behind its copies
# (norm and widening), and waits half a product each time; its backward is three products.
PRODUCTS_WAITED_FOR = 2 * 0.5 / 3
# How many times as long torch's own Adam takes as DeepSpeedCPUAdam: PyTorch runs a dozen operations one by one, two of
# them into fresh memory. DeepSpeed's documentation says 5 to 7 (deepspeed.ai/tutorials/zero-offload), its pull request
# 735 had 56 s where 8.2 remained. One core of an AMD EPYC took 10 times as long (torch 2.13).
TORCH_ADAM_PASSES = 6
# DRAM traffic of one update by DeepSpeedCPUAdam: the state both ways and the gradient that it reads.
ADAM_BYTES = 2 * ADAM.state_bytes + FP32_BYTES
Updates = Literal["sequential", "interleaved", "with_backward"]
Gradients = Literal["stock", "asynchronous", "widened_on_host", "unpinned", "unpinned_widened_on_host"]
OverflowCheck = Literal["host", "host_fp16", "device"]
UNPINNED: tuple[Gradients, ...] = ("unpinned", "unpinned_widened_on_host")
WIDENED_ON_HOST: tuple[Gradients, ...] = ("widened_on_host", "unpinned_widened_on_host")


def checked_place(value: str) -> None:
    """Raise an error unless ``value`` is ``host``, ``host_fp16`` or ``device``.

    This value says where DeepSpeed looks for infinities and NaNs in gradients: see ``overflow_check`` of
    `StockOptions`.
    """
    if value not in get_args(OverflowCheck):
        raise RuleError(
            f"overflow_check must be one of {get_args(OverflowCheck)}, but got {value!r}", key="options.overflow_check"
        )


@dataclass(frozen=True, slots=True)
class StockOptions:
    """The options that distinguish the offload strategies of DeepSpeed's ZeRO-3 from one another.

    Attributes:
        gradients: Way in which gradients reach host memory. In all versions of ZeRO-3 a gradient is copied three times:
            to a 16-bit host buffer, back to the GPU, and to the host again in fp32. ``asynchronous``: the GPU converts
            to fp32, buffers are pinned, and the copies run on the stream of the reductions while backward of the next
            layers runs (DeepSpeed 0.19.8, which pins by default, and ``part_grads_async`` of Deep Optimizer States).
            ``stock``: if a profile measured the time that the copies add to backward, this time is used, otherwise like
            ``asynchronous``. ``widened_on_host``: buffers are pinned, but training waits for the last copy, and the
            host converts to fp32 through newly allocated unpinned memory (DeepSpeed before 0.19.5: ``copy_`` of a
            16-bit GPU tensor to an fp32 host tensor). ``unpinned``: all three copies use unpinned memory, and backward
            waits for each. ``unpinned_widened_on_host``: ``unpinned`` and ``widened_on_host`` together, as in DeepSpeed
            before 0.19.5, which does not pin by default.
        updates: Order of updates. ``sequential``: one subgroup after the other, with its copies, in the step.
            ``interleaved``: CPU updates, copies and updates on the GPU run at the same time, in the step.
            ``with_backward``: the CPU update of a subgroup starts when its gradient is in host memory. Only the copy of
            new parameters to the GPU is left for the step.
        host_ratio: Fraction of the subgroups whose state is in host memory (Twin-Flow's ``ratio``). DeepSpeed keeps the
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

    gradients: Gradients = "stock"
    updates: Updates = "sequential"
    host_ratio: float = 1.0
    stride: int = 0
    staging_slots: int = 1
    result_copy: bool = False
    pageable_parameters: bool = True
    torch_adam: bool = False
    overflow_check: OverflowCheck = "host_fp16"

    def __post_init__(self) -> None:
        checked_place(self.overflow_check)
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
        self.state_bytes = workload.optimizer_state.state_bytes
        count = len(self.sizes)
        self.resident = int((1 - options.host_ratio) * count)  # the first ones, as DeepSpeed does
        self.staged = {
            s for i, s in enumerate(range(self.resident, count), start=1) if options.stride and i % options.stride == 0
        }
        self.slots = min(options.staging_slots, len(self.staged))
        self.gradients_on_host: dict[int, int] = {}  # layer -> op
        self.stream: list[int] = []  # its last op
        self.missing: list[int] = []
        self.updated: dict[int, int] = {}  # subgroups updated during backward
        self.written_back: list[int] = []

    def schedule(self, iterations: int, name: str) -> Schedule:
        """Return the ops appended so far as a schedule, with the memory in use throughout an iteration."""
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
        """Return the bytes of parameters that take no GPU memory because they are kept in host memory.

        The result is 0 in `StockLoop`, because this class simulates training with all parameters in GPU memory. A
        subclass that keeps parameters in host memory overrides the property.
        """
        return 0

    # -- gradients ---------------------------------------------------------------------------

    def gradients(self, layer: int, micro_step: int, after: int) -> None:
        """Append to the schedule the copies of one layer's gradients to the host in one micro-batch.

        CPU updates that may run during backward are appended too.
        """
        on_host = self._send_to_host(layer, micro_step, after)
        self.gradients_on_host[layer] = on_host
        self.stream = [on_host]  # of the reductions: the next layer's copies queue behind these
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
        hosted *= micro_step == self.boundary  # earlier ones stop in the buffer
        elements = self.workload.layers[layer].params
        if not elements:
            return after
        if self.options.gradients == "stock" and self.workload.stock_backward_extra_s is not None:
            return self._measured_path(layer, after)
        size_bytes = elements * self.workload.grad_bytes_per_param
        after = self._gradient_kernels(elements, layer, [after, *self.stream])
        first, then = OpKind.GRADIENT_D2H, OpKind.GRADIENT_H2D
        if micro_step:  # what is there comes first, to be added to
            first, then = then, first
        moved = self._move(then, size_bytes, layer, self._move(first, size_bytes, layer, after))
        if self.options.gradients in WIDENED_ON_HOST and hosted:
            return self._widened_on_host(hosted, layer, moved)
        if hosted:
            moved = self._move(OpKind.GRADIENT_D2H, hosted * FP32_BYTES, layer, moved)
        return self._waited_for(layer, moved) if self.options.gradients in UNPINNED else moved

    def _goes_to_host(self, subgroup: int) -> bool:
        """Return True if a subgroup's gradients are copied to host memory in the simulated DeepSpeed run.

        They are not if the subgroup's state is in GPU memory. If updates on the CPU and the GPU run at the same
        time (``interleaved`` in `StockOptions`), the gradients of a subgroup that the GPU updates stay on the GPU
        too.
        """
        return subgroup >= self.resident and not self._waits_on_device(subgroup)

    def _waits_on_device(self, subgroup: int) -> bool:
        return self.options.updates == "interleaved" and subgroup in self.staged

    def gradient_alloc_bytes(self, layer: int, micro_step: int) -> int:
        """Return the bytes of GPU memory that a layer's backward allocates for gradients of later updates on the GPU.

        Memory for a subgroup's whole gradient is allocated in the backward of the subgroup's last layer, which comes
        first.
        """
        if micro_step > 0:
            return 0
        waits = sum(
            self.sizes[s] for s, _ in self.shares[layer] if self._waits_on_device(s) and max(self.layers_of[s]) == layer
        )
        return waits * self.workload.grad_bytes_per_param

    def _measured_path(self, layer: int, after: int) -> int:
        """Append to the schedule an op for DeepSpeed's copies of one layer's gradients, with a measured duration.

        A profile measured how much time all copies of gradients add to the backwards of a step. The op takes this
        layer's share of that time in one micro-batch. The share is proportional to the layer's number of parameters.
        """
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
        """Append to the schedule a copy of gradients to host memory, and then their conversion to fp32 on the CPU.

        The host thread launches no other work until the conversion ends. If the gradients are in bf16 and the number of
        the rank's CPU threads is known, the conversion takes the computing time of these threads. In all other cases it
        takes the time of writing the fp32 values at the speed of a copy to unpinned memory.
        """
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
        """Append to the schedule the GPU kernels that compute the norm of a layer's gradients and convert them to fp32.

        They run at the same time as backward of the next layers.
        """
        w = self.workload
        waited_s = w.layers[layer].backward_s * PRODUCTS_WAITED_FOR
        if self.options.gradients in ("asynchronous", "stock"):
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
        pageable = self.options.gradients in UNPINNED
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
        norm = self.out.add(OpKind.NORM, Lane.COMPUTE, 0.0, after=waits)
        ends: list[int] = []
        for subgroup in range(len(self.sizes)):
            sequential = self.options.updates != "interleaved" and bool(ends)
            ends.append(self._update(subgroup, ends[-1] if sequential else norm))
        waits = [norm, *ends, *self.written_back[len(self.written_back) - len(self.staged) :]]
        self.step_ends(waits)
        self.updated, self.gradients_on_host = {}, {}

    @property
    def checks_on_host(self) -> bool:
        """Return True if the host looks for infinities and NaNs in its buffer of gradients, before the norm."""
        place = self.options.overflow_check
        return place == "host" or (place == "host_fp16" and self.workload.wire_dtype == "fp16")

    def _overflow_check(self, waits: Sequence[int]) -> int:
        """Append to the schedule the host's check for infinities and NaNs in all gradients of the rank."""
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
        """Append to the schedule DeepSpeed's update of a subgroup on the CPU: unscale, Adam, conversion to 16 bits.

        The machine's rate for DeepSpeed's CPU update covers all three.
        """
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
        """Append to the schedule the copy of a subgroup's updated parameters to the GPU.

        Args:
            size: Bytes to copy.
            passes: Number of times that the copy reads or writes these bytes in host memory.
            pageable: The bytes are not in page-locked memory.
        """
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
        """Append to the schedule the update of a subgroup by the GPU, which frees ``gradient_bytes`` of GPU memory at
        its end.
        """
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
        """Append to the schedule a staged update: a subgroup's state is copied to the GPU, updated, and copied back.

        If the fp32 gradient is in host memory, it is copied too.
        """
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
        """Append to the schedule the updates of all subgroups on the GPU, which first convert gradients to fp32."""
        norm = self._norm()
        ends, adams = [norm], Bytes.of(self.workload).adams
        summed = self.workload.grad_bytes_per_param
        for subgroup, size in enumerate(self.sizes):
            # Flattened first, which is a copy, and then widened: both are there while the second is made.
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
        """Append to the schedule the computation of the gradient norm. DeepSpeed copies each gradient to float64 for
        the norm.
        """
        largest = max((n for group in self.workload.parameters for n in group), default=0)
        return self.out.add(
            OpKind.NORM,
            Lane.COMPUTE,
            0.0,
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
