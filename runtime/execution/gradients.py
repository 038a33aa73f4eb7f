"""The buffers in host or GPU memory to which gradients are copied for optimizer updates.

Each gradient is copied once, in its own dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Generic, Self, TypeVar

import torch
from ebbtide.runtime.devices.base import Device
from ebbtide.runtime.devices.lane import Completion
from ebbtide.runtime.execution.gradient_ops import GradientOps
from ebbtide.runtime.execution.subgroup_state import SubgroupState
from ebbtide.simulator.update.recipes import RECIPES


@dataclass(slots=True)
class ParameterSlice:
    """The part of a parameter that lies in a subgroup of this rank.

    Attributes:
        real: True if this rank's partition holds elements of the parameter and not only padding.
        touched: True if the last micro-batch of the optimizer step has produced a gradient.
        held: True if the sum of micro-batches' gradients is in GPU memory. The host has a copy, unless
            ``unsent`` is True.
        unsent: True if the sum on the GPU has grown since it was last copied to the host.
    """

    subgroup: int
    offset: int
    elements: int
    real: bool
    touched: bool = False
    held: bool = False
    unsent: bool = False


@dataclass(frozen=True, slots=True)
class Segment:
    """The elements ``start`` to ``end`` of a subgroup, with the gradient and the gradient scale for their update."""

    start: int
    end: int
    gradient: torch.Tensor
    scale: float


Piece = TypeVar("Piece", bound=ParameterSlice)


@dataclass
class GradientBuffers(Generic[Piece]):
    """The gradient buffers of all subgroups, which collect the reduced gradients of the parameters.

    Only the training thread calls the methods. ``ops`` runs the copies to host memory. A subgroup's update reads the
    gradient buffer after these copies have ended. The update ends before parameters can be gathered for the next
    backward, so that no gradient is overwritten before its use. If the subgroup has GPU memory for a gradient sum, the
    sum of micro-batches' gradients stays there until the last micro-batch. A subclass may also keep the gradients of
    earlier steps.
    """

    device: Device
    states: list[SubgroupState]
    slices: Mapping[int, Piece]  # keyed by parameter id
    ops: GradientOps
    # Called when all parameters of a subgroup have their gradient of the step's last micro-batch, and again if a
    # parameter gets another gradient.
    complete: Callable[[int], None] | None = None

    def __post_init__(self) -> None:
        self.by_subgroup: list[list[Piece]] = [[] for _ in self.states]
        for piece in self.slices.values():
            self.by_subgroup[piece.subgroup].append(piece)
        # Subgroup -> parameters that have no gradient of the last micro-batch yet.
        self._missing = self._awaited()
        on_host = [RECIPES[s.placement].gradient == "host" for s in self.states]
        self._crosses = [there and not self.device.unified for there in on_host]
        self._open = False  # True if a gradient has arrived since the last step
        self._later: list[int] | None = None  # subgroups to report as complete at the end of `together`

    # -- arriving ----------------------------------------------------------------------------

    @contextmanager
    def together(self) -> Iterator[None]:
        """Copy adjacent gradients as one, if they are accepted inside the ``with`` block.

        Subgroups whose gradient becomes complete are reported at the end of the block (`complete`).
        """
        self._later = []
        try:
            with self.ops.together():
                yield
            later = self._later
        finally:
            self._later = None
        for subgroup in later:
            self._completed(subgroup)

    def accept(self, piece: Piece, gradient: torch.Tensor, *, first: bool, boundary: bool) -> torch.Tensor:
        """Store this rank's part of a parameter's gradient, or add the part to the sum of earlier micro-batches.

        Return the sum in GPU memory, for the gradient norm.

        Args:
            gradient: Flat gradient in the accumulation dtype, on the GPU. It may be shorter than the
                parameter's part: the rest is padding and stays zero.
            first: True for the first micro-batch of an optimizer step, which replaces the sum. Others are added to it.
            boundary: True for the last micro-batch of an optimizer step.
        """
        total = self._take(piece, gradient, first=first, boundary=boundary)
        if boundary:
            self._reached(piece)
        return total

    def _take(
        self, piece: Piece, gradient: torch.Tensor, *, first: bool, boundary: bool, alone: bool = False
    ) -> torch.Tensor:
        self._open = True
        base = None if first else self._sum_so_far(piece, gradient.numel())
        if self.states[piece.subgroup].sum is not None:
            return self._hold(piece, gradient, base, boundary=boundary, alone=alone)
        buffer = self._host_buffer(piece, gradient.numel())
        return self._store(piece, buffer, gradient.view(buffer.shape), base)

    def _reached(self, piece: Piece) -> None:
        self._missing[piece.subgroup] -= not piece.touched
        piece.touched = True
        if not self._missing[piece.subgroup]:
            if self._later is None:
                self._completed(piece.subgroup)
            else:
                self._later.append(piece.subgroup)

    def _completed(self, subgroup: int) -> None:
        if self.complete is not None:
            self.complete(subgroup)

    def _awaited(self) -> list[int]:
        return [sum(p.real and not p.touched for p in pieces) for pieces in self.by_subgroup]

    def _store(
        self, piece: Piece, buffer: torch.Tensor, gradient: torch.Tensor, base: torch.Tensor | None
    ) -> torch.Tensor:
        if not self._crosses[piece.subgroup]:
            return buffer.copy_(gradient) if base is None else torch.add(base, gradient, out=buffer)
        if base is not None:
            gradient = self.ops.fetch_sum(piece.subgroup, piece.offset, base, gradient)
        self.ops.send(piece.subgroup, piece.offset, buffer, gradient, summed=base is not None)
        return gradient

    def _hold(
        self, piece: Piece, gradient: torch.Tensor, base: torch.Tensor | None, *, boundary: bool, alone: bool
    ) -> torch.Tensor:
        total = gradient
        if not (alone or (boundary and base is None)):
            total = self._sum_up(piece, gradient, base)
        elif not alone:
            piece.held = False  # the sum is copied to the host
        piece.unsent = piece.held and (alone or not boundary)
        if boundary:
            buffer = self._host_buffer(piece, gradient.numel())
            self.ops.send(piece.subgroup, piece.offset, buffer, total, summed=False)
        return total

    def _sum_up(self, piece: Piece, gradient: torch.Tensor, base: torch.Tensor | None) -> torch.Tensor:
        total = self._held(piece, gradient.numel())
        if not piece.unsent:  # the buffer may still be the source of a copy to the host
            self.device.training_waits(self.arrived(piece.subgroup))
        if base is None:
            total.copy_(gradient)
        elif piece.held:
            total.add_(gradient)
        else:
            total.copy_(self.ops.fetch_sum(piece.subgroup, piece.offset, base, gradient))
        piece.held = True
        return total

    def _held(self, piece: Piece, elements: int | None = None) -> torch.Tensor:
        held = self.states[piece.subgroup].sum
        assert held is not None
        return held.narrow(0, piece.offset, piece.elements if elements is None else elements)

    def _host_buffer(self, piece: Piece, elements: int | None = None) -> torch.Tensor:
        gradient = self.states[piece.subgroup].gradient
        return gradient.narrow(0, piece.offset, piece.elements if elements is None else elements)

    def _sum_so_far(self, piece: Piece, elements: int) -> torch.Tensor:
        return self._held(piece, elements) if piece.held else self._host_buffer(piece, elements)

    # -- another plan ------------------------------------------------------------------------

    def make_spares(self) -> None:
        """Allocate the additional gradient buffers that backward will need, so that backward allocates no memory
        itself.
        """

    def spare_bytes(self) -> int:
        """Return the bytes of host memory that gradients take in addition to one gradient buffer per subgroup."""
        return 0

    def moved(self, states: list[SubgroupState], ops: GradientOps) -> Self:
        """Return a copy of this object that uses a new plan's tensors and operations."""
        # No gradient is copied, because the caller has already moved the gradients to the new plan's tensors.
        moved = replace(self, states=states, ops=ops)
        moved._open = self._open
        return moved

    def close(self) -> None:
        """Release the GPU memory for sums of micro-batches' gradients, after gradient copies in progress have ended."""
        self.ops.wait()
        for piece in self.slices.values():
            if piece.unsent:  # the next micro-batch is added to it
                self._host_buffer(piece).copy_(self._held(piece))
            piece.held = piece.unsent = False
        for state in self.states:
            state.sum = None

    def before_reuse(self) -> None:
        """Wait until all gradients accepted so far are in host memory, before their GPU memory is overwritten."""
        self.ops.before_reuse()

    # -- stepping ----------------------------------------------------------------------------

    def arrived(self, subgroup: int) -> list[Completion]:
        return self.ops.arrived(subgroup)

    def close_window(self) -> None:
        """End the accumulation of an optimizer step's micro-batches. Call at each step, after its last gradient."""
        for piece in self.slices.values():
            piece.touched = False
        self._missing = self._awaited()
        self._open = False

    def check_closed(self) -> None:
        """Check that no gradient has arrived since `close_window` ended the accumulation of micro-batches.

        Raises:
            RuntimeError: A gradient has arrived since then.
        """
        if self._open:
            raise RuntimeError(
                "close_window() must be called after the last gradient of a step and before "
                "session.update(), but was not"
            )

    def stepped(self, scale: float | None) -> None:
        """Record the factor with which an optimizer step unscaled and clipped the gradients. None if the
        step is skipped.
        """

    def segments(self, subgroup: int, scale: float) -> list[Segment]:
        """Return the ranges of a subgroup's elements, each with the gradient and the gradient scale for its update."""
        state = self.states[subgroup]
        return [Segment(0, state.elements, state.gradient, scale)]
