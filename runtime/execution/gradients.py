"""Gradients on their way home: one crossing each, in their own precision."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from runtime.devices.base import Device
from runtime.devices.lane import Completion
from runtime.execution.subgroup_state import SubgroupState


class LostGradientError(RuntimeError):
    """Stock would apply a gradient that ebbtide does not hold any more; nothing was updated."""


@dataclass(slots=True)
class ParameterSlice:
    """A parameter's part of its subgroup on this rank.

    Attributes:
        real: this rank's partition holds elements of the parameter, not just padding.
        touched: a gradient arrived at the boundary of this accumulation window.
        begun: one arrived in an earlier micro-batch of this window.
        used: one arrived at the boundary of some window.
        kept: the fp32 gradient as DeepSpeed would hold it, once somebody read or wrote it or the
            parameter went unused; it then takes the place of the home's elements.
    """

    subgroup: int
    offset: int
    elements: int
    real: bool
    touched: bool = False
    begun: bool = False
    used: bool = False
    kept: torch.Tensor | None = None


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

    The training thread calls everything here; the copies run on a stream of the device. A home
    is read by the subgroup's update, which starts after `arrived` and ends before the parameters
    can be gathered for the next backward, so that no gradient is overwritten before its use.
    """

    device: Device
    states: list[SubgroupState]
    slices: dict[int, ParameterSlice]  # by parameter id
    last_scale: float | None = None  # what the latest step multiplied gradients by; None: skipped
    arrivals: dict[int, Completion] = field(default_factory=dict)
    latest: Completion | None = None  # the copy home that was started last

    def __post_init__(self) -> None:
        self.by_subgroup: list[list[ParameterSlice]] = [[] for _ in self.states]
        for piece in self.slices.values():
            self.by_subgroup[piece.subgroup].append(piece)
        self._crosses = [s.placement == "host" and not self.device.unified for s in self.states]

    def accept(
        self, piece: ParameterSlice, gradient: torch.Tensor, *, first: bool, boundary: bool
    ) -> torch.Tensor:
        """Stores or accumulates one partition; returns it as the device sees it, for its norm.

        Args:
            gradient: flat, in the accumulation dtype, on the device. It may be shorter than the
                slice: what is beyond it is padding and stays zero.
            first: first micro-batch of the window, which replaces; later ones are added.
        """
        home = self.states[piece.subgroup].gradient.narrow(0, piece.offset, gradient.numel())
        total = gradient.view(home.shape)
        if not self._crosses[piece.subgroup]:
            total = home.copy_(total) if first else home.add_(total)
        else:
            if not first:
                total = self._fetch(piece, home, gradient.device).add_(total)
            self._store(piece.subgroup, home, total)
        if boundary:
            piece.touched = piece.used = True
            piece.kept = None
        else:
            piece.begun = True
        return total

    def _fetch(
        self, piece: ParameterSlice, home: torch.Tensor, device: torch.device
    ) -> torch.Tensor:
        """The sum so far, on the device: DeepSpeed adds micro-batches there."""
        return self.device.fetch_gradient(home, device, self.arrivals.get(piece.subgroup))

    def _store(self, subgroup: int, home: torch.Tensor, source: torch.Tensor) -> None:
        arrival = self.device.store_gradient(home, source)
        if arrival is not None:
            self.arrivals[subgroup] = self.latest = arrival

    def before_reuse(self) -> None:
        """Called before the memory of the gradients accepted so far is written again."""
        if self.latest is not None:
            self.device.before_reuse(self.latest)

    def arrived(self, subgroup: int) -> list[Completion]:
        """What an update of the subgroup waits for besides the norm."""
        arrival = self.arrivals.get(subgroup)
        return [] if arrival is None else [arrival]

    def close_window(self) -> None:
        """Called at each step: parameters without a gradient keep what DeepSpeed would reuse.

        DeepSpeed leaves an unused parameter's fp32 gradient where it was, scaled by the previous
        step, and applies it again; the bits of stock training include that.

        Raises:
            LostGradientError: that gradient was overwritten by an earlier micro-batch's.
        """
        for piece in self.slices.values():
            if piece.real and not piece.touched and piece.kept is None:
                piece.kept = self._leftover(piece)
            piece.touched = piece.begun = False

    def _leftover(self, piece: ParameterSlice) -> torch.Tensor | None:
        """What DeepSpeed's fp32 gradient still holds of a parameter that this window's boundary
        did not reach; None: the same as what is at home.
        """
        if piece.begun:
            if piece.used:
                raise LostGradientError(
                    "a parameter must get a gradient in the last micro-batch of an accumulation "
                    f"window or in none, but one of {piece.elements} elements in subgroup "
                    f"{piece.subgroup} got its only one earlier: stock DeepSpeed would apply its "
                    "previous gradient again, which ebbtide no longer has. Set "
                    "gradient_accumulation_steps to 1, or train this model without ebbtide"
                )
            return torch.zeros(piece.elements, device=self.states[piece.subgroup].gradient.device)
        kept = self._widen(piece)
        if self.last_scale is not None:
            kept.mul_(self.last_scale)
        return kept if bool(kept.count_nonzero()) else None

    def _widen(self, piece: ParameterSlice) -> torch.Tensor:
        home = self.states[piece.subgroup].gradient.narrow(0, piece.offset, piece.elements)
        for arrival in self.arrived(piece.subgroup):
            arrival.wait_host()
        return home.to(torch.float32, copy=True)

    def keep(self, piece: ParameterSlice) -> torch.Tensor:
        """The fp32 gradient as DeepSpeed shows it; writes to it count at the next update.

        After a step, and until the next gradient, that is the unscaled and clipped one.
        """
        if piece.kept is None:
            kept = self._widen(piece)
            if not piece.touched and self.last_scale is not None:
                kept.mul_(self.last_scale)
            piece.kept = kept
        return piece.kept

    def scale_kept(self, scale: float) -> None:
        """DeepSpeed scales its fp32 gradients in place; the kept ones stand for them.

        Not in place here: nobody has gathered an unused parameter, so that its latest update may
        still be reading what was kept.
        """
        for piece in self.slices.values():
            if piece.kept is not None:
                piece.kept = piece.kept * scale

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
