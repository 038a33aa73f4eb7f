"""DeepSpeed's buffers of ZeRO-3, as a session takes them and hands them back."""

from __future__ import annotations

from typing import Any

import torch

from runtime.devices.base import Device
from runtime.execution.gradients import ParameterSlice
from runtime.execution.subgroup_state import Buffers, SubgroupState
from runtime.hardware.pages import discard
from runtime.zero.checks import private


def stock_buffers(optimizer: Any, masters: list[torch.nn.Parameter], subgroup: int) -> Buffers:
    """The subgroup's tensors as DeepSpeed has made them; the fp32 gradient (4 bytes per parameter)
    is given back.
    """
    master = masters[subgroup]
    state = optimizer.optimizer.state[master]
    state.setdefault("step", 0)
    rule = optimizer._rule
    for key in (*rule.moments, *rule.unused):
        state.setdefault(key, torch.zeros_like(master.data))
    gradient = gradient_of(optimizer, subgroup, master.numel())
    wire = optimizer.__dict__["fp16_partitioned_groups_flat"][subgroup]
    moments = (state[key] for key in rule.moments)
    return Buffers((master.data, *moments), gradient, wire)


def repoint(optimizer: Any, master: torch.nn.Parameter, state: SubgroupState) -> None:
    """DeepSpeed's references of one subgroup follow: master, moments, the gradients' views."""
    master.data = state.p
    moments = zip(optimizer._rule.moments, state.moments, strict=True)
    optimizer.optimizer.state[master].update(moments)
    views = private.gradient_partitions(optimizer)
    for param in optimizer.fp16_groups[state.index]:
        _, offset, elements = optimizer.grad_position[optimizer.get_param_id(param)]
        views[param.ds_id] = state.gradient.narrow(0, offset, elements)


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
    views = private.gradient_partitions(optimizer)
    moved = False
    for index, group in enumerate(optimizer.fp16_groups):
        elements = optimizer.fp16_partitioned_groups_flat_numel[index]
        stock = gradient_of(optimizer, index, int(elements))
        gradient = device.host_adopt(stock)
        if gradient.data_ptr() == stock.data_ptr():
            continue
        moved = True
        for param in group:
            _, offset, length = optimizer.grad_position[optimizer.get_param_id(param)]
            views[param.ds_id] = gradient.narrow(0, offset, length)
        if not stock.is_pinned():
            discard(stock.data_ptr(), stock.nbytes)
    if moved:
        optimizer.grad_partitions_flat_buffer = flat.new_empty(0)


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


def _join_gradients(optimizer: Any) -> None:
    """The inverse of `split_gradients`, wherever it and what followed have come to."""
    views = private.gradient_partitions(optimizer)
    whole = [int(n) for n in optimizer.fp16_partitioned_groups_flat_numel]
    parts = [gradient_of(optimizer, i, n).cpu() for i, n in enumerate(whole)]
    flat = torch.cat(parts)
    for group, part in zip(optimizer.fp16_groups, flat.split(whole), strict=True):
        for param in group:
            _, offset, elements = optimizer.grad_position[optimizer.get_param_id(param)]
            views[param.ds_id] = part.narrow(0, offset, elements)
    optimizer.grad_partitions_flat_buffer = flat


def slices(optimizer: Any) -> dict[int, ParameterSlice]:
    """Parameter id -> its part of its subgroup on this rank."""
    found = {}
    for group in optimizer.fp16_groups:
        for param in group:
            key = optimizer.get_param_id(param)
            subgroup, offset, elements = optimizer.grad_position[key]
            rank = private.partition_rank(optimizer, param)
            real = param.partition_numel() * rank < param.ds_numel
            found[key] = ParameterSlice(subgroup, offset, elements, real)
    return found
