"""The place of each subgroup's optimizer state."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from ebbtide.runtime.devices.base import Device
from ebbtide.simulator.plan import ParameterLocation, Placement
from ebbtide.simulator.update.footprint import slot_elements
from ebbtide.simulator.update.recipes import RECIPES, Queue

logger = logging.getLogger("ebbtide")


@dataclass(slots=True)
class SubgroupState:
    """One subgroup's state.

    The lane that updates the subgroup owns ``state`` from the step's launch until the
    completion of its last op; everybody else reads or writes them only outside of that.

    Attributes:
        state: fp32 master and the rule's moments: host memory, device memory if resident; of what
            is stored a view, which shows what was written last.
        wire: this rank's partition of the parameters as the model computes with them: the
            framework's own buffer, or one in the memory that the plan wants it in.
        gradient: in accumulation precision; where the placement's recipe has it.
        parameter_location: the memory that ``wire`` is in.
        sum: device memory in which micro-batches are added up, the last of which goes to
            ``gradient``; None: they are added up in ``gradient``.
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
        """Return the master."""
        return self.state[0]

    @property
    def moments(self) -> tuple[torch.Tensor, ...]:
        return self.state[1:]


@dataclass(frozen=True, slots=True)
class Buffers:
    """One subgroup's tensors wherever they are: state in fp32, the gradient in the precision in
    which it accumulates, the parameters as the model computes with them and the memory they are in.
    """

    state: tuple[torch.Tensor, ...]
    gradient: torch.Tensor
    wire: torch.Tensor
    parameter_location: ParameterLocation = "device"
    movable: bool = True  # else ``wire`` stays as it is: the framework keeps the parameters


@dataclass(slots=True)
class StagingSlot:
    """A buffer that holds one visiting subgroup, of the device, or one stored subgroup, of the
    host; reused in turn.
    """

    parts: tuple[torch.Tensor, ...]  # one for each of the state, as long as the largest one's, fp32
    wire: torch.Tensor | None = None  # where visits are guessed, for new parameters

    def views(self, elements: int) -> tuple[torch.Tensor, ...]:
        """Return the tensors for the master and the moments of a subgroup of this size."""
        return tuple(part[:elements] for part in self.parts)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (*self.parts, self.wire) if part is not None)


class StateStore(Protocol):
    """A store of the stored subgroups' state. Any thread may call; for one subgroup, one at a time."""

    def adopt(self, subgroup: int, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Write a subgroup's first state; return tensors that show it, whatever is written."""
        ...

    def read(self, subgroup: int, into: Sequence[torch.Tensor]) -> None:
        """Block until the state is there."""
        ...

    def check_restored(self, subgroups: Collection[int] | None = None) -> None:
        """Verify restored state that was never read, before it is read."""
        ...

    def tick(self) -> int:
        """Return the version of the update that is launched now, which writes every subgroup."""
        ...

    def write(self, subgroup: int, source: Sequence[torch.Tensor], version: int | None = None) -> None:
        """Write new state without touching the last one's, and show it from then on. Blocks.

        Args:
            version: None: of this subgroup alone.
        """
        ...

    def take_adopted(self) -> set[int]:
        """Return the subgroups that a load has just adopted in place."""
        ...


def place(
    device: Device,
    index: int,
    placement: Placement,
    location: ParameterLocation,
    before: Buffers,
    *,
    apart: bool = False,
    store: StateStore | None = None,
) -> SubgroupState:
    """Move a subgroup's tensors to where the plan wants them; those that can stay do.

    A ``resident`` or ``device`` subgroup for which the device has no memory left becomes ``host``,
    with a warning: the device may be fuller than it was when the plan was made. Parameters that it
    has no memory for stay in host memory.

    Args:
        home: of the parameters.
        apart: parameters that stay where they are leave a buffer that they share with others.
        store: for state that lives on storage; None: no such state, or it is there already.
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
    location, wire = _parameters(device, index, location, before, apart)
    return SubgroupState(index, placement, state, wire, gradient, location)


def _parameters(
    device: Device, index: int, location: ParameterLocation, before: Buffers, apart: bool
) -> tuple[ParameterLocation, torch.Tensor]:
    """Return the parameters' new location, and the tensor that holds them."""
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
    """Up to ``count`` slots, each for the ``tensors`` of the largest of the visiting subgroups
    (elements); fewer if device memory is short.

    Args:
        wire: of new parameters that wait for the norm there; None: none do.
    """
    slots: list[StagingSlot] = []
    wanted = min(count, len(staged))
    for _ in range(wanted):
        try:
            slots.append(staging_slot(device, staged, tensors, wire))
        except torch.OutOfMemoryError:
            break
    if len(slots) < wanted:
        logger.warning(
            "there is GPU memory for only %d of the plan's %d staging buffers (plan.staging_slots)", len(slots), wanted
        )
    return slots


def staging_slot(device: Device, staged: list[int], tensors: int, wire: torch.dtype | None) -> StagingSlot:
    """One of `staging_slots`.

    Raises:
        torch.OutOfMemoryError: there is no memory for it.
    """
    each = slot_elements(max(staged))
    buffer = device.device_empty(tensors * each, torch.float32)
    new = None if wire is None else device.device_empty(each, wire)
    return StagingSlot(buffer.view(tensors, each).unbind(), new)


def place_sums(device: Device, states: Sequence[SubgroupState]) -> int:
    """Give these subgroups memory of the device for their sums of micro-batches, one after the
    other as far as there is some; returns how many have it.
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
