"""The tensors of each subgroup, and their movement to the memory that a plan names."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from ebbtide.runtime.devices.base import Device
from ebbtide.runtime.storage.store import ExtentStore
from ebbtide.simulator.plan import ParameterLocation, Placement
from ebbtide.simulator.update.holding import slot_elements
from ebbtide.simulator.update.recipes import RECIPES
from ebbtide.simulator.update.steps import Queue

logger = logging.getLogger("ebbtide")


@dataclass(slots=True)
class SubgroupState:
    """The optimizer state, gradient and parameters of one subgroup on this rank.

    From the start of a step's updates to the end of this subgroup's last operation, only the thread that
    updates the subgroup may use ``state``. Other threads read or write these tensors only outside of that time.

    Attributes:
        state: The fp32 master parameters and the optimizer's moments: in GPU memory if the plan keeps them there,
            otherwise in host memory. For state on a drive, memory-mapped tensors that show the state written last.
        wire: This rank's partition of the parameters in the precision of the model: the framework's own buffer,
            or a buffer in the memory that the plan names.
        gradient: The gradient in accumulation precision, in the memory where the update reads it.
        parameter_location: Memory that ``wire`` is in: host or device.
        sum: GPU memory in which gradients of micro-batches are summed. The last sum is copied to ``gradient``.
            None if gradients are summed in ``gradient``.
    """

    index: int
    placement: Placement
    state: tuple[torch.Tensor, ...]
    wire: torch.Tensor
    gradient: torch.Tensor
    parameter_location: ParameterLocation
    sum: torch.Tensor | None = None

    @property
    def elements(self) -> int:
        return self.state[0].numel()

    @property
    def p(self) -> torch.Tensor:
        """Return a subgroup's fp32 master parameters."""
        return self.state[0]

    @property
    def moments(self) -> tuple[torch.Tensor, ...]:
        return self.state[1:]


@dataclass(frozen=True, slots=True)
class Buffers:
    """The tensors of one subgroup, in host or GPU memory: state, gradient and parameters.

    The state is fp32, the gradient has the accumulation precision, and the parameters have the precision in
    which the model computes.
    """

    state: tuple[torch.Tensor, ...]
    gradient: torch.Tensor
    wire: torch.Tensor
    parameter_location: ParameterLocation = "device"
    movable: bool = True  # False if the framework keeps the parameters, so that ``wire`` never moves


@dataclass(slots=True)
class StagingSlot:
    """A buffer for the optimizer state of one subgroup at a time, which the subgroups of a plan use in turn.

    It is in GPU memory for a staged update, or in host memory for state on a drive.
    """

    # One fp32 tensor for each tensor of the state, as long as that of the largest subgroup.
    parts: tuple[torch.Tensor, ...]
    wire: torch.Tensor | None = None  # new parameters of early staged updates

    def views(self, elements: int) -> tuple[torch.Tensor, ...]:
        """Return views of a staging buffer for the master and moments of a subgroup with ``elements`` elements."""
        return tuple(part[:elements] for part in self.parts)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (*self.parts, self.wire) if part is not None)


def place(
    device: Device,
    index: int,
    placement: Placement,
    location: ParameterLocation,
    before: Buffers,
    *,
    apart: bool = False,
    store: ExtentStore | None = None,
) -> SubgroupState:
    """Move a subgroup's tensors to the memory that a plan names. Tensors that are already there stay.

    If a subgroup's state should be in GPU memory or be staged there, but GPU memory is too full, the subgroup
    is updated on the CPU instead, with a warning. The GPU may be fuller than when the plan was made. Parameters
    that do not fit into GPU memory stay in host memory.

    Args:
        location: Memory for the subgroup's parameters: host or device.
        apart: If True, parameters that stay are copied out of a buffer that they share with other subgroups.
        store: Store on drives for the subgroup's state. None if the state is not on drives, or is in the store already.
    """
    state, gradient = before.state, before.gradient
    recipe = RECIPES[placement]
    if recipe.queue is Queue.DEVICE and not device.unified:
        moved = _to_device(device, placement, state, gradient)
        if moved is None:
            _warn_fallback(index, placement)
            placement = "host"
        else:
            state, gradient = moved
    if recipe.state == "storage":
        state = state if store is None else store.adopt(index, state)
    elif placement != "resident" or device.unified:
        state = tuple(device.host_adopt(tensor) for tensor in state)
    if RECIPES[placement].gradient == "host":
        gradient = device.host_adopt(gradient)
    location, wire = place_parameters(device, index, location, before, apart=apart)
    return SubgroupState(index, placement, state, wire, gradient, location)


def place_parameters(
    device: Device, index: int, location: ParameterLocation, before: Buffers, *, apart: bool = False
) -> tuple[ParameterLocation, torch.Tensor]:
    """Move a subgroup's parameters to the memory that a plan names. Return the memory where the parameters then are,
    and the parameters themselves.

    If the parameters do not fit into GPU memory, they stay in host memory.

    Args:
        apart: If True, parameters that are already in the named memory, but share a buffer with other subgroups, are
            copied to a tensor of their own.
    """
    wire = before.wire
    shared = wire.untyped_storage().nbytes() > wire.nbytes
    if device.unified:
        return location, wire
    if not before.movable:
        return before.parameter_location, wire
    if location == before.parameter_location and not (apart and shared):
        return location, device.host_adopt(wire) if location == "host" else wire
    if location == "host":
        return location, device.host_empty(wire.numel(), wire.dtype).copy_(wire)
    try:
        return location, device.device_empty(wire.numel(), wire.dtype).copy_(wire)
    except torch.OutOfMemoryError:
        logger.warning(
            "no GPU memory is left for the parameters of subgroup %d, so they stay in %s memory. "
            "If this repeats, plan again with a smaller --gpu-memory.",
            index,
            before.parameter_location,
        )
        return before.parameter_location, wire


def _to_device(
    device: Device, placement: Placement, state: tuple[torch.Tensor, ...], gradient: torch.Tensor
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor] | None:
    try:
        on_device = device.device_empty(gradient.numel(), gradient.dtype)
        on_device.copy_(gradient)
        if placement == "resident":
            copies = []
            for tensor in state:
                copy = device.device_empty(tensor.numel(), tensor.dtype)
                copies.append(copy.copy_(tensor))
            state = tuple(copies)
    except torch.OutOfMemoryError:
        return None
    return state, on_device


def staging_slots(
    device: Device, count: int, staged: list[int], tensors: int, wire: torch.dtype | None = None
) -> list[StagingSlot]:
    """Allocate up to ``count`` staging buffers in GPU memory, or fewer if GPU memory is short.

    Each buffer has room for the optimizer state of the largest subgroup that is staged to the GPU.

    Args:
        wire: None if every staged update waits for the gradient norm. Otherwise the dtype of the model's parameters.
            Each buffer then also has room for new parameters, where an update that started early leaves them until the
            norm is known.
    """
    slots: list[StagingSlot] = []
    wanted = min(count, len(staged))
    each = slot_elements(max(staged, default=0))
    for _ in range(wanted):
        try:
            buffer = device.device_empty(tensors * each, torch.float32)
            new = None if wire is None else device.device_empty(each, wire)
        except torch.OutOfMemoryError:
            break
        slots.append(StagingSlot(buffer.view(tensors, each).unbind(), new))
    if len(slots) < wanted:
        logger.warning(
            "GPU memory suffices for only %d of the plan's %d staging buffers (plan.staging_slots). Training goes on, "
            "but may be slower than predicted. Make a plan that uses less GPU memory (tune plan --gpu-memory)",
            len(slots),
            wanted,
        )
    return slots


def place_sums(device: Device, states: Sequence[SubgroupState]) -> int:
    """Allocate GPU memory for gradient sums over micro-batches, one subgroup after the other, until GPU memory is full.

    Return the number of subgroups that received memory.
    """
    for done, state in enumerate(states):
        try:
            made = device.device_empty(state.elements, state.gradient.dtype)
        except torch.OutOfMemoryError:
            logger.warning(
                "there is GPU memory for only %d of the plan's %d gradient sums (plan.ways: sum_on_device). "
                "The other gradients are accumulated in host memory",
                done,
                len(states),
            )
            return done
        state.sum = made.zero_()
    return len(states)


def _warn_fallback(index: int, placement: Placement) -> None:
    logger.warning(
        "subgroup %d was planned as %r, but no GPU memory is left for it, so the CPU updates it. "
        "If this repeats, plan again with a smaller --gpu-memory.",
        index,
        placement,
    )
