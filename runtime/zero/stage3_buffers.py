"""Functions that let a plan use DeepSpeed's ZeRO-3 buffers, and that restore the buffers if the plan cannot be
attached.

A plan's subgroups are DeepSpeed's subgroups or parts of them (`ebbtide.runtime.zero.flat_partitions.cuts_of`). If they
are parts, each of DeepSpeed's fp32 tensors still holds a whole subgroup of DeepSpeed (`FlatState`), because DeepSpeed's
norms and checkpoints need whole subgroups. DeepSpeed's flat parameter tensors also stay whole, until the plan moves the
parameters of a part to other memory.
"""

from collections.abc import Iterator
from typing import Any

import torch
from ebbtide.runtime.devices.base import Device
from ebbtide.runtime.execution.subgroup_state import Buffers, SubgroupState
from ebbtide.runtime.hardware.pages import discard
from ebbtide.runtime.zero.checks import private
from ebbtide.runtime.zero.flat_partitions import Cut
from ebbtide.runtime.zero.windows import ZeroSlice


class Pieces:
    """The position of each ZeRO-3 parameter in the plan's subgroups, which may be parts of DeepSpeed's subgroups.

    Attributes:
        places: For each parameter id: (subgroup, offset in it, number of elements).
        whole: True if the plan's subgroups are DeepSpeed's own.
        apart: One tensor of parameters for each of the plan's subgroups, or an empty list. The list is empty while all
            parameters are in DeepSpeed's flat tensors. It is filled when the parameters of only a part of a DeepSpeed
            subgroup move to other memory. DeepSpeed's flat tensors are then emptied, and `joined` rebuilds them on
            request.
    """

    def __init__(self, optimizer: Any, pieces: list[Cut]) -> None:
        self.cuts, self._optimizer = pieces, optimizer
        self.whole = len(pieces) == len(optimizer.fp16_groups)
        self.apart: list[torch.Tensor] = []
        self._held: list[list[Any]] = [[] for _ in pieces]
        self.places: dict[int, tuple[int, int, int]] = {}
        ends = [(group, begin + elements) for group, begin, elements in pieces]
        subgroup = 0
        for number, group in enumerate(optimizer.fp16_groups):
            subgroup = next(i for i in range(subgroup, len(ends)) if ends[i][0] == number)
            for param in group:
                key = optimizer.get_param_id(param)
                _, offset, elements = optimizer.grad_position[key]
                if offset + elements > ends[subgroup][1]:
                    subgroup += 1
                self.places[key] = subgroup, offset - pieces[subgroup][1], elements
                self._held[subgroup].append(param)

    def params(self, subgroup: int) -> Iterator[tuple[Any, int, int]]:
        """Yield each parameter of a subgroup with its offset in the subgroup and its number of elements."""
        for param in self._held[subgroup]:
            yield param, *self.places[self._optimizer.get_param_id(param)][1:]

    def wire(self, subgroup: int) -> torch.Tensor | None:
        """Return the flat tensor of a subgroup's parameters on this rank."""
        # None if DeepSpeed's NVMe swapper holds the parameters.
        if self.apart:
            return self.apart[subgroup]
        return self._flat()[subgroup] if self.whole else self._part(self.cuts[subgroup])

    def _part(self, cut: Cut) -> torch.Tensor:
        group, offset, elements = cut
        return self._flat()[group].narrow(0, offset, elements)

    def move(self, subgroup: int, wire: torch.Tensor) -> None:
        """Make the given tensor the memory of a subgroup's parameters from now on."""
        if self.whole:
            self._flat()[subgroup] = wire
        else:
            self.apart = self.apart or [self._part(cut) for cut in self.cuts]
            self.apart[subgroup] = wire
        self._show(subgroup, wire)

    def _show(self, subgroup: int, wire: torch.Tensor) -> None:
        for param, offset, elements in self.params(subgroup):
            param.ds_tensor.data = wire.narrow(0, offset, elements)

    def part(self) -> None:
        """Release DeepSpeed's flat parameter tensors, if the plan's subgroups have theirs in separate tensors."""
        if self.apart:
            self._flat()[:] = [wire.new_empty(0) for wire in self._flat()]

    def joined(self) -> list[torch.Tensor]:
        """Return DeepSpeed's flat parameter tensors on this rank, one for each of DeepSpeed's subgroups.

        While the parameters are in other tensors (`apart`, one tensor for each of the plan's subgroups), the flat
        tensors are empty. This method then fills them with copies of the parameters in host memory. The method `part`
        empties them again.
        """
        if self.apart and not any(wire.numel() for wire in self._flat()):
            groups = [group for group, _, _ in self.cuts]
            for number in range(len(self._flat())):
                mine = [w for w, group in zip(self.apart, groups, strict=True) if group == number]
                self._flat()[number] = torch.cat([wire.cpu() for wire in mine])
        return self._flat()

    def take_back(self) -> None:
        """Copy the parameters from DeepSpeed's flat tensors, where a checkpoint load has put them, to the tensors of
        the plan's subgroups.
        """
        for subgroup, wire in enumerate(self.apart):
            group, offset, elements = self.cuts[subgroup]
            if self._flat()[group].numel():
                self.move(subgroup, wire.copy_(self._flat()[group].narrow(0, offset, elements)))
        self.part()

    def hand_back(self, where: torch.device) -> None:
        """Rebuild DeepSpeed's flat parameter tensors from the tensors of the plan's subgroups, and make the parameters
        use them.
        """
        flat = self.joined()
        self.apart = []
        for number, wire in enumerate(flat):
            if wire is not None:
                flat[number] = wire.to(where)
        for subgroup in range(len(self.cuts)):
            if (part := self.wire(subgroup)) is not None:
                self._show(subgroup, part)

    def _flat(self) -> list[torch.Tensor]:
        return self._optimizer.__dict__["fp16_partitioned_groups_flat"]


def stock_buffers(optimizer: Any, masters: list[torch.nn.Parameter], subgroup: int) -> Buffers:
    """Return DeepSpeed's own tensors of a subgroup: the fp32 masters, moments, gradient and parameters.

    Training uses these tensors until a plan moves the subgroup's data to other memory.
    """
    pieces, location = optimizer._pieces, private.parameter_location(optimizer)
    if not pieces.whole:
        state = optimizer._flat.state(subgroup)
        gradient = gradient_of(optimizer, subgroup)
        return Buffers(state, gradient, pieces.wire(subgroup), location)
    master = masters[subgroup]
    rule = optimizer._rule
    # The state of an optimizer that runs its own step is not read, because reading would create an entry.
    state = {} if rule.own_step else optimizer.optimizer.state[master]
    state.setdefault("step", 0)
    for key in (*rule.moments, *rule.unused):
        state.setdefault(key, torch.zeros_like(master.data))
    gradient, wire = gradient_of(optimizer, subgroup), pieces.wire(subgroup)
    swapped = wire is None
    if swapped:
        wire = optimizer._unread[: master.numel()]
    moments = (state[key] for key in rule.moments)
    return Buffers((master.data, *moments), gradient, wire, location, movable=not swapped)


def swapped(optimizer: Any) -> list[int]:
    """Return the subgroups whose parameters are only on a drive, where DeepSpeed's NVMe swapper keeps them."""
    # The attribute does not exist under ZeRO-1 and 2.
    wires = optimizer.__dict__.get("fp16_partitioned_groups_flat", ())
    return [index for index, wire in enumerate(wires) if wire is None]


def repoint(optimizer: Any, master: torch.nn.Parameter, state: SubgroupState) -> bool:
    """Make DeepSpeed's references point to the tensors that hold a subgroup's state now.

    The references are the master, the moments, and the views of gradients and parameters. Return True if the subgroup's
    parameters are now at another place in memory than before the call. Gathered parameters must then be made to use the
    new memory.
    """
    if optimizer._flat is not None:
        optimizer._flat.adopt(state)
    else:
        master.data = state.p
        if not optimizer._rule.own_step:
            moments = zip(optimizer._rule.moments, state.moments, strict=True)
            optimizer.optimizer.state[master].update(moments)
    left = gradient_of(optimizer, state.index)
    _gradient_at(optimizer, state.index, state.gradient)
    wire = optimizer._pieces.wire(state.index)
    moved = wire is not None and wire.data_ptr() != state.wire.data_ptr()
    if moved:
        optimizer._pieces.move(state.index, state.wire)
    # Last, because until here the former tensors are complete, so that after an error they can still be used.
    flat = optimizer.grad_partitions_flat_buffer.untyped_storage().data_ptr()
    if left.data_ptr() != state.gradient.data_ptr() and left.untyped_storage().data_ptr() == flat:
        _give_pages_back(left)
    return moved


def gradient_of(optimizer: Any, subgroup: int) -> torch.Tensor:
    """Return the gradients of all parameters of a subgroup as one tensor.

    The tensor shares memory with DeepSpeed's per-parameter gradients.
    """
    first, within, _ = next(optimizer._pieces.params(subgroup))
    _, _, elements = optimizer._pieces.cuts[subgroup]
    view = private.gradient_partitions(optimizer)[first.ds_id]
    return view.as_strided((elements,), (1,), view.storage_offset() - within)


def split_gradients(optimizer: Any, device: Device) -> None:
    """Give each subgroup its own gradient tensor, if the GPU cannot copy at full speed from DeepSpeed's flat gradient
    buffer.

    With CUDA, this is the case if the buffer is not in page-locked memory. The buffer's memory (2 bytes per parameter)
    is released subgroup by subgroup, so that gradients never take memory twice.
    """
    flat = optimizer.grad_partitions_flat_buffer
    moved = False
    for index in range(len(optimizer._pieces.cuts)):
        stock = gradient_of(optimizer, index)
        gradient = device.host_adopt(stock)
        if gradient.data_ptr() == stock.data_ptr():
            continue
        moved = True
        _gradient_at(optimizer, index, gradient)
        _give_pages_back(stock)
    if moved:
        optimizer.grad_partitions_flat_buffer = flat.new_empty(0)


def _gradient_at(optimizer: Any, subgroup: int, gradient: torch.Tensor) -> None:
    views = private.gradient_partitions(optimizer)
    for param, offset, elements in optimizer._pieces.params(subgroup):
        views[param.ds_id] = gradient.narrow(0, offset, elements)


def _give_pages_back(part: torch.Tensor) -> None:
    if part.device.type == "cpu" and not part.is_pinned():
        discard(part.data_ptr(), part.nbytes)


def hand_back(optimizer: Any) -> None:
    """Restore DeepSpeed's own ZeRO-3 buffers after a plan could not be attached, so that the optimizer
    trains without a plan.

    The buffers are contiguous and include fp32 gradients. State and gradients are in host memory.
    """
    masters = optimizer.fp32_partitioned_groups_flat
    for master in masters:
        master.data = _in_memory(master.data)
        state = optimizer.optimizer.state[master]
        for key in optimizer._rule.moments if state else ():
            state[key] = _in_memory(state[key]) if key in state else torch.zeros_like(master.data)
        master.grad = torch.zeros_like(master.data)
    _join_gradients(optimizer)
    on_host = private.parameter_location(optimizer) == "host"
    where = torch.device("cpu") if on_host else private.training_device()
    optimizer._pieces.hand_back(where)


def _in_memory(tensor: torch.Tensor) -> torch.Tensor:
    # One that shows a file on a drive would show what the file's next owner writes.
    return tensor.to("cpu", copy=not tensor.is_pinned())


def _join_gradients(optimizer: Any) -> None:
    whole = [elements for _, _, elements in optimizer._pieces.cuts]
    flat = torch.cat([gradient_of(optimizer, i).cpu() for i in range(len(whole))])
    for subgroup, part in enumerate(flat.split(whole)):
        _gradient_at(optimizer, subgroup, part)
    optimizer.grad_partitions_flat_buffer = flat


def drop_flat_parameters(optimizer: Any) -> None:
    """Release DeepSpeed's flat parameter buffers that hold no subgroup's parameters any more.

    DeepSpeed has one such buffer in GPU memory, or one per parameter group in host memory.
    """
    wires = optimizer.__dict__["fp16_partitioned_groups_flat"]
    kept = {wire.untyped_storage().data_ptr() for wire in wires if wire is not None}
    flat = getattr(optimizer, "lp_param_buffer", None)
    if flat is not None and flat.numel() and flat.untyped_storage().data_ptr() not in kept:
        optimizer.lp_param_buffer = flat.new_empty(0)
    groups = optimizer.param_groups_fp16_flat_cpu_memory
    for i, flat in enumerate(groups):
        if flat.untyped_storage().data_ptr() not in kept:
            groups[i] = flat.new_empty(0)


def slices(optimizer: Any) -> dict[int, ZeroSlice]:
    """Return this rank's part of each parameter, with its position in the subgroups, as a dict by parameter id."""
    found = {}
    for group in optimizer.fp16_groups:
        for param in group:
            key = optimizer.get_param_id(param)
            subgroup, offset, elements = optimizer._pieces.places[key]
            rank = private.partition_rank(optimizer, param)
            real = param.partition_numel() * rank < param.ds_numel
            found[key] = ZeroSlice(subgroup, offset, elements, real)
    return found
