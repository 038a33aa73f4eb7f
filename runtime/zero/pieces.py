"""Named views of the parts of an engine's parameters and fp32 masters that this rank holds. No gather is needed."""

from collections.abc import Iterator
from typing import Any

from ebbtide.runtime.verify.lines import Piece


def pieces(engine: Any, *, frozen: bool) -> Iterator[Piece]:
    """Wait for all updates, and yield this rank's parts of the model's parameters and of the fp32 masters.

    Under a plan, all ranks must call this function together. ``frozen`` includes parts of frozen parameters.
    """
    if hasattr(engine.optimizer, "_ebbtide"):
        engine.optimizer.wait()  # under ZeRO-3 this also gathers small parameters, which may hold NaN until then
    for name, parameter in engine.module.named_parameters():
        if frozen or parameter.requires_grad:
            yield from _parameter(name, parameter)
        if parameter.requires_grad:
            yield from _master(engine, name, parameter)


def _parameter(name: str, parameter: Any) -> Iterator[Piece]:
    shard = getattr(parameter, "ds_tensor", None)
    if shard is None or (parameter.ds_persist and parameter.numel() == parameter.ds_numel):
        values = parameter.detach()
        if values.is_floating_point() and values.is_contiguous():
            yield Piece(name, values.view(-1), 0, values.numel())
        return
    start, count = _own_part(parameter)
    if shard.numel() >= count > 0:  # empty if the partition is on NVMe
        yield Piece(name, shard.detach().view(-1)[:count], start, parameter.ds_numel)


def _own_part(parameter: Any) -> tuple[int, int]:
    import deepspeed.comm as dist

    size = int(parameter.ds_tensor.ds_numel)
    start = size * dist.get_rank(group=parameter.ds_process_group)
    return start, max(0, min(size, parameter.ds_numel - start))


def _master(engine: Any, name: str, parameter: Any) -> Iterator[Piece]:
    if hasattr(parameter, "ds_id"):
        yield from _master_of_stage_3(engine.optimizer, name, parameter)
        return
    mapping = getattr(parameter, "_hp_mapping", None)
    if mapping is not None:
        address = mapping.lp_fragment_address
        values = mapping.get_hp_fragment().detach()
        yield Piece(f"{name}/fp32", values, address.start, parameter.numel())


def _master_of_stage_3(optimizer: Any, name: str, parameter: Any) -> Iterator[Piece]:
    group = optimizer.grad_position[optimizer.get_param_id(parameter)][0]
    if optimizer._swappable_optimizer_subgroup(group):
        return  # the state is on NVMe
    start, count = _own_part(parameter)
    if count > 0:
        values, _ = optimizer._get_fp32_opt_state_partition(parameter, release_swap_buffers=False)
        yield Piece(f"{name}/fp32", values.detach()[:count], start, parameter.ds_numel)
