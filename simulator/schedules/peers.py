"""Schedules of the optimizers that ebbtide is compared with, as DeepSpeed 0.19.8 runs them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from simulator.schedule import Lane, OpKind, Schedule
from simulator.schedules.loop import ALL_CORES, TrainingLoop
from simulator.update.optimizer import ADAM, FP32_BYTES
from simulator.workload import Workload

STATE_BYTES_PER_PARAM = ADAM.state_bytes
HOST_BYTES_PER_PARAM = 20  # state 12, `.grad` 4, gradient partition buffer 4
DEVICE_BYTES_PER_PARAM = STATE_BYTES_PER_PARAM + FP32_BYTES  # state and fp32 gradient
# Unscale 8, DeepSpeedCPUAdam 28, downcast 8: DRAM traffic per parameter of stock's host passes.
STOCK_UPDATE_BYTES = 44
PAGEABLE_PASSES = 3  # of DRAM: into the driver's staging buffer, out of it, and the link's own
Updates = Literal["sequential", "interleaved", "with_backward"]


@dataclass(frozen=True, slots=True)
class StockOptions:
    """What distinguishes the stock strategies from one another.

    Attributes:
        blocking_gradients: a gradient crosses the link three times; else it is widened on the
            device and crosses once. Backward waits for the copies either way.
        updates: ``sequential``: one subgroup after the other, copies included, at the step;
            ``interleaved``: host updates, copies and visits side by side, at the step;
            ``with_backward``: a subgroup's host update starts once its gradient is home, and only
            the new parameters' way to the device is left for the step.
        host_ratio: share of subgroups whose state lives on the host; DeepSpeed puts the others'
            (the first ones') into device memory. Twin-Flow's ``ratio``.
        counts_host: the builds of 2024 round the number of hosted subgroups down, DeepSpeed 0.19.8
            that of the others.
        stride: of the hosted subgroups every so many-th visits the device; 0: none.
        staging_slots: device buffers for visits.
        result_copy: new masters come back from another process and are copied once more.
        pageable_parameters, pageable_gradients: they travel from and to unpinned memory
            (``pin_memory: false``).
    """

    blocking_gradients: bool = True
    updates: Updates = "sequential"
    host_ratio: float = 1.0
    counts_host: bool = False
    stride: int = 0
    staging_slots: int = 1
    result_copy: bool = False
    pageable_parameters: bool = True
    pageable_gradients: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.host_ratio <= 1:
            raise ValueError(f"ratio must lie in [0, 1], but got {self.host_ratio}")
        if self.stride < 0 or self.stride == 1:
            raise ValueError(
                "stride must be 0 (no visits) or >= 2 (every stride-th subgroup visits the "
                f"device, at most one half of them), but got {self.stride}"
            )
        if self.staging_slots < 1:
            raise ValueError(f"staging_slots must be >= 1, but got {self.staging_slots}")


class StockLoop(TrainingLoop):
    """The iteration of stock ZeRO-3 offload and of the published improvements on it."""

    def __init__(self, workload: Workload, options: StockOptions) -> None:
        super().__init__(workload)
        self.options = options
        count = len(self.sizes)
        self.resident = self._residents(count)  # the first ones, as DeepSpeed does
        self.visits = {
            s for i, s in enumerate(range(self.resident, count), start=1)
            if options.stride and i % options.stride == 0
        }  # fmt: skip
        self.slots = min(options.staging_slots, len(self.visits))
        self.gradients_home: dict[int, int] = {}  # layer -> op
        self.missing: list[int] = []
        self.updated: dict[int, int] = {}  # subgroups updated during backward
        self.written_back: list[int] = []

    def _residents(self, count: int) -> int:
        """DeepSpeed 0.19.8 counts those on the device, older builds those on the host."""
        if self.options.counts_host:
            return count - int(self.options.host_ratio * count + 1e-9)
        return int((1 - self.options.host_ratio) * count)

    def schedule(self, iterations: int, name: str) -> Schedule:
        """What was appended so far, with the memory that is in use throughout."""
        w = self.workload
        on_device = sum(self.sizes[: self.resident])
        staging = self.slots * max((self.sizes[s] for s in self.visits), default=0)
        on_device_bytes = (on_device + staging) * DEVICE_BYTES_PER_PARAM
        hosted = w.params - on_device
        return Schedule(
            ops=tuple(self.out.ops),
            iterations=iterations,
            ranks_per_node=w.ranks_per_node,
            strategy=name,
            device_base_bytes=w.device_base_bytes + on_device_bytes,
            host_base_bytes=hosted * HOST_BYTES_PER_PARAM + on_device * FP32_BYTES,
        )

    def backward(self, micro_batch: int) -> None:
        self.missing = [len(layers) for layers in self.layers_of]
        super().backward(micro_batch)

    # -- gradients ---------------------------------------------------------------------------

    def gradients(self, layer: int, micro_batch: int, after: int) -> None:
        """Sends a layer's gradients home; what is complete may be updated at once."""
        home = self._send_home(layer, micro_batch, after)
        self.gradients_home[layer] = home
        for subgroup, _ in reversed(self.shares[layer]):
            self.missing[subgroup] -= 1
            complete = self.missing[subgroup] == 0 and micro_batch == self.boundary
            early = self.options.updates == "with_backward" and subgroup >= self.resident
            if complete and early:
                self.updated[subgroup] = self._update_host(subgroup, [home])

    def _send_home(self, layer: int, micro_batch: int, after: int) -> int:
        """Backward waits for the copies: they are queued on the stream that it computes on."""
        hosted = sum(n for s, n in self.shares[layer] if self._goes_home(s))
        elements = self.workload.layers[layer].params
        if not elements:
            return after
        if self.options.blocking_gradients and self.workload.stock_backward_extra_s is not None:
            return self._measured_path(layer, after)
        send = self._three_crossings if self.options.blocking_gradients else self._one_crossing
        home = send(layer, elements, hosted, micro_batch, after)
        return self.out.add(OpKind.GRADIENT_PASS, Lane.COMPUTE, 0.0, after=[home], layer=layer)

    def _goes_home(self, subgroup: int) -> bool:
        """Interleaved builds leave the gradients of visiting subgroups on the device."""
        return subgroup >= self.resident and not self._waits_on_device(subgroup)

    def _waits_on_device(self, subgroup: int) -> bool:
        return not self.options.blocking_gradients and subgroup in self.visits

    def gradient_alloc_bytes(self, layer: int, micro_batch: int) -> int:
        if micro_batch > 0:
            return 0
        waits = sum(n for s, n in self.shares[layer] if self._waits_on_device(s))
        return waits * self.workload.grad_bytes_per_param

    def _measured_path(self, layer: int, after: int) -> int:
        """The layer's share of what was measured: the device waits."""
        w = self.workload
        part = w.layers[layer].params / (w.params * w.gradient_accumulation_steps)
        elements = w.layers[layer].params
        return self.out.add(
            OpKind.GRADIENT_PASS, Lane.COMPUTE, (w.stock_backward_extra_s or 0.0) * part,
            after=[after], dram_bytes=elements * (2 * w.grad_bytes_per_param + FP32_BYTES),
            layer=layer,
        )  # fmt: skip

    def _three_crossings(
        self, layer: int, elements: int, hosted: int, micro_batch: int, after: int
    ) -> int:
        """To the buffer, back to be widened (or, later, to be added to), and home again."""
        size = elements * self.workload.grad_bytes_per_param
        first, then = OpKind.GRADIENT_D2H, OpKind.GRADIENT_H2D
        if micro_batch:
            first, then = then, first
        moved = self._move(then, size, layer, self._move(first, size, layer, after))
        if micro_batch == self.boundary and hosted:
            moved = self._move(OpKind.GRADIENT_D2H, hosted * FP32_BYTES, layer, moved)
        return moved

    def _one_crossing(
        self, layer: int, elements: int, hosted: int, micro_batch: int, after: int
    ) -> int:
        """Accumulated in the buffer until the last micro-batch, which sends fp32."""
        size = elements * self.workload.grad_bytes_per_param
        moved = after
        if micro_batch > 0:
            moved = self._move(OpKind.GRADIENT_H2D, size, layer, moved)
        if micro_batch < self.boundary:
            return self._move(OpKind.GRADIENT_D2H, size, layer, moved)
        if hosted:
            moved = self._move(OpKind.GRADIENT_D2H, hosted * FP32_BYTES, layer, moved)
        return moved

    def _move(self, kind: OpKind, size_bytes: float, layer: int, after: int) -> int:
        direction = "d2h" if kind == OpKind.GRADIENT_D2H else "h2d"
        pageable = self.options.pageable_gradients
        rate = f"pageable_{direction}_bytes_per_s" if pageable else f"{direction}_bytes_per_s"
        return self.out.add(
            kind, Lane.D2H if direction == "d2h" else Lane.H2D, size_bytes, rate,  # type: ignore[arg-type]
            [after], dram_bytes=size_bytes * (PAGEABLE_PASSES if pageable else 1), layer=layer,
        )  # fmt: skip

    # -- step --------------------------------------------------------------------------------

    def step(self) -> None:
        """Norm, then subgroup by subgroup; `step()` returns when all is done."""
        waits = [*self.gradients_done, *self.gradients_home.values(), *self.updated.values()]
        norm = self.out.add(OpKind.NORM, Lane.COMPUTE, 0.0, after=waits)
        ends: list[int] = []
        for subgroup in range(len(self.sizes)):
            sequential = self.options.updates != "interleaved" and bool(ends)
            ends.append(self._update(subgroup, ends[-1] if sequential else norm))
        waits = [norm, *ends, *self.written_back[len(self.written_back) - len(self.visits) :]]
        self.step_end = self.out.add(OpKind.STEP_END, Lane.COMPUTE, 0.0, after=waits)
        self.updated, self.gradients_home = {}, {}

    def _update(self, subgroup: int, after: int) -> int:
        if subgroup < self.resident:
            return self._update_device(subgroup, [after])
        if subgroup in self.visits:
            return self._visit(subgroup, after)
        done = self.updated.get(subgroup)
        if done is None:
            done = self._update_host(subgroup, [after])
        return self._parameters_home(subgroup, [after, done])

    def _update_host(self, subgroup: int, waits: Sequence[int]) -> int:
        """Unscale (clip or not), Adam and downcast: the machine's rate is that of all three."""
        size = self.sizes[subgroup]
        return self.out.add(
            OpKind.UPDATE_HOST, Lane.HOST, size, "stock_host_adam_params_per_s", waits,
            dram_bytes=size * STOCK_UPDATE_BYTES, cores=ALL_CORES, subgroup=subgroup,
        )  # fmt: skip

    def _result_copied(self, subgroup: int, waits: Sequence[int]) -> list[int]:
        """New masters that come back from another process are copied once more."""
        size = self.sizes[subgroup] * FP32_BYTES
        copied = self.out.add(
            OpKind.PARAMETER_CAST, Lane.HOST, size, "host_copy_bytes_per_s", waits,
            dram_bytes=2 * size, cores=ALL_CORES, subgroup=subgroup,
        )  # fmt: skip
        return [copied]

    def _parameters_home(self, subgroup: int, waits: Sequence[int]) -> int:
        size = self.sizes[subgroup] * self.workload.wire_bytes
        if self.options.result_copy:
            waits = self._result_copied(subgroup, waits)
        pageable = self.options.pageable_parameters
        return self.out.add(
            OpKind.PARAMETER_H2D, Lane.H2D_PARAMETERS, size,
            "pageable_h2d_bytes_per_s" if pageable else "h2d_bytes_per_s", waits,
            dram_bytes=size * (PAGEABLE_PASSES if pageable else 1), subgroup=subgroup,
        )  # fmt: skip

    def _update_device(self, subgroup: int, waits: Sequence[int], gradient_bytes: int = 0) -> int:
        """``gradient_bytes`` waited on the device until now."""
        return self.out.add(
            OpKind.UPDATE_DEVICE, Lane.DEVICE_UPDATE, self.sizes[subgroup],
            "device_adam_params_per_s", waits, device_share=1.0,
            device_free_bytes=gradient_bytes, subgroup=subgroup,
        )  # fmt: skip

    def _visit(self, subgroup: int, after: int) -> int:
        """State comes in once a slot is free, with the fp32 gradient if that is on the host."""
        waits = [after]
        if len(self.written_back) >= self.slots:
            waits.append(self.written_back[-self.slots])
        size, stays = self.sizes[subgroup], self._waits_on_device(subgroup)
        moved = size * (STATE_BYTES_PER_PARAM if stays else DEVICE_BYTES_PER_PARAM)
        arrived = self.out.add(
            OpKind.STATE_H2D, Lane.H2D, moved, "h2d_bytes_per_s", waits,
            dram_bytes=moved, subgroup=subgroup,
        )  # fmt: skip
        gradient = size * self.workload.grad_bytes_per_param if stays else 0
        update = self._update_device(subgroup, [arrived], gradient)
        back = self.out.add(
            OpKind.STATE_D2H, Lane.D2H, size * STATE_BYTES_PER_PARAM, "d2h_bytes_per_s", [update],
            dram_bytes=size * STATE_BYTES_PER_PARAM, subgroup=subgroup,
        )  # fmt: skip
        self.written_back.append(back)
        return update


class DeviceLoop(TrainingLoop):
    """No offload: all optimizer state in device memory."""

    def gradient_alloc_bytes(self, layer: int, micro_batch: int) -> int:
        """Reduced gradients stay on the device until the step."""
        if micro_batch > 0:
            return 0
        return self.workload.layers[layer].params * self.workload.grad_bytes_per_param

    def gradients(self, layer: int, micro_batch: int, after: int) -> None:
        """They are home already."""

    def step(self) -> None:
        """Subgroup by subgroup on the device, each with a widened gradient of its own."""
        norm = self.out.add(OpKind.NORM, Lane.COMPUTE, 0.0, after=self.gradients_done)
        ends = [norm]
        for subgroup, size in enumerate(self.sizes):
            widened = size * FP32_BYTES
            ends.append(
                self.out.add(
                    OpKind.UPDATE_DEVICE, Lane.DEVICE_UPDATE, size, "device_adam_params_per_s",
                    [norm], device_share=1.0, device_alloc_bytes=widened,
                    device_free_bytes=widened + size * self.workload.grad_bytes_per_param,
                    subgroup=subgroup,
                )
            )  # fmt: skip
        self.step_end = self.out.add(OpKind.STEP_END, Lane.COMPUTE, 0.0, after=ends)

    def schedule(self, iterations: int) -> Schedule:
        """What was appended so far, with the memory that is in use throughout."""
        w = self.workload
        return Schedule(
            ops=tuple(self.out.ops),
            iterations=iterations,
            ranks_per_node=w.ranks_per_node,
            strategy="no_offload",
            device_base_bytes=w.device_base_bytes + w.params * STATE_BYTES_PER_PARAM,
        )
