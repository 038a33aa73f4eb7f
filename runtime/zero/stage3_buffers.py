"""DeepSpeed's buffers of ZeRO-3, as a session takes them and hands them back."""

from typing import Any

import torch

from runtime.devices.base import Device
from runtime.execution.subgroup_state import Buffers, SubgroupState
from runtime.hardware.pages import discard
from runtime.zero.checks import private
from runtime.zero.windows import ZeroSlice


def stock_buffers(optimizer: Any, masters: list[torch.nn.Parameter], subgroup: int) -> Buffers:
    """The subgroup's tensors as DeepSpeed has made them; the fp32 gradient (4 bytes per parameter)
    is given back.
    """
    master = masters[subgroup]
    rule = optimizer._rule
    # An optimizer that runs its own step is asked for nothing: its state would hold an entry then.
    state = {} if rule.own_step else optimizer.optimizer.state[master]
    state.setdefault("step", 0)
    for key in (*rule.moments, *rule.unused):
        state.setdefault(key, torch.zeros_like(master.data))
    gradient = gradient_of(optimizer, subgroup, master.numel())
    wire = optimizer.__dict__["fp16_partitioned_groups_flat"][subgroup]
    swapped = wire is None
    if swapped:
        wire = optimizer._unread[: master.numel()]
    moments = (state[key] for key in rule.moments)
    home = private.parameter_home(optimizer)
    return Buffers((master.data, *moments), gradient, wire, home, movable=not swapped)


def swapped(optimizer: Any) -> list[int]:
    """Subgroups of whose parameters DeepSpeed keeps no buffer: its swapper has them on a drive."""
    wires = optimizer.__dict__["fp16_partitioned_groups_flat"]
    return [index for index, wire in enumerate(wires) if wire is None]


def repoint(optimizer: Any, master: torch.nn.Parameter, state: SubgroupState) -> bool:
    """DeepSpeed's references of one subgroup follow: master, moments, the views of gradients and of
    parameters. True: these have moved.
    """
    master.data = state.p
    if not optimizer._rule.own_step:
        moments = zip(optimizer._rule.moments, state.moments, strict=True)
        optimizer.optimizer.state[master].update(moments)
    left = gradient_of(optimizer, state.index, state.elements)
    _gradient_at(optimizer, state.index, state.gradient)
    flat = optimizer.grad_partitions_flat_buffer.untyped_storage().data_ptr()
    if left.data_ptr() != state.gradient.data_ptr() and left.untyped_storage().data_ptr() == flat:
        _give_pages_back(left)
    wires = optimizer.__dict__["fp16_partitioned_groups_flat"]
    if wires[state.index] is None or wires[state.index].data_ptr() == state.wire.data_ptr():
        return False
    _parameters_at(optimizer, state.index, state.wire)
    return True


def gradient_of(optimizer: Any, subgroup: int, elements: int) -> torch.Tensor:
    """The subgroup's gradient, of which DeepSpeed's views are parts."""
    first = optimizer.fp16_groups[subgroup][0]
    view = private.gradient_partitions(optimizer)[first.ds_id]
    _, within, _ = optimizer.grad_position[optimizer.get_param_id(first)]
    return view.as_strided((elements,), (1,), view.storage_offset() - within)


def split_gradients(optimizer: Any, device: Device) -> None:
    """DeepSpeed's flat gradient buffer (2 bytes per parameter) goes before any state is copied,
    where the device cannot copy from it: each subgroup gets memory of its own instead. Its pages
    go with each subgroup, so that it is not there twice.
    """
    flat = optimizer.grad_partitions_flat_buffer
    moved = False
    for index, elements in enumerate(optimizer.fp16_partitioned_groups_flat_numel):
        stock = gradient_of(optimizer, index, int(elements))
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
    for param in optimizer.fp16_groups[subgroup]:
        _, offset, elements = optimizer.grad_position[optimizer.get_param_id(param)]
        views[param.ds_id] = gradient.narrow(0, offset, elements)


def _give_pages_back(part: torch.Tensor) -> None:
    """Of DeepSpeed's flat buffer, which stays as long as any subgroup's gradient is in it."""
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
        state.update({key: state[key].cpu() for key in optimizer._rule.moments if key in state})
        master.grad = torch.zeros_like(master.data)
    _join_gradients(optimizer)
    on_host = private.parameter_home(optimizer) == "host"
    where = torch.device("cpu") if on_host else private.training_device()
    for index, wire in enumerate(optimizer.fp16_partitioned_groups_flat):
        if wire is not None and wire.device.type != where.type:
            _parameters_at(optimizer, index, wire.to(where))


def _join_gradients(optimizer: Any) -> None:
    """The inverse of `split_gradients`, wherever it and what followed have come to."""
    whole = [int(n) for n in optimizer.fp16_partitioned_groups_flat_numel]
    parts = [gradient_of(optimizer, i, n).cpu() for i, n in enumerate(whole)]
    flat = torch.cat(parts)
    for subgroup, part in enumerate(flat.split(whole)):
        _gradient_at(optimizer, subgroup, part)
    optimizer.grad_partitions_flat_buffer = flat


def _parameters_at(optimizer: Any, subgroup: int, wire: torch.Tensor) -> None:
    """The subgroup's partitions are parts of ``wire`` from now on."""
    optimizer.__dict__["fp16_partitioned_groups_flat"][subgroup] = wire
    offset = 0
    for param in optimizer.fp16_groups[subgroup]:
        elements = param.partition_numel()
        param.ds_tensor.data = wire.narrow(0, offset, elements)
        offset += elements


def drop_flat_parameters(optimizer: Any) -> None:
    """Gives back DeepSpeed's flat buffers of parameters, on the device (one) or on the host (one
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
            subgroup, offset, elements = optimizer.grad_position[key]
            rank = private.partition_rank(optimizer, param)
            real = param.partition_numel() * rank < param.ds_numel
            found[key] = ZeroSlice(subgroup, offset, elements, real)
    return found
