"""Buffers for gradients that also keep old gradients, which DeepSpeed may apply again in a later optimizer step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from ebbtide.runtime.execution.gradients import GradientBuffers, GradientOps, ParameterSlice, Segment
from ebbtide.runtime.execution.subgroup_state import SubgroupState


@dataclass(slots=True)
class ZeroSlice(ParameterSlice):
    """The part of a parameter that lies in one subgroup of this rank, and the places of the parameter's two gradients.

    DeepSpeed keeps two gradients per parameter. The first is the sum to which the next micro-batch's gradient is added.
    The second is the fp32 gradient that updates apply. It changes only in the last backward of a step. While the two
    are equal, the subgroup's gradient buffer holds both. If they differ, one of them is in other memory: in a tensor of
    its own (`kept` or `apart`), in a sum in GPU memory (`held`), or in the subgroup's spare buffer (see `Windows`).

    Attributes:
        begun: True if an earlier micro-batch of the present step gave the parameter a gradient.
        used: True if the last micro-batch of at least one step so far gave the parameter a gradient.
        kept: A tensor with only this parameter's fp32 gradient. Updates then read the gradient from it. It is made when
            other code accesses the gradient, or in a step that does not use the parameter. None if there is no such
            tensor.
        summed: True if there is a sum that the next micro-batch's gradient may be added to. Under ZeRO-1 and 2 there is
            no sum before the first gradient.
        apart: A tensor with only this parameter's sum. None if there is no such tensor.
        copied: True if the previous step's gradient has been copied to the subgroup's spare buffer, before new
            gradients overwrite the gradient buffer.
        empty: True if this part of the gradient buffer is known to be zero, so that the buffer is not checked again. A
            check reads all elements and synchronizes with the GPU.
        applied: True if the latest step has applied the gradient in ``kept``.
    """

    begun: bool = False
    used: bool = False
    kept: torch.Tensor | None = None
    summed: bool = True
    apart: torch.Tensor | None = None
    copied: bool = False
    empty: bool = False
    applied: bool = False


@dataclass
class Windows(GradientBuffers[ZeroSlice]):
    """The gradient buffers of a ZeRO optimizer, together with old gradients that stock DeepSpeed would apply again.

    If the last micro-batch of a step gives a parameter no gradient, stock DeepSpeed updates the parameter with its
    gradient from the previous step. ebbtide does the same, so that results are bit-identical. In a step with several
    micro-batches, the gradients of the earlier ones would overwrite the previous step's gradient in the gradient
    buffer. The previous step's gradient is therefore saved in a spare buffer first. If the gradients are in host
    memory, the gradient buffer and the spare buffer change roles. If they are in GPU memory, the previous step's
    gradient is copied to the spare buffer.
    """

    # Factor by which the latest step multiplied gradients. None if the step was skipped.
    last_scale: float | None = None
    # Function of a subgroup, a first element and a gradient. It overwrites the gradient of the latest update with the
    # values that DeepSpeed's optimizer leaves there. None: the gradient stays unchanged.
    spend: Callable[[int, int, torch.Tensor], None] | None = None
    _spares: dict[int, torch.Tensor] = field(default_factory=dict, init=False)  # in host memory
    # Subgroups whose gradient buffer and spare buffer have been exchanged in this step.
    _turned: set[int] = field(default_factory=set, init=False)

    def accept(
        self, piece: ZeroSlice, gradient: torch.Tensor, *, first: bool, boundary: bool, alone: bool = False
    ) -> torch.Tensor:
        """Store the gradient of a parameter from a step's first micro-batch, or add the gradient from a later
        micro-batch to the sum of the earlier ones. Return the sum.

        If the last micro-batch of a step gives a parameter no gradient, stock DeepSpeed applies the parameter's
        gradient from the previous step again. This method therefore saves the previous step's gradient in a spare
        buffer before new gradients overwrite it.

        Args:
            first: True for the first micro-batch of an optimizer step.
            boundary: True for the last micro-batch of an optimizer step.
            alone: True if this is the only micro-batch of the step. Stock DeepSpeed then leaves its buffer of summed
                gradients unchanged, so that the buffer still holds the sum of an earlier step. This method keeps that
                sum too.
        """
        piece.empty = False
        if not (boundary or self.states[piece.subgroup].sum is not None):
            self._keep_previous(piece)
        if alone and piece.summed and piece.apart is None and not piece.held:
            self._wait_arrived(piece)  # wait for the copy of a gradient of a skipped step
            piece.apart = self._host_buffer(piece).clone()
        total = self._take(piece, gradient, first=first, boundary=boundary, alone=alone)
        if not alone:
            piece.summed, piece.apart = True, None
        if boundary:
            piece.used, piece.kept = True, None
            self._reached(piece)
        else:
            piece.begun = True
        return total

    def accept_adjacent(self, pieces: list[ZeroSlice], gradients: torch.Tensor) -> None:
        """Store the gradients of the only micro-batch of a step, as `accept` does, with one copy for those that are
        adjacent in the host's memory too. Call this inside `together`.

        Args:
            gradients: The gradients of all pieces, one after the other.
        """
        layers, run, begin, position = self.ops.layers, list[ZeroSlice](), 0, 0
        key: tuple[Any, ...] = ()

        def leave() -> None:
            if run:
                subgroup, start = run[0].subgroup, run[0].offset
                buffer = self.states[subgroup].gradient.narrow(0, start, position - begin)
                source = gradients.narrow(0, begin, position - begin)
                self.ops.send_adjacent(subgroup, [piece.offset for piece in run], buffer, source)
                run.clear()

        self._open = True
        for piece in pieces:
            subgroup, offset = piece.subgroup, piece.offset
            if not self._crosses[subgroup] or self.states[subgroup].sum is not None or piece.summed:
                leave()
                part = gradients.narrow(0, position, piece.elements)
                self.accept(piece, part, first=True, boundary=True, alone=True)
            else:
                now = (subgroup, layers.get((subgroup, offset)), offset)
                if now != key:
                    leave()
                    begin = position
                run.append(piece)
                key = (subgroup, now[1], offset + piece.elements)
                piece.empty, piece.used, piece.kept = False, True, None
                self._reached(piece)
            position += piece.elements
        leave()

    def _sum_so_far(self, piece: ZeroSlice, elements: int) -> torch.Tensor:
        if piece.apart is not None:
            return piece.apart.narrow(0, 0, elements)
        if not (piece.held or piece.summed):
            return torch.zeros_like(self._host_buffer(piece, elements))
        if not piece.held and self._left_behind(piece):
            return self._spares[piece.subgroup].narrow(0, piece.offset, elements)
        return super()._sum_so_far(piece, elements)

    def _wait_arrived(self, piece: ZeroSlice) -> None:
        for arrival in self.arrived(piece.subgroup):
            arrival.wait_host()

    def sum_so_far(self, piece: ZeroSlice) -> torch.Tensor:
        """Wait for gradient copies in progress, and return the gradient sum to which the next micro-batch is added."""
        # The caller must not write to the sum.
        self._wait_arrived(piece)
        return self._sum_so_far(piece, piece.elements)

    # -- what the window before left ---------------------------------------------------------

    def _keep_previous(self, piece: ZeroSlice) -> None:
        subgroup = piece.subgroup
        if self._crosses[subgroup] or self.device.unified:
            # For the whole subgroup at once, by exchanging the buffers. Copies in progress end in the former buffer.
            if subgroup not in self._turned and not any(p.touched for p in self.by_subgroup[subgroup]):
                state = self.states[subgroup]
                spare = self._spare(subgroup)
                self._spares[subgroup], state.gradient = state.gradient, spare
                self._turned.add(subgroup)
        elif piece.used and piece.kept is None and not (piece.touched or piece.copied):
            spare = self._spare(subgroup).narrow(0, piece.offset, piece.elements)
            self.ops.set_aside(subgroup, piece.offset, spare, self._host_buffer(piece))
            self.before_reuse()
            piece.copied = True

    def _spare(self, subgroup: int) -> torch.Tensor:
        spare = self._spares.get(subgroup)
        if spare is None:
            gradient = self.states[subgroup].gradient
            spare = self.device.host_empty(gradient.numel(), gradient.dtype).zero_()
            self._spares[subgroup] = spare
        return spare

    def make_spares(self) -> None:
        """Allocate spare gradient buffers, except for subgroups with gradients that are summed in GPU memory."""
        # A spare buffer holds the previous step's gradient while the gradients of the next step's micro-batches are
        # summed. Sums in GPU memory do not overwrite the previous step's gradient.
        for state in self.states:
            if state.sum is None:
                self._spare(state.index)

    def _left_behind(self, piece: ZeroSlice) -> bool:
        return piece.subgroup in self._turned and not piece.begun and not piece.touched

    def _previous(self, piece: ZeroSlice) -> torch.Tensor | None:
        if piece.touched or not (piece.subgroup in self._turned or piece.copied):
            return None
        return self._spares[piece.subgroup].narrow(0, piece.offset, piece.elements)

    def spare_bytes(self) -> int:
        return sum(spare.nbytes for spare in self._spares.values())

    def moved(self, states: list[SubgroupState], ops: GradientOps) -> Self:
        """Return a copy of this object that uses a new plan's tensors and operations.

        The caller has moved the gradient buffers' content. This moves gradients that are elsewhere (see `ZeroSlice`).
        """
        for piece in self.slices.values():
            device = states[piece.subgroup].gradient.device
            if piece.kept is not None:
                piece.kept = piece.kept.to(device)
            if piece.apart is not None:
                piece.apart = piece.apart.to(device)
        return super().moved(states, ops)

    def close(self) -> None:
        """Release the spare gradient buffers and the GPU memory for gradient sums, before the switch to another plan.

        A spare buffer holds the previous step's gradient while the gradient buffer sums the present step's
        micro-batches. The previous step's gradients are first copied back to the gradient buffers, which stay. A sum of
        the present step's micro-batches is saved in `ZeroSlice.apart`.
        """
        self.ops.wait()
        for piece in self.slices.values():
            buffer = self._host_buffer(piece)
            if piece.unsent:  # the next step may add to it
                piece.apart = self._held(piece).to(buffer.device, copy=True)
            elif piece.begun and not piece.touched and piece.apart is None:
                piece.apart = buffer.clone()
            previous = self._previous(piece)
            if previous is not None:
                buffer.copy_(previous)
            piece.unsent = piece.copied = False
        self._turned.clear()
        for spare in self._spares.values():
            self.device.host_release(spare)
        self._spares.clear()
        super().close()

    # -- stepping ----------------------------------------------------------------------------

    def finish(self, piece: ZeroSlice) -> torch.Tensor:
        """Make the sum of a parameter's micro-batch gradients the gradient of the next update.

        Return the sum once it has arrived in the buffer that the update reads. DeepSpeed normally knows in backward
        which micro-batch is the last one of a step. This method is for scripts that decide it themselves, at
        ``step()``.
        """
        if piece.unsent:
            self.ops.send(piece.subgroup, piece.offset, self._host_buffer(piece), self._held(piece), summed=False)
            piece.unsent = False
        self._wait_arrived(piece)
        if piece.apart is not None:  # the plan was switched since
            self._host_buffer(piece).copy_(piece.apart)
            piece.apart = None
        piece.touched = piece.used = True
        piece.kept, piece.empty = None, False
        return self._host_buffer(piece)

    def close_window(self) -> None:
        """End the accumulation of a step's micro-batches. Keep old gradients of parameters that the step did not use.

        If a parameter gets no gradient in a step, stock DeepSpeed applies the parameter's old fp32 gradient again, as
        the previous step left it after unscaling and clipping.
        """
        for piece in self.slices.values():
            if piece.real and not (piece.touched or piece.empty) and piece.kept is None:
                piece.kept = self._leftover(piece)
                piece.empty = piece.kept is None and self.spend is None
            self._spend_kept(piece)
            if self._left_behind(piece):
                spare = self._spares[piece.subgroup]
                self._host_buffer(piece).copy_(spare.narrow(0, piece.offset, piece.elements))
        for piece in self.slices.values():
            piece.begun = piece.copied = False
        self._turned.clear()
        super().close_window()

    def _leftover(self, piece: ZeroSlice) -> torch.Tensor | None:
        if piece.begun and not piece.used:
            where = self.states[piece.subgroup]
            kept = torch.zeros(piece.elements, dtype=where.p.dtype, device=where.gradient.device)
        else:
            kept = self._widen(piece)
        self._apply(piece, kept)
        return kept if piece.begun or bool(kept.count_nonzero()) else None

    def _apply(self, piece: ZeroSlice, kept: torch.Tensor) -> None:
        if self.last_scale is not None:
            kept.mul_(self.last_scale)
            if self.spend is not None:
                self.spend(piece.subgroup, piece.offset, kept)

    def _spend_kept(self, piece: ZeroSlice) -> None:
        if piece.kept is not None and piece.applied and self.spend is not None:
            self.spend(piece.subgroup, piece.offset, piece.kept)
        piece.applied = False

    def _widen(self, piece: ZeroSlice) -> torch.Tensor:
        dtype = self.states[piece.subgroup].p.dtype
        self._wait_arrived(piece)
        buffer, previous = self._host_buffer(piece), self._previous(piece)
        return (buffer if previous is None else previous).to(buffer.device, dtype, copy=True)

    def keep(self, piece: ZeroSlice) -> torch.Tensor:
        """Return a parameter's fp32 gradient as a tensor that the caller may change. The next update that uses this
        gradient applies the changes.

        After a step, and until the parameter gets a new gradient, the tensor is the gradient that the step has used,
        unscaled and clipped as in DeepSpeed.
        """
        if piece.kept is None:
            if piece.begun and not piece.touched:
                piece.kept = self._leftover(piece)
                assert piece.kept is not None
                return piece.kept
            kept = self._widen(piece)
            if not piece.touched:
                self._apply(piece, kept)
            piece.kept = kept
        self._spend_kept(piece)
        return piece.kept

    def stepped(self, scale: float | None) -> None:
        """Record the factor that unscales and clips gradients, and multiply the kept ones by it, as DeepSpeed does.

        Kept are gradients of parameters that the step did not use, because DeepSpeed applies them again, and gradients
        that other code has accessed. Each is replaced by a scaled copy, because an update in the background may still
        read the old tensor. A gradient that is first accessed later is multiplied by the recorded factor then.
        """
        self.last_scale = scale
        if scale is None:
            return
        for piece in self.slices.values():
            if piece.kept is not None:
                piece.kept, piece.applied = piece.kept * scale, True

    def segments(self, subgroup: int, scale: float) -> list[Segment]:
        """Divide a subgroup's elements into ranges for an update. Return each range with its gradient and the factor
        that scales this gradient.

        Usually there is one range, the whole subgroup, with its gradient in the gradient buffer. A parameter whose
        gradient is in a tensor of its own (`ZeroSlice.kept`) is a range of its own. A gradient has such a tensor for
        one of two reasons. Either the step's last micro-batch gave the parameter no gradient, so that the update
        applies an old gradient again, as in stock DeepSpeed. Or other code has accessed the gradient.
        """
        state = self.states[subgroup]
        kept = (p for p in self.by_subgroup[subgroup] if p.kept is not None)
        runs: list[Segment] = []
        position = 0
        for piece in sorted(kept, key=lambda p: p.offset):
            assert piece.kept is not None
            if piece.offset > position:
                buffer = state.gradient[position : piece.offset]
                runs.append(Segment(position, piece.offset, buffer, scale))
            position = piece.offset + piece.elements
            runs.append(Segment(piece.offset, position, piece.kept, 1.0))
        if position < state.elements:
            runs.append(Segment(position, state.elements, state.gradient[position:], scale))
        return runs


@dataclass
class OneBuffer(Windows):
    """A collector of the gradients of parameters with 16-bit masters, for ZeRO-1 and 2.

    As in stock DeepSpeed, one buffer holds both the sum of the micro-batches' gradients and the gradient that updates
    apply. After a step, the buffer holds the unscaled and clipped gradient. If the first micro-batch of the next step
    gives a parameter no gradient, DeepSpeed adds a later micro-batch's gradient to this old gradient. This class does
    the same, so that results are bit-identical.
    """

    def accept(
        self, piece: ZeroSlice, gradient: torch.Tensor, *, first: bool, boundary: bool, alone: bool = False
    ) -> torch.Tensor:
        del alone  # with one buffer, it makes no difference
        fresh = (piece.begun or piece.touched) and piece.kept is None
        if not (first or fresh):
            self._host_buffer(piece).copy_(self.keep(piece))
        piece.kept, piece.summed = None, True
        return super().accept(piece, gradient, first=first, boundary=boundary)

    def accept_adjacent(self, pieces: list[ZeroSlice], gradients: torch.Tensor) -> None:
        for piece in pieces:
            piece.summed = True
        super().accept_adjacent(pieces, gradients)

    def _keep_previous(self, piece: ZeroSlice) -> None:
        """Do nothing: new gradients overwrite the previous ones, as in DeepSpeed's optimizer with 16-bit masters."""

    def make_spares(self) -> None:
        """Allocate no spare gradient buffers, because new gradients overwrite those of the previous step."""

    def _leftover(self, piece: ZeroSlice) -> torch.Tensor | None:
        kept = self._widen(piece)
        if not piece.begun:
            self._apply(piece, kept)
        return kept if piece.begun or bool(kept.count_nonzero()) else None
