"""The interface of a training framework's optimizer, with which ebbtide runs a plan for the framework."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from ebbtide.runtime.devices.base import Device
from ebbtide.runtime.execution.gradients import GradientBuffers, GradientOps, ParameterSlice
from ebbtide.runtime.execution.subgroup_state import Buffers, SubgroupState
from ebbtide.runtime.kernels.rule import UpdateRule
from ebbtide.runtime.kernels.step import UpdateStep
from ebbtide.simulator.plan import ParameterLocation
from ebbtide.simulator.schedules.gathers import Gathered
from ebbtide.simulator.workload import WireDtype, ZeroStage


class TrainingEngine(Protocol):
    """The interface that ebbtide needs of a training framework's optimizer to run a plan.

    Every call comes from the training thread. The framework keeps its own references to the optimizer state, for
    checkpoints and for other code that reads the state. `adopt` gives the framework the new tensors of a subgroup.

    Attributes:
        shares_state: True if the framework keeps its own buffers of optimizer state under a plan. In this case, the old
            state buffers of a subgroup that moves to other memory are not released.
    """

    shares_state: bool

    @property
    def overlaps_forward(self) -> bool:
        """Return whether code that reads parameters can be made to wait, so that a step need not wait itself."""
        ...

    def sizes(self) -> tuple[int, ...]:
        """Return the number of elements of each subgroup on this rank, in the order of subgroups."""
        ...

    def wire_dtype(self) -> WireDtype:
        """Return the precision of the model's computation: bf16, fp16 or fp32."""
        ...

    def parameter_location(self) -> ParameterLocation:
        """Return the memory (host or device) where the training framework itself keeps partitions of parameters."""
        ...

    def gathers(self) -> Gathered | None:
        """Return how often forward and backward of one micro-batch gather each partitioned parameter."""
        ...

    def zero_stage(self) -> ZeroStage:
        """Return the ZeRO stage, which tells how much of the training state is divided among the ranks."""
        ...

    def first_use(self) -> list[int]:
        """Return one number per subgroup. They order subgroups by the first use of their parameters in forward."""
        ...

    def update_rule(self) -> UpdateRule:
        """Return the update rule that computes what the optimizer of the framework computes, with identical bits."""
        ...

    def slices(self) -> Mapping[int, ParameterSlice]:
        """Return the parts of parameters that lie in this rank's subgroups, as a dict."""
        ...

    def units(self) -> Mapping[tuple[int, int], str]:
        """Return for each parameter the name of the submodule that contains it, such as ``model.layers.0``."""
        ...

    def gradient_buffers(
        self, device: Device, states: list[SubgroupState], ops: GradientOps, complete: Callable[[int], None]
    ) -> GradientBuffers[Any]:
        """Build the object that collects the gradients of all parameters. Call once, before the first plan runs."""
        ...

    def prepare(self, device: Device) -> None:
        """Divide shared buffers before the first plan, so that none stays until the last of its subgroups moves."""
        ...

    def take(self, subgroup: int, now: SubgroupState | None) -> Buffers:
        """Return a subgroup's optimizer state, gradient and parameters, so that the session can move them."""
        ...

    def adopt(self, state: SubgroupState) -> None:
        """Make the framework refer to the tensors that now hold a subgroup's state, gradient and parameters."""
        ...

    def settle(self) -> None:
        """Release the training framework's buffers that no subgroup uses any more."""
        ...

    def hyperparameters(self) -> list[UpdateStep]:
        """Return the next step's hyperparameters by subgroup, and advance the optimizer's step counters."""
        ...

    def expected_step(self) -> tuple[list[UpdateStep], float]:
        """Return the next step's optimizer hyperparameters and gradient scale, without advancing step counters."""
        ...

    def unclipped_scale(self) -> float:
        """Return the factor that unscales gradients in a step that neither clips nor overflows."""
        ...

    def early_updates_allowed(self) -> bool:
        """Return whether updates may start before the gradient norm is known."""
        ...

    def publish(self) -> None:
        """Wait for the latest step's updates, and make the framework's own tensors show the new optimizer state."""
        ...

    def saved_state(self, subgroup: int) -> tuple[torch.Tensor, ...]:
        """Return the tensors with a subgroup's master parameters and moments, for a checkpoint to read."""
        ...

    def gradient_bytes(self) -> int:
        """Return the number of bytes that an accumulated gradient takes per parameter."""
        ...

    def bucket_params(self) -> int:
        """Return the number of gradient elements that the framework collects before it hands them over together."""
        ...

    def micro_batches(self) -> int:
        """Return the number of micro-batches per optimizer step."""
        ...

    def recomputes(self) -> bool | None:
        """Return whether backward computes activations again. None if the model does not tell."""
        ...

    def clips(self) -> bool:
        """Return whether training clips gradients to a maximum norm."""
        ...

    def any_rank(self, flag: bool) -> bool:
        """Return True on every rank if ``flag`` is True on any rank. This is a collective call."""
        ...
