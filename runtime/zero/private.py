"""Every touch of DeepSpeed's private members, in one place.

Name-mangled members are used by DeepSpeed's own subclasses too (SuperOffload, ZenFlow). A DeepSpeed
outside the tested range is refused, and `check` fails loudly if a member has gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

TESTED = ("0.19.8", "0.20")  # first version that works, first that was not tested

_STAGE3_MEMBERS = (
    "fp16_groups", "fp16_partitioned_groups", "fp16_partitioned_groups_flat",
    "fp16_partitioned_groups_flat_numel", "fp32_partitioned_groups_flat", "sub_group_to_group_id",
    "grad_partitions_flat_buffer", "grad_position", "norm_for_param_grads", "param_dict",
    "persistent_parameters", "micro_step_id", "_offload_boundary_param_ids", "subgroup_to_device",
    "lp_param_buffer", "ipg_buckets", "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition",
)  # fmt: skip

_STAGE2_MEMBERS = (
    "bit16_groups", "bit16_groups_flat", "parallel_partitioned_bit16_groups",
    "single_partition_of_fp32_groups", "params_in_partition", "real_dp_process_group",
    "grad_position", "norm_for_param_grads", "micro_step_id", "_offload_accumulated_param_ids",
    "accumulated_grads_in_cpu", "param_buffer_of_bit16_for_cpu_offload_groups",
    "averaged_gradients", "local_overflow", "nccl_start_alignment_factor", "offload_gradient_dict",
    "_get_compact_grad_partition_slice", "_use_compact_grad_partition_buffer",
    "_wait_for_offload_copies", "async_accumulate_grad_in_cpu_via_gpu",
)  # fmt: skip


class UnsupportedDeepSpeedError(RuntimeError):
    """This DeepSpeed is outside the tested range or lacks a member that is needed."""


def check_version() -> None:
    """Refuses a DeepSpeed that was not tested.

    Raises:
        UnsupportedDeepSpeedError: with the version found and the range.
    """
    import deepspeed
    from packaging.version import Version

    found, (first, limit) = Version(deepspeed.__version__), TESTED
    if not Version(first) <= found < Version(limit):
        raise UnsupportedDeepSpeedError(
            f"deepspeed must be >= {first} and < {limit}, but got {found}: install a version in "
            f"that range (pip install 'deepspeed>={first},<{limit}')"
        )


def check_members(optimizer: Any) -> None:
    """Refuses an optimizer that lacks a member this module relies on."""
    partitioned = hasattr(optimizer, "fp16_partitioned_groups_flat")
    members = _STAGE3_MEMBERS if partitioned else _STAGE2_MEMBERS
    missing = [name for name in members if not hasattr(optimizer, name)]
    if missing:
        raise UnsupportedDeepSpeedError(
            f"DeepSpeed's {type(optimizer).__name__} must have {missing}, but has not: "
            f"ebbtide was tested with DeepSpeed >= {TESTED[0]} and < {TESTED[1]}"
        )


def gradient_partitions(optimizer: Any) -> dict[int, torch.Tensor]:
    """ds_id -> the parameter's view of the flat gradient buffer."""
    return optimizer._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition  # type: ignore[no-any-return]


def in_bucket(optimizer: Any, partitions: Iterable[torch.Tensor]) -> bool:
    """Some of these gradients lie in a reduction bucket, which the next gradients overwrite.

    A bucket that holds a single parameter is reduced in place; others into new memory.
    """
    buffers = (bucket.buffer for bucket in optimizer.ipg_buckets.values())
    taken = {b.untyped_storage().data_ptr() for b in buffers if b is not None}
    return any(p.untyped_storage().data_ptr() in taken for p in partitions)


def coordinators(optimizer: Any) -> list[Any]:
    """The parameter coordinators of all phases that exist so far."""
    coordinator = optimizer.parameter_offload.get_param_coordinator()
    return [coordinator] if coordinator is not None else []


def prefetch_elements(coordinator: Any) -> int:
    """How far the coordinator gathers ahead of the current module."""
    return coordinator._PartitionedParameterCoordinator__prefetch_bucket_sz  # type: ignore[no-any-return]


def set_prefetch_elements(coordinator: Any, elements: int) -> None:
    """0 keeps the coordinator from touching parameters ahead of the current module."""
    coordinator._PartitionedParameterCoordinator__prefetch_bucket_sz = elements


def gate_gathers(
    parameters: Iterable[Any], gate: Callable[[Iterable[Any]], None]
) -> Callable[[], None]:
    """Calls ``gate(parameters about to be gathered)`` before every gather; returns an undo.

    Every reader of a partitioned parameter, be it forward, GatheredParameters or a state_dict,
    goes through ``param.all_gather`` or ``param.all_gather_coalesced``.
    """
    undo: list[tuple[Any, Any, Any]] = []
    for parameter in parameters:
        if not hasattr(parameter, "all_gather_coalesced"):
            continue
        gather, coalesced = parameter.all_gather, parameter.all_gather_coalesced
        undo.append((parameter, gather, coalesced))
        parameter.all_gather = _gated_gather(parameter, gather, gate)
        parameter.all_gather_coalesced = _gated_coalesced(coalesced, gate)

    def restore() -> None:
        for parameter, gather, coalesced in undo:
            parameter.all_gather, parameter.all_gather_coalesced = gather, coalesced

    return restore


def _gated_gather(
    parameter: Any, gather: Callable[..., Any], gate: Callable[[Iterable[Any]], None]
) -> Callable[..., Any]:
    def all_gather(param_list: Any = None, *args: Any, **kwargs: Any) -> Any:
        gate([parameter] if param_list is None else param_list)
        return gather(param_list, *args, **kwargs)

    return all_gather


def _gated_coalesced(
    gather: Callable[..., Any], gate: Callable[[Iterable[Any]], None]
) -> Callable[..., Any]:
    def all_gather_coalesced(params: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
        params = list(params)
        gate(params)
        return gather(params, *args, **kwargs)

    return all_gather_coalesced
