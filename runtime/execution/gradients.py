"""The copies of gradients between GPU and host memory, and the buffers to which they are copied for optimizer updates.

Each gradient is copied once, in its own dtype, in the order of the plan's simulated schedule, which
tests/runtime/test_executed_dag.py checks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Generic, Self, TypeVar

import torch
from ebbtide.runtime.devices.base import Device
from ebbtide.runtime.devices.lane import Completion, LaneQueue
from ebbtide.runtime.execution.subgroup_state import SubgroupState
from ebbtide.simulator.schedule import Lane as LaneName
from ebbtide.simulator.schedule import Op, OpKind
from ebbtide.simulator.update.holding import GRADIENTS_UNDER_WAY_BYTES
from ebbtide.simulator.update.recipes import RECIPES

KEPT_PARTS = 65536  # most gradient parts of a step that are kept for the measured timeline


@dataclass(frozen=True, slots=True)
class GradientCopy:
    """A kind of copy of a subgroup's gradient, or of a part of it.

    Attributes:
        reduced: True if the copy waits until the gradient is reduced among ranks.
        after: Kinds of the copies of this gradient that must end first.
    """

    kind: OpKind
    lane: LaneName
    reduced: bool
    after: tuple[OpKind, ...] = ()


SEND = GradientCopy(OpKind.GRADIENT_D2H, LaneName.D2H_GRADIENTS, reduced=True)
# The sum of earlier micro-batches' gradients, to which the GPU adds a gradient.
FETCH_SUM = GradientCopy(OpKind.GRADIENT_H2D, LaneName.H2D_GRADIENTS, reduced=True, after=(OpKind.GRADIENT_D2H,))
SEND_SUM = GradientCopy(OpKind.GRADIENT_D2H, LaneName.D2H_GRADIENTS, reduced=False, after=(OpKind.GRADIENT_H2D,))


@dataclass(slots=True)
class _AdjacentGradients:
    """Adjacent gradients with one common copy. They are adjacent on the GPU and in the host buffer.

    Attributes:
        offsets: First element of each gradient in the subgroup.
        buffer_end, source_end: Where the memory of the last of them ends: the address, and the position in its storage.
    """

    how: GradientCopy
    subgroup: int
    layer: Hashable
    buffer: torch.Tensor
    source: torch.Tensor
    elements: int
    offsets: list[int]
    buffer_end: tuple[int, int]
    source_end: tuple[int, int]

    def whole(self, first: torch.Tensor) -> torch.Tensor:
        if len(self.offsets) == 1:
            return first
        return first.as_strided((self.elements,), (1,), first.storage_offset())


def _begin(tensor: torch.Tensor) -> tuple[int, int]:
    # Two tensors with the same dtype and the same difference of both are in the same storage.
    return tensor.data_ptr(), int(tensor.storage_offset())


class GradientOps:
    """The operations that copy gradients between GPU and host memory. Only the training thread calls the methods.

    There is one operation for each parameter with a new gradient, or one for several (see `together`). Copies in one
    direction run one after the other. A subgroup's gradient is therefore complete when the last copy that was started
    for it has ended.

    Attributes:
        layers: The layer of each parameter's gradient, by subgroup and first element in the subgroup. Gradients of
            several layers are never copied as one, because the simulated schedule has a copy for each layer.
        parts: Operations since the last call of `take_parts`, for the measured timeline. Each is paired with a
            `Completion`, which marks its end.
        latest: The most recently started copy from GPU to host memory. It may belong to any subgroup.
    """

    def __init__(self, device: Device, lanes: Mapping[LaneName, LaneQueue]) -> None:
        self.parts: deque[tuple[Op, Completion]] = deque(maxlen=KEPT_PARTS)
        self.latest: Completion | None = None
        self.before_op: Callable[[Op], None] | None = None  # called before each op. Tests inject faults and delays here
        self.layers: Mapping[tuple[int, int], Hashable] = {}
        self._device, self._lanes = device, lanes
        # The latest op of each kind by subgroup and offset of the part, and the latest copy to the host by subgroup.
        self._ends: dict[tuple[OpKind, int, int], Completion] = {}
        self._arrivals: dict[int, Completion] = {}
        # Copies to the host that have not ended, with their bytes.
        self._under_way: deque[tuple[Completion, int]] = deque()
        self._together = False
        self._run: _AdjacentGradients | None = None  # gradients to copy to the host that may still be joined by others

    @contextmanager
    def together(self) -> Iterator[None]:
        """Copy adjacent gradients as one, if they are sent inside the ``with`` block.

        They leave before anything else is done with their subgroup's gradient, and at the latest at the end of the
        block.
        """
        self._together = True
        try:
            yield
        finally:
            self._together = False
            self._leave()

    def send(self, subgroup: int, offset: int, buffer: torch.Tensor, source: torch.Tensor, *, summed: bool) -> None:
        """Start the device-to-host copy of a part of a subgroup's gradient.

        Args:
            source: The gradient. The caller may drop its reference immediately, but must call `before_reuse` before it
                overwrites the gradient's memory.
            summed: True if ``source`` is the sum of several micro-batches' gradients that `fetch_sum` has returned.
        """
        how, layer, run = SEND_SUM if summed else SEND, self.layers.get((subgroup, offset)), self._run
        elements, size_bytes = source.numel(), source.nbytes
        to, begin = _begin(buffer), _begin(source)
        ends = (to[0] + buffer.nbytes, to[1] + elements), (begin[0] + size_bytes, begin[1] + elements)
        if (
            run is not None
            and (run.buffer_end, run.source_end) == (to, begin)
            and (run.how, run.subgroup, run.layer) == (how, subgroup, layer)
            and run.source.dtype == source.dtype
            and source.is_contiguous()
        ):
            run.elements += elements
            run.offsets.append(offset)
            run.buffer_end, run.source_end = ends
        else:
            self._leave()
            self._run = _AdjacentGradients(how, subgroup, layer, buffer, source, elements, [offset], *ends)
        if not self._together:
            self._leave()

    def _leave(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            self._send(run.how, run.subgroup, run.offsets, run.whole(run.buffer), run.whole(run.source))

    def send_adjacent(self, subgroup: int, offsets: list[int], buffer: torch.Tensor, source: torch.Tensor) -> None:
        """Start the device-to-host copy of adjacent gradients, which begin at ``offsets`` in the subgroup."""
        self._leave()
        self._send(SEND, subgroup, offsets, buffer, source)

    def set_aside(self, subgroup: int, offset: int, buffer: torch.Tensor, source: torch.Tensor) -> None:
        """Copy a gradient of the previous step to host memory before it is overwritten, unlike the simulated schedule.

        Stock DeepSpeed applies it again if the present step's last micro-batch gives the parameter no gradient.
        """
        self._leave()
        self._send(SEND, subgroup, [offset], buffer, source)

    def _send(
        self, how: GradientCopy, subgroup: int, offsets: list[int], buffer: torch.Tensor, source: torch.Tensor
    ) -> None:
        self._make_room(source.nbytes)
        stream = self._lanes[how.lane].stream
        leaving = self._device.leaving(source, stream)
        copy = lambda: self._device.copy(buffer, leaving, how.lane, stream)
        self.latest = self._arrivals[subgroup] = self._submit(how, subgroup, offsets, source.nbytes, copy)
        self._under_way.append((self.latest, source.nbytes))

    def _make_room(self, size_bytes: int) -> None:
        left = sum(n for _, n in self._under_way) + size_bytes
        while self._under_way:
            oldest, n = self._under_way[0]
            if not oldest.ended or oldest.error is not None:
                if left <= GRADIENTS_UNDER_WAY_BYTES:
                    break
                self._device.will_wait([oldest])
                oldest.wait_host()
            self._under_way.popleft()
            left -= n

    def fetch_sum(self, subgroup: int, offset: int, base: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """Add a gradient to ``base``, the sum in host memory. Return the sum in GPU memory, for the caller's stream.

        Unlike in the simulated schedule, a plan that sums the gradients in GPU memory may need this copy: an earlier
        plan has left the sum in host memory, or the first micro-batch gave the parameter no gradient.
        """
        self._leave()
        stream = self._lanes[FETCH_SUM.lane].stream
        total = self._device.empty_on(gradient.device, base)
        copy = lambda: self._device.fetch_sum(total, base, gradient, stream)
        completion = self._submit(FETCH_SUM, subgroup, [offset], base.nbytes, copy)
        self._device.training_waits([completion])
        return total

    def _submit(
        self, how: GradientCopy, subgroup: int, offsets: list[int], size_bytes: int, copy: Callable[[], None]
    ) -> Completion:
        op = Op(-1, how.kind, how.lane, size_bytes, subgroup=subgroup)
        # Everything that the training stream has been given so far, such as the reduction and the last use of the
        # memory.
        waits = [Completion.done(self._device.current_event())] if how.reduced else []
        ends, parts = self._ends, [(subgroup, offset) for offset in offsets]
        before = [(kind, *part) for kind in how.after for part in parts]
        waits += dict.fromkeys(ends[key] for key in before if key in ends)

        def body() -> None:
            if self.before_op is not None:
                self.before_op(op)
            copy()

        completion = Completion(op.label)
        ends |= dict.fromkeys([(op.kind, *part) for part in parts], completion)
        self.parts.append((op, completion))
        self._lanes[op.lane].submit(body, waits, completion)
        return completion

    def arrived(self, subgroup: int) -> list[Completion]:
        """Return the `Completion` of a subgroup's latest gradient copy to host memory in a list, if there is one."""
        self._leave()
        return [self._arrivals[subgroup]] if subgroup in self._arrivals else []

    def before_reuse(self) -> None:
        """Wait until all gradients sent so far are in host memory, before their GPU memory is overwritten."""
        self._leave()
        if self.latest is not None:
            self._device.before_reuse(self.latest)

    def wait(self) -> None:
        """Wait until no gradient copy between GPU and host memory is in progress."""
        self._leave()
        for completion in self._ends.values():
            completion.wait_host()

    def take_parts(self) -> list[tuple[Op, Completion]]:
        """Return the gradient copies recorded since the last call, and clear the record."""
        taken = list(self.parts)
        self.parts.clear()
        return taken


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
        """Store this rank's part of a gradient, or add it to the sum. Return the sum on the GPU, for the gradient norm.

        Args:
            gradient: Flat, in the accumulation dtype, on the GPU. If it is shorter than the part, the rest stays zero.
            first: True for the first micro-batch of an optimizer step, which replaces the sum.
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
        """Allocate the further gradient buffers of backward, so that backward allocates no memory itself."""

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
        """Record the factor with which a step unscaled and clipped the gradients, or None if it is skipped."""

    def segments(self, subgroup: int, scale: float) -> list[Segment]:
        """Return the ranges of a subgroup's elements, each with the gradient and the gradient scale for its update."""
        state = self.states[subgroup]
        return [Segment(0, state.elements, state.gradient, scale)]
