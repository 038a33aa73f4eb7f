"""DeepSpeed's buffers of ZeRO-3, as a session takes them and hands them back.

A plan's subgroups are DeepSpeed's own, or pieces of them (`ebbtide.runtime.zero.cuts.cuts_of`): its norms,
its checkpoints and what it shows know nothing of pieces. Then its fp32 tensors stay whole
(`FlatState`), and its flat parameters as long as no piece's have moved.
"""

from collections.abc import Iterator
from typing import Any

import torch
from ebbtide.runtime.devices.base import Device
from ebbtide.runtime.execution.subgroup_state import Buffers, SubgroupState
from ebbtide.runtime.hardware.pages import discard
from ebbtide.runtime.zero.checks import private
from ebbtide.runtime.zero.cuts import Cut
from ebbtide.runtime.zero.windows import ZeroSlice


class Pieces:
    """The place of each parameter in the plan's subgroups.

    Attributes:
        cuts: subgroup -> (DeepSpeed's subgroup, offset in it, elements).
        places: parameter id -> (subgroup, offset in it, elements).
        whole: the subgroups are DeepSpeed's own.
        apart: subgroup -> its parameters, once those of parts have moved. DeepSpeed's flat ones are
            then rebuilt on request (`joined`), and hold nothing otherwise.
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
        """Yield each parameter of the subgroup, its offset and its elements."""
        for param in self._held[subgroup]:
            yield param, *self.places[self._optimizer.get_param_id(param)][1:]

    def wire(self, subgroup: int) -> torch.Tensor | None:
        """Return the subgroup's parameters, or None if DeepSpeed's swapper has them."""
        if self.apart:
            return self.apart[subgroup]
        return self._flat()[subgroup] if self.whole else self._part(self.cuts[subgroup])

    def _part(self, cut: Cut) -> torch.Tensor:
        group, offset, elements = cut
        return self._flat()[group].narrow(0, offset, elements)

    def move(self, subgroup: int, wire: torch.Tensor) -> None:
        """Move the subgroup's parameters to this tensor."""
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
        """DeepSpeed's flat parameters hold nothing where pieces are apart."""
        if self.apart:
            self._flat()[:] = [wire.new_empty(0) for wire in self._flat()]

    def joined(self) -> list[torch.Tensor]:
        """Return flat tensors that hold all parameters in host memory, until `part`."""
        if self.apart and not any(wire.numel() for wire in self._flat()):
            groups = [group for group, _, _ in self.cuts]
            for number in range(len(self._flat())):
                mine = [w for w, group in zip(self.apart, groups, strict=True) if group == number]
                self._flat()[number] = torch.cat([wire.cpu() for wire in mine])
        return self._flat()

    def take_back(self) -> None:
        """DeepSpeed has loaded into them, as far as they were `joined`, and shows parameters there:
        those that are apart follow.
        """
        for subgroup, wire in enumerate(self.apart):
            group, offset, elements = self.cuts[subgroup]
            if self._flat()[group].numel():
                self.move(subgroup, wire.copy_(self._flat()[group].narrow(0, offset, elements)))
        self.part()

    def hand_back(self, where: torch.device) -> None:
        """DeepSpeed's flat parameters are whole again, in that memory, and hold all of them."""
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
    """Return the subgroup's tensors as DeepSpeed has made them; the fp32 gradient (4 bytes per parameter)
    is given back.
    """
    pieces, location = optimizer._pieces, private.parameter_location(optimizer)
    if not pieces.whole:
        state = optimizer._flat.state(subgroup)
        gradient = gradient_of(optimizer, subgroup)
        return Buffers(state, gradient, pieces.wire(subgroup), location)
    master = masters[subgroup]
    rule = optimizer._rule
    # An optimizer that runs its own step is asked for nothing: its state would hold an entry then.
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
    """Return subgroups without a parameter buffer in DeepSpeed: its swapper has them on a drive."""
    wires = optimizer.__dict__.get("fp16_partitioned_groups_flat", ())  # below ZeRO-3 none
    return [index for index, wire in enumerate(wires) if wire is None]


def repoint(optimizer: Any, master: torch.nn.Parameter, state: SubgroupState) -> bool:
    """DeepSpeed's references of one subgroup follow: master, moments, the views of gradients and of
    parameters. True: these have moved.
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
    flat = optimizer.grad_partitions_flat_buffer.untyped_storage().data_ptr()
    if left.data_ptr() != state.gradient.data_ptr() and left.untyped_storage().data_ptr() == flat:
        _give_pages_back(left)
    wire = optimizer._pieces.wire(state.index)
    if wire is None or wire.data_ptr() == state.wire.data_ptr():
        return False
    optimizer._pieces.move(state.index, state.wire)
    return True


def gradient_of(optimizer: Any, subgroup: int) -> torch.Tensor:
    """Return the subgroup's gradient. DeepSpeed's views are parts of it."""
    first, within, _ = next(optimizer._pieces.params(subgroup))
    _, _, elements = optimizer._pieces.cuts[subgroup]
    view = private.gradient_partitions(optimizer)[first.ds_id]
    return view.as_strided((elements,), (1,), view.storage_offset() - within)


def split_gradients(optimizer: Any, device: Device) -> None:
    """DeepSpeed's flat gradient buffer (2 bytes per parameter) goes before any state is copied,
    where the device cannot copy from it: each subgroup gets memory of its own instead. Its pages
    go with each subgroup, so that it is not there twice.
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
    """The subgroup's views of gradients are parts of ``gradient`` from now on."""
    views = private.gradient_partitions(optimizer)
    for param, offset, elements in optimizer._pieces.params(subgroup):
        views[param.ds_id] = gradient.narrow(0, offset, elements)


def _give_pages_back(part: torch.Tensor) -> None:
    """Release the pages of this part of DeepSpeed's flat buffer. The buffer stays while any gradient is in it."""
    if part.device.type == "cpu" and not part.is_pinned():
        discard(part.data_ptr(), part.nbytes)


def hand_back(optimizer: Any) -> None:
    """DeepSpeed's buffers as it made them: on the host, in one piece, with fp32 gradients. After an
    attach that failed on the way; the optimizer then goes on as stock.
    """
    masters = optimizer.fp32_partitioned_groups_flat
    for master in masters:
        master.data = master.data.cpu()
        state = optimizer.optimizer.state[master]
        for key in optimizer._rule.moments if state else ():
            moment = state[key].cpu() if key in state else torch.zeros_like(master.data)
            state[key] = moment
        master.grad = torch.zeros_like(master.data)
    _join_gradients(optimizer)
    on_host = private.parameter_location(optimizer) == "host"
    where = torch.device("cpu") if on_host else private.training_device()
    optimizer._pieces.hand_back(where)


def _join_gradients(optimizer: Any) -> None:
    """The inverse of `split_gradients`, wherever it and what followed have come to."""
    whole = [elements for _, _, elements in optimizer._pieces.cuts]
    flat = torch.cat([gradient_of(optimizer, i).cpu() for i in range(len(whole))])
    for subgroup, part in enumerate(flat.split(whole)):
        _gradient_at(optimizer, subgroup, part)
    optimizer.grad_partitions_flat_buffer = flat


def drop_flat_parameters(optimizer: Any) -> None:
    """Give back DeepSpeed's flat buffers of parameters, on the device (one) or on the host (one
    per parameter group), where no subgroup's parameters are left in them.
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
    """Parameter id -> its part of its subgroup on this rank."""
    found = {}
    for group in optimizer.fp16_groups:
        for param in group:
            key = optimizer.get_param_id(param)
            subgroup, offset, elements = optimizer._pieces.places[key]
            rank = private.partition_rank(optimizer, param)
            real = param.partition_numel() * rank < param.ds_numel
            found[key] = ZeroSlice(subgroup, offset, elements, real)
    return found
