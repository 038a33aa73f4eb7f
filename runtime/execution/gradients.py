"""Gradients on their way home: one crossing each, in their own precision."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from runtime.devices.base import Device
from runtime.devices.lane import Completion
from runtime.execution.gradient_ops import GradientOps
from runtime.execution.subgroup_state import SubgroupState
from simulator.update.recipes import RECIPES


@dataclass(slots=True)
class ParameterSlice:
    """A parameter's part of its subgroup on this rank.

    DeepSpeed keeps two things per parameter: the sum of the window's micro-batches, and the fp32
    gradient that updates apply, which only a boundary's backward renews. Both are at home as long
    as they are the same; the fields say where the one is that is not.

    Attributes:
        real: this rank's partition holds elements of the parameter, not just padding.
        touched: a gradient arrived at the boundary of this accumulation window.
        begun: one arrived in an earlier micro-batch of this window.
        used: one arrived at the boundary of some window.
        kept: the fp32 gradient as DeepSpeed would hold it, once somebody read or wrote it or the
            parameter went unused; it then takes the place of the home's elements.
        summed: DeepSpeed has a sum to go on from; below ZeRO-3 there is none before the first.
        apart: that sum, where what is at home does not belong to it.
        copied: the gradient of the window before lies in the subgroup's spare.
        held: the sum is in the subgroup's own device memory for it; at home too, but where
        unsent: it has grown since it was sent there.
        empty: what is at home was looked at, and is zero: of a parameter that nobody uses, a look
            at every step would cost a pass, and on the device a synchronisation.
        applied: what is kept has been, by the latest step.
    """

    subgroup: int
    offset: int
    elements: int
    real: bool
    touched: bool = False
    begun: bool = False
    used: bool = False
    kept: torch.Tensor | None = None
    summed: bool = True
    apart: torch.Tensor | None = None
    copied: bool = False
    held: bool = False
    unsent: bool = False
    empty: bool = False
    applied: bool = False


@dataclass(frozen=True, slots=True)
class Segment:
    """Elements ``start`` to ``end`` of a subgroup and the gradient that updates them."""

    start: int
    end: int
    gradient: torch.Tensor
    scale: float


@dataclass
class GradientHomes:
    """Takes each reduced gradient to its subgroup's buffer.

    The training thread calls everything here; what crosses does so by ``ops``. A home
    is read by the subgroup's update, which starts after `arrived` and ends before the parameters
    can be gathered for the next backward, so that no gradient is overwritten before its use.

    With accumulation a window's first micro-batches overwrite the gradient of the window before,
    which DeepSpeed applies again to a parameter that the last micro-batch does not reach. It stays
    in a spare: a home on the host changes places with it, one on the device is copied to it. Where
    the sum has memory of its own on the device, what is at home stays there until the boundary.
    """

    device: Device
    states: list[SubgroupState]
    slices: dict[int, ParameterSlice]  # by parameter id
    ops: GradientOps
    last_scale: float | None = None  # what the latest step multiplied gradients by; None: skipped
    # Called when all of a subgroup's parameters have a gradient of the window's last micro-batch,
    # and again if another one comes for any of them.
    complete: Callable[[int], None] | None = None
    # Of a subgroup, from an element on: the latest update's gradient becomes what stock's optimizer
    # has left in its place; None: it leaves the gradient.
    spend: Callable[[int, int, torch.Tensor], None] | None = None

    def __post_init__(self) -> None:
        self.by_subgroup: list[list[ParameterSlice]] = [[] for _ in self.states]
        for piece in self.slices.values():
            self.by_subgroup[piece.subgroup].append(piece)
        # By subgroup, parameters without a gradient of the boundary.
        self._missing = self._awaited()
        unified = self.device.unified
        on_host = [RECIPES[s.placement].gradient == "host" for s in self.states]
        self._crosses = [there and not unified for there in on_host]
        self._on_host = [there or unified for there in on_host]
        self._spares: dict[int, torch.Tensor] = {}  # by subgroup, host memory
        self._turned = set[int]()  # subgroups whose home and spare changed places in this window
        self._open = False  # a gradient has arrived since the window was closed

    # -- arriving ----------------------------------------------------------------------------

    def accept(
        self,
        piece: ParameterSlice,
        gradient: torch.Tensor,
        *,
        first: bool,
        boundary: bool,
        alone: bool = False,
    ) -> torch.Tensor:
        """Stores or accumulates one partition; returns it as the device sees it, for its norm.

        Args:
            gradient: flat, in the accumulation dtype, on the device. It may be shorter than the
                slice: what is beyond it is padding and stays zero.
            first: first micro-batch of the window, which replaces; later ones are added.
            alone: DeepSpeed does not take this gradient into its sum of micro-batches.
        """
        self._open = True
        piece.empty = False
        on_device = self.states[piece.subgroup].sum is not None
        if not (boundary or on_device):
            self._keep_previous(piece)
        if alone and piece.summed and piece.apart is None and not piece.held:
            for arrival in self.arrived(piece.subgroup):  # one of a step that was skipped
                arrival.wait_host()
            piece.apart = self._home(piece).clone()
        base = None if first else self._sum_so_far(piece, gradient.numel())
        if on_device:
            total = self._hold(piece, gradient, base, boundary=boundary, alone=alone)
        else:
            home = self._home(piece, gradient.numel())
            total = self._store(piece.subgroup, home, gradient.view(home.shape), base)
        if not alone:
            piece.summed, piece.apart = True, None
        if boundary:
            self._missing[piece.subgroup] -= not piece.touched
            piece.touched = piece.used = True
            piece.kept = None
            if self.complete is not None and not self._missing[piece.subgroup]:
                self.complete(piece.subgroup)
        else:
            piece.begun = True
        return total

    def _awaited(self) -> list[int]:
        return [sum(p.real and not p.touched for p in pieces) for pieces in self.by_subgroup]

    def _store(
        self, subgroup: int, home: torch.Tensor, gradient: torch.Tensor, base: torch.Tensor | None
    ) -> torch.Tensor:
        """Brings ``base + gradient`` home, summed on the device, as DeepSpeed does."""
        if not self._crosses[subgroup]:
            return home.copy_(gradient) if base is None else torch.add(base, gradient, out=home)
        if base is not None:
            gradient = self.ops.fetch_sum(subgroup, base, gradient)
        self.ops.send(subgroup, home, gradient, summed=base is not None)
        return gradient

    def _hold(
        self, piece: ParameterSlice, gradient: torch.Tensor, base: torch.Tensor | None, *,
        boundary: bool, alone: bool,
    ) -> torch.Tensor:  # fmt: skip
        """As `_store`, where the sum stays on the device until the boundary."""
        total = gradient
        if not (alone or (boundary and base is None)):
            total = self._sum_up(piece, gradient, base)
        elif not alone:
            piece.held = False  # the sum is what goes home
        piece.unsent = piece.held and (alone or not boundary)
        if boundary:
            home = self._home(piece, gradient.numel())
            self.ops.send(piece.subgroup, home, total, summed=False)
        return total

    def _sum_up(
        self, piece: ParameterSlice, gradient: torch.Tensor, base: torch.Tensor | None
    ) -> torch.Tensor:
        """As DeepSpeed does, in the device memory for the subgroup's sum, which it returns."""
        total = self._held(piece, gradient.numel())
        if not piece.unsent:  # what is there may still be on its way home
            self.device.training_waits(self.arrived(piece.subgroup))
        if base is None:
            total.copy_(gradient)
        elif piece.held:
            total.add_(gradient)
        else:
            total.copy_(self.ops.fetch_sum(piece.subgroup, base, gradient))
        piece.held = True
        return total

    def _held(self, piece: ParameterSlice, elements: int | None = None) -> torch.Tensor:
        held = self.states[piece.subgroup].sum
        assert held is not None
        return held.narrow(0, piece.offset, piece.elements if elements is None else elements)

    def _home(self, piece: ParameterSlice, elements: int | None = None) -> torch.Tensor:
        gradient = self.states[piece.subgroup].gradient
        return gradient.narrow(0, piece.offset, piece.elements if elements is None else elements)

    def _sum_so_far(self, piece: ParameterSlice, elements: int) -> torch.Tensor:
        """What DeepSpeed adds the next micro-batch to."""
        home = self._home(piece, elements)
        if piece.apart is not None:
            return piece.apart.narrow(0, 0, elements)
        if piece.held:
            return self._held(piece, elements)
        if not piece.summed:
            return torch.zeros_like(home)
        if self._left_behind(piece):
            return self._spares[piece.subgroup].narrow(0, piece.offset, elements)
        return home

    def sum_so_far(self, piece: ParameterSlice) -> torch.Tensor:
        """What the next micro-batch is added to, once it is there; not to be written."""
        for arrival in self.arrived(piece.subgroup):
            arrival.wait_host()
        return self._sum_so_far(piece, piece.elements)

    # -- what the window before left ---------------------------------------------------------

    def _keep_previous(self, piece: ParameterSlice) -> None:
        """A gradient is about to come home that no update may ever apply."""
        subgroup = piece.subgroup
        if self._on_host[subgroup]:
            # All of the subgroup at once, by reference: what has not arrived yet is left behind.
            if subgroup not in self._turned and not any(
                p.touched for p in self.by_subgroup[subgroup]
            ):
                state = self.states[subgroup]
                spare = self._spare(subgroup)
                self._spares[subgroup], state.gradient = state.gradient, spare
                self._turned.add(subgroup)
        elif piece.used and piece.kept is None and not (piece.touched or piece.copied):
            spare = self._spare(subgroup).narrow(0, piece.offset, piece.elements)
            if self.device.unified:
                spare.copy_(self._home(piece))
            else:
                self.ops.set_aside(subgroup, spare, self._home(piece))
            self.before_reuse()
            piece.copied = True

    def _spare(self, subgroup: int) -> torch.Tensor:
        spare = self._spares.get(subgroup)
        if spare is None:
            gradient = self.states[subgroup].gradient
            spare = self.device.host_empty(gradient.numel(), gradient.dtype).zero_()
            self._spares[subgroup] = spare
        return spare

    def _left_behind(self, piece: ParameterSlice) -> bool:
        """Home and spare changed places, and nothing of this parameter has arrived since."""
        return piece.subgroup in self._turned and not piece.begun and not piece.touched

    def _previous(self, piece: ParameterSlice) -> torch.Tensor | None:
        """What the window before left of it, where that is in the spare; None: it is at home."""
        if piece.touched or not (piece.subgroup in self._turned or piece.copied):
            return None
        return self._spares[piece.subgroup].narrow(0, piece.offset, piece.elements)

    def spare_bytes(self) -> int:
        """Host memory of the spares."""
        return sum(spare.nbytes for spare in self._spares.values())

    def moved(self, states: list[SubgroupState], ops: GradientOps) -> GradientHomes:
        """The same gradients, kept ones included, beside the states' new homes."""
        for piece in self.slices.values():
            device = states[piece.subgroup].gradient.device
            if piece.kept is not None:
                piece.kept = piece.kept.to(device)
            if piece.apart is not None:
                piece.apart = piece.apart.to(device)
        homes = GradientHomes(
            self.device, states, self.slices, ops, self.last_scale, self.complete, self.spend
        )
        homes._open = self._open
        return homes

    def close(self) -> None:
        """Gives the spares and the device's sums back, once what is on its way has arrived. At home
        is then what the window before left, and apart what was added up since, if it is begun.
        """
        self.ops.wait()
        for piece in self.slices.values():
            home = self._home(piece)
            if piece.unsent:  # the next window may go on from it
                piece.apart = self._held(piece).to(home.device, copy=True)
            elif piece.begun and not piece.touched and piece.apart is None:
                piece.apart = home.clone()
            previous = self._previous(piece)
            if previous is not None:
                home.copy_(previous)
            piece.held = piece.unsent = piece.copied = False
        self._turned.clear()
        for state in self.states:
            state.sum = None
        for spare in self._spares.values():
            self.device.host_release(spare)
        self._spares.clear()

    def before_reuse(self) -> None:
        """Called before the memory of the gradients accepted so far is written again."""
        self.ops.before_reuse()

    # -- stepping ----------------------------------------------------------------------------

    def arrived(self, subgroup: int) -> list[Completion]:
        return self.ops.arrived(subgroup)

    def finish(self, piece: ParameterSlice) -> torch.Tensor:
        """The sum at home becomes what the next update applies; returns it, once it is there.

        For accumulation that ends at ``step()``, after its last backward.
        """
        if piece.unsent:
            self.ops.send(piece.subgroup, self._home(piece), self._held(piece), summed=False)
            piece.unsent = False
        for arrival in self.arrived(piece.subgroup):
            arrival.wait_host()
        if piece.apart is not None:  # another plan has been since
            self._home(piece).copy_(piece.apart)
            piece.apart = None
        piece.touched = piece.used = True
        piece.kept, piece.empty = None, False
        return self._home(piece)

    def close_window(self) -> None:
        """Called at each step: parameters without a gradient keep what DeepSpeed would reuse.

        DeepSpeed leaves an unused parameter's fp32 gradient where it was, scaled by the previous
        step, and applies it again; the bits of stock training include that.
        """
        for piece in self.slices.values():
            if piece.real and not (piece.touched or piece.empty) and piece.kept is None:
                piece.kept = self._leftover(piece)
                piece.empty = piece.kept is None and self.spend is None
            self._spend_kept(piece)
            if self._left_behind(piece):
                spare = self._spares[piece.subgroup]
                self._home(piece).copy_(spare.narrow(0, piece.offset, piece.elements))
        for piece in self.slices.values():
            piece.touched = piece.begun = piece.copied = False
        self._missing = self._awaited()
        self._turned.clear()
        self._open = False

    def check_closed(self) -> None:
        """Raises: RuntimeError: gradients have arrived that `close_window` does not know of."""
        if self._open:
            raise RuntimeError(
                "homes.close_window() must be called behind a step's last gradient and before "
                "session.update(), but was not"
            )

    def _leftover(self, piece: ParameterSlice) -> torch.Tensor | None:
        """What DeepSpeed's fp32 gradient still holds of a parameter that this window's boundary
        did not reach; None: the same as what is at home.
        """
        if piece.begun and not piece.used:
            where = self.states[piece.subgroup]
            kept = torch.zeros(piece.elements, dtype=where.p.dtype, device=where.gradient.device)
        else:
            kept = self._widen(piece)
        self._apply(piece, kept)
        return kept if piece.begun or bool(kept.count_nonzero()) else None

    def _apply(self, piece: ParameterSlice, kept: torch.Tensor) -> None:
        """What the latest step has done to its gradient, if there was one."""
        if self.last_scale is not None:
            kept.mul_(self.last_scale)
            if self.spend is not None:
                self.spend(piece.subgroup, piece.offset, kept)

    def _spend_kept(self, piece: ParameterSlice) -> None:
        if piece.kept is not None and piece.applied and self.spend is not None:
            self.spend(piece.subgroup, piece.offset, piece.kept)
        piece.applied = False

    def _widen(self, piece: ParameterSlice) -> torch.Tensor:
        """A copy of what the latest boundary brought, unscaled, in the master's precision."""
        dtype = self.states[piece.subgroup].p.dtype
        for arrival in self.arrived(piece.subgroup):
            arrival.wait_host()
        home, previous = self._home(piece), self._previous(piece)
        return (home if previous is None else previous).to(home.device, dtype, copy=True)

    def keep(self, piece: ParameterSlice) -> torch.Tensor:
        """The fp32 gradient as DeepSpeed shows it; writes to it count at the next update.

        After a step, and until the next gradient, that is the unscaled and clipped one.
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

    def scale_kept(self, scale: float) -> None:
        """DeepSpeed scales its fp32 gradients in place; the kept ones stand for them.

        Not in place here: nobody has gathered an unused parameter, so that its latest update may
        still be reading what was kept.
        """
        for piece in self.slices.values():
            if piece.kept is not None:
                piece.kept, piece.applied = piece.kept * scale, True

    def segments(self, subgroup: int, scale: float) -> list[Segment]:
        """Runs that cover the subgroup; a single one, unless something was kept."""
        state = self.states[subgroup]
        kept = (p for p in self.by_subgroup[subgroup] if p.kept is not None)
        runs: list[Segment] = []
        position = 0
        for piece in sorted(kept, key=lambda p: p.offset):
            assert piece.kept is not None
            if piece.offset > position:
                home = state.gradient[position : piece.offset]
                runs.append(Segment(position, piece.offset, home, scale))
            position = piece.offset + piece.elements
            runs.append(Segment(piece.offset, position, piece.kept, 1.0))
        if position < state.elements:
            runs.append(Segment(position, state.elements, state.gradient[position:], scale))
        return runs
