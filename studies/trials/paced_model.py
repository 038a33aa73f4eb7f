"""A model with layers of given durations, and the setting of its training."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from ebbtide.simulator import Layer, Machine, Quantity, Workload
from ebbtide.simulator.machine import OUT_OF_PLACE
from ebbtide.simulator.optimizer import ADAM
from ebbtide.simulator.workload import ZeroStage
from torch import nn

from studies.bench.products import product
from studies.trials.paced_device import EmulatedRates

RATES = ("host_adam_params_per_s", "device_adam_params_per_s", "h2d_bytes_per_s", "d2h_bytes_per_s")
ROWS = 4  # samples per batch: few, so that real computation is short compared with the given times


@dataclass(frozen=True)
class PacedTraining:
    """The settings of training on an emulated device: the model's size, and all given durations and speeds.

    With the defaults, forward is shorter than the update of all state on the host, and shorter than the copies of all
    state to the device and back. If the state is divided in the best way between host and device updates, the updates
    take about as long as forward.

    Attributes:
        memory_share: Device memory that parameters and gradients leave free, divided by the size of all optimizer
            state.
        host_adam_out_of_place: Speed of an update that writes to other buffers, divided by the speed of an update in
            place.
        layers_per_subgroup: Number of layers in one subgroup of optimizer state. It must divide ``layers``.
        micro_batches: Number of gradient accumulation steps.
    """

    layers: int = 16
    hidden: int = 1024
    forward_s: float = 0.05
    backward_s: float = 0.1
    host_adam_params_per_s: float = 10e6
    device_adam_params_per_s: float = 120e6
    h2d_bytes_per_s: float = 130e6
    d2h_bytes_per_s: float = 130e6
    memory_share: float = 0.3
    duplex_factor: float = 1.0
    host_adam_out_of_place: float = OUT_OF_PLACE
    layers_per_subgroup: int = 1
    micro_batches: int = 1
    zero_stage: ZeroStage = 3

    def scaled(self, factor: float) -> "PacedTraining":
        """Return settings of an emulated training with all durations (of layers, copies and updates) multiplied by
        ``factor``.

        If the model's size is not the default, the speeds of copies and updates are changed in proportion to the size.
        So the time to copy or update the whole model does not depend on the model's size.
        """
        quicker = self.params / (PacedTraining.layers * PacedTraining.hidden**2) / factor
        return replace(
            self,
            forward_s=self.forward_s * factor,
            backward_s=self.backward_s * factor,
            **{name: getattr(self, name) * quicker for name in RATES},
        )

    @property
    def weight(self) -> int:
        """Return the number of elements in the weight of one linear layer of the trained model."""
        return self.hidden**2

    @property
    def subgroup(self) -> int:
        """Return the number of elements in one subgroup of optimizer state."""
        return self.layers_per_subgroup * self.weight

    @property
    def subgroups(self) -> int:
        return self.layers // self.layers_per_subgroup

    @property
    def params(self) -> int:
        return self.layers * self.weight

    @property
    def given_s(self) -> tuple[float, float]:
        """Return the seconds of forward and the seconds of backward in the emulated training, each for all layers and
        one micro-batch.
        """
        return self.forward_s * self.layers, self.backward_s * self.layers

    def given_workload(self) -> Workload:
        """Return the workload with the given times of forward and backward, which no other process can change."""
        return self.workload(*(seconds * self.micro_batches for seconds in self.given_s))

    def machine(self) -> Machine:
        """Return a machine for the simulator with the same copy and update speeds as the emulated device.

        In the simulation, concurrent copies share the machine's link, and concurrent computations share its device.
        DRAM and CPU cores are so fast that they slow down no op.
        """
        given = {
            "h2d_bytes_per_s": self.h2d_bytes_per_s,
            "d2h_bytes_per_s": self.d2h_bytes_per_s,
            "host_adam_params_per_s": self.host_adam_params_per_s,
            "stock_host_adam_params_per_s": self.host_adam_params_per_s,
            "device_adam_params_per_s": self.device_adam_params_per_s,
            "duplex_factor": self.duplex_factor,
            "host_adam_out_of_place": self.host_adam_out_of_place,
            "dram_bytes_per_s": 1e13,
            "storage_write_bytes_per_s": 1e9,
        }
        always = 4 * self.params  # 16-bit parameters and, at most, all gradients
        spare = int(self.memory_share * ADAM.state_bytes * self.params)
        return Machine(
            name="emulated at given rates",
            device_kind="emulated",
            cpu_cores=1024,
            host_memory_bytes=2**36,
            device_memory_bytes=always + spare,
            **{name: Quantity.exact(rate, "emulated", "given") for name, rate in given.items()},
        )

    def rates(self) -> EmulatedRates:
        """Return the copy and update speeds of the emulated device, as an `EmulatedRates` object."""
        return EmulatedRates(
            self.h2d_bytes_per_s,
            self.d2h_bytes_per_s,
            self.device_adam_params_per_s,
            self.host_adam_params_per_s,
            self.host_adam_out_of_place,
            self.duplex_factor,
        )

    def workload(self, forward_s: float, backward_s: float) -> Workload:
        """Return the workload of the training on the emulated device, in the form that the simulator takes.

        Args:
            forward_s, backward_s: Seconds of all layers and micro-batches, measured while no updates run.
        """
        passes = self.layers * self.micro_batches
        layer = Layer(params=self.weight, forward_s=forward_s / passes, backward_s=backward_s / passes)
        return Workload(
            name="sleeping layers",
            layers=(layer,) * self.layers,
            subgroups=(self.subgroup,) * self.subgroups,
            subgroup_size=self.subgroup,
            zero_stage=self.zero_stage,
            gradient_accumulation_steps=self.micro_batches,
            reduce_bucket_params=self.weight,  # as in `start`
            tokens_per_iteration=ROWS * self.micro_batches,
            device_base_bytes=2 * self.params,
            provenance="emulated: layers of given duration, phases measured without updates",
        )


class _PacedLinear(torch.autograd.Function):
    """A matrix product that takes as long as the emulated device's settings say, in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, layer: "PacedLayer") -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer = layer
        with layer.compute(layer.forward_s):
            return product(x, weight.t())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight = ctx.saved_tensors
        with ctx.layer.compute(ctx.layer.backward_s):
            return product(grads[0], weight), product(grads[0].t(), x), None


class PacedLayer(nn.Module):
    """A linear layer with a residual connection. Its forward and its backward each take a given duration."""

    def __init__(self, hidden: int, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(hidden, hidden) * (0.1 * hidden**-0.5))
        self.forward_s, self.backward_s = forward_s, backward_s
        self.compute: Callable[[float], AbstractContextManager[None]] = lambda _: nullcontext()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = _PacedLinear.apply(x, self.weight, self)
        return x + torch.tanh(y)


class PacedModel(nn.Module):
    """A model for the emulated device, with layers that take given durations.

    ``forward(inputs, targets)`` takes tensors of shape (rows, hidden) and returns the mean squared error.
    """

    def __init__(self, setting: PacedTraining) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            PacedLayer(setting.hidden, setting.forward_s, setting.backward_s) for _ in range(setting.layers)
        )

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = inputs
        for block in self.blocks:
            x = block(x)
        return (x - targets).float().square().mean()
