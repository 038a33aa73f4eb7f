"""The builder of schedules for ZeRO-3 with parameters or activations in host memory, or optimizer state on NVMe.

These are DeepSpeed's ``offload_param``, ``activation_checkpointing.cpu_checkpointing``, and
``offload_optimizer.device: nvme`` (Rajbhandari et al., ZeRO-Infinity, SC 2021). They are simulated here for
training without a plan. A plan has its own settings for parameters in host memory (`plan.ways`) and for
state on storage (placement ``stored``). Offloaded activations work under a plan with identical results
(tests/runtime/contract/test_activation_offload.py), but the times of such training are not predicted.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from ebbtide.simulator.optimizer import FP32_BYTES
from ebbtide.simulator.rules import RuleError
from ebbtide.simulator.schedule import Kind, Lane, OpKind, Schedule
from ebbtide.simulator.schedules.footprint import fetched_for, moved_out
from ebbtide.simulator.schedules.stock import (
    HOST_GRADIENT_BYTES,
    PAGEABLE_PASSES,
    OverflowCheck,
    StockLoop,
    StockOptions,
)
from ebbtide.simulator.workload import Workload

StateLocation = Literal["cpu", "nvme"]
Location = Literal["device", "cpu"]


@dataclass(frozen=True, slots=True)
class InfinityOptions:
    """The memories that hold optimizer state, parameters and activations between their uses, by DeepSpeed's config.

    Attributes:
        optimizer: Location of the optimizer state. With ``nvme`` its fp32 gradients are there too.
        parameters, activations: Location of these between their uses. With ``cpu`` they are copied to the GPU for
            a forward or backward. The last layer's activations (logits) are used immediately and stay on the GPU.
        pipelined: DeepSpeed's ``pipeline_read`` and ``pipeline_write``: while a subgroup is updated, the next
            one is read and the previous one is written.
        pinned: True if host memory of gradients and state is pinned.
        pinned_parameters: True if host memory of parameters is pinned. If False, training waits for each copy.
    """

    optimizer: StateLocation = "nvme"
    parameters: Location = "cpu"
    activations: Location = "device"
    pipelined: bool = False
    pinned: bool = True
    pinned_parameters: bool = True
    async_gradients: bool = True
    torch_adam: bool = False
    overflow_check: OverflowCheck = "host_fp16"

    def __post_init__(self) -> None:
        if self.pipelined and self.optimizer != "nvme":
            raise RuleError(
                "pipelined must be False if optimizer is not 'nvme', but got True with "
                f"optimizer={self.optimizer!r}. With pipelined, updates overlap with reads and writes of a drive "
                "(DeepSpeed's pipeline_read and pipeline_write)",
                key="options.pipelined",
            )


class InfinityLoop(StockLoop):
    """The simulated training loop of ZeRO-3 offload with copies of parameters and activations to and from the host.

    The simulation assumes that copies for a forward or backward start during the previous forward or backward.
    DeepSpeed's prefetcher may start them later.
    """

    def __init__(self, workload: Workload, options: InfinityOptions) -> None:
        stock = StockOptions(
            pinned=options.pinned,
            async_gradients=options.async_gradients,
            torch_adam=options.torch_adam,
            overflow_check=options.overflow_check,
        )
        super().__init__(workload, stock)
        self.where = options
        self.writes: list[int] = []  # writes of state in the latest step
        self.stored: dict[int, int] = {}  # layer -> op that copied its activations out of GPU memory
        self.ranks = workload.ranks_per_node * workload.nodes

    def schedule(self, iterations: int, name: str) -> Schedule:
        made, w, where = super().schedule(iterations, name), self.workload, self.where
        host, storage = dict(made.held["host"]), dict[Kind, int]()
        if where.parameters == "cpu":
            host["parameters"] = w.params * w.wire_bytes
        if where.optimizer == "nvme":
            sets = min(len(self.sizes), 2 if where.pipelined else 1)
            host["staging"] = sets * max(self.sizes) * (self.state_bytes + FP32_BYTES)
            # The partition buffer of gradients stays in host memory, and fp32 gradients go to storage.
            storage = {"state": host.pop("state"), "gradients": w.params * FP32_BYTES}
            host["gradients"] -= w.params * (HOST_GRADIENT_BYTES - FP32_BYTES)
        return replace(made, held={**made.held, "host": host, "storage": storage})

    @property
    def gone_bytes(self) -> int:
        w = self.workload
        if self.where.parameters == "device":
            return 0
        return moved_out(w, [layer.params for layer in w.layers]) * w.wire_bytes

    # -- passes ------------------------------------------------------------------------------

    def before_pass(self, layer: int, waits: list[int], *, backward: bool = False) -> list[int]:
        blocks = not self.where.pinned_parameters or (backward and self.ranks > 1 and self.where.parameters == "cpu")
        ahead = self.passes[-1:] if blocks else self.passes[-2:-1]
        of = self.workload.layers[layer]
        fetched = fetched_for(of, of.params, self.micro_step, backward=backward)
        if self.where.parameters == "cpu" and fetched:
            size = fetched * self.workload.wire_bytes
            waits = [self._come_in(OpKind.PARAMETER_FETCH, size, layer, [*waits, *ahead])]
        waits = super().before_pass(layer, waits, backward=backward)
        if backward and of.unhidden_s and self.where.parameters == "cpu":
            waits = [*waits, self.out.add(OpKind.GRADIENT_PASS, Lane.COMPUTE, of.unhidden_s, after=waits, layer=layer)]
        if backward and layer in self.stored:
            size = self.workload.layers[layer].activation_bytes
            behind = [self.stored.pop(layer), *ahead]
            return [*waits, self._come_in(OpKind.ACTIVATION_H2D, size, layer, behind)]
        return waits

    def after_forward(self, layer: int, op: int) -> None:
        size = self.workload.layers[layer].activation_bytes
        last = layer == len(self.workload.layers) - 1
        if self.where.activations == "device" or last or not size:
            return
        self.stored[layer] = self.out.add(
            OpKind.ACTIVATION_D2H,
            Lane.D2H,
            size,
            "d2h_bytes_per_s",
            [op],
            dram_bytes=size,
            device_free_bytes=size,
            host_alloc_bytes=size,
            layer=layer,
        )

    def _come_in(self, kind: OpKind, size_bytes: int, layer: int, after: list[int]) -> int:
        activations = size_bytes if kind == OpKind.ACTIVATION_H2D else 0
        pageable = kind == OpKind.PARAMETER_FETCH and not self.where.pinned_parameters
        return self.out.add(
            kind,
            Lane.H2D_PARAMETERS,
            size_bytes,
            "pageable_h2d_bytes_per_s" if pageable else "h2d_bytes_per_s",
            after,
            dram_bytes=size_bytes * (PAGEABLE_PASSES if pageable else 1),
            device_alloc_bytes=activations,
            host_free_bytes=activations,
            layer=layer,
        )

    # -- gradients and step ------------------------------------------------------------------

    def gradients(self, layer: int, micro_step: int, after: int) -> None:
        super().gradients(layer, micro_step, after)
        size = self.workload.layers[layer].params * FP32_BYTES
        if self.where.optimizer == "nvme" and micro_step == self.boundary and size:
            on_host = self.gradients_on_host[layer]  # the norm waits for the ops in this dict
            self.gradients_on_host[layer] = self._write(size, on_host, layer=layer)

    def _update(self, subgroup: int, after: int) -> int:
        if self.where.optimizer == "cpu":
            return super()._update(subgroup, after)
        # Without pipelining, reads, updates and writes follow one after the other. With pipelining, two sets of buffers
        # alternate, and each read follows the previous one. The first read waits for the norm.
        waits = [after, *self.writes[-1:]]
        if self.where.pipelined and self.writes:
            waits = self.writes[-2:-1]
        size = self.sizes[subgroup]
        read_bytes = size * (self.state_bytes + FP32_BYTES)
        read = self.out.add(
            OpKind.STATE_READ,
            Lane.STORAGE_READ,
            read_bytes,
            "storage_read_bytes_per_s",
            waits,
            dram_bytes=read_bytes,
            subgroup=subgroup,
        )
        updated = self._update_host(subgroup, [read, after])
        self.writes.append(self._write(size * self.state_bytes, updated, subgroup=subgroup))
        return self._parameters_to_device(subgroup, [after, updated])

    def _parameters_to_device(self, subgroup: int, waits: list[int]) -> int:  # type: ignore[override]
        if self.where.parameters == "cpu":
            return waits[-1]
        return super()._parameters_to_device(subgroup, waits)

    def step_ends(self, waits: list[int], pieces: Iterable[tuple[float, list[int]]] | None = None) -> None:
        super().step_ends([*waits, *self.writes], pieces)
        self.writes = []

    def _write(self, size_bytes: int, after: int, *, layer: int = -1, subgroup: int = -1) -> int:
        return self.out.add(
            OpKind.STATE_WRITE,
            Lane.STORAGE,
            size_bytes,
            "storage_write_bytes_per_s",
            [after],
            dram_bytes=size_bytes,
            layer=layer,
            subgroup=subgroup,
        )
