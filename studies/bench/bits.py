"""Bit-by-bit comparison of two training results."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import xxhash

MOMENTS = ("exp_avg", "exp_avg_sq")


def state_of(engine: Any) -> dict[str, torch.Tensor]:
    """Return host copies of the parameters and optimizer state of a DeepSpeed engine's model, as a dict by name.

    Each trainable parameter gives several tensors of its full, unpartitioned size. ``NAME`` is the parameter that the
    model computes with, and ``NAME/fp32`` is the optimizer's master copy. ``NAME/exp_avg`` and ``NAME/exp_avg_sq`` are
    the parameter's Adam moments. If the job has several ranks, every rank must make this call. Only public functions of
    DeepSpeed are used, so that stock DeepSpeed and ebbtide are read in the same way.
    """
    from deepspeed.runtime.zero import GatheredParameters
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    states = engine.optimizer.optimizer.state.values()
    moments = [key for key in MOMENTS if any(key in state for state in states)]
    state: dict[str, torch.Tensor] = {}
    for name, parameter in engine.module.named_parameters():
        if not parameter.requires_grad:
            continue
        with GatheredParameters(parameter):
            state[name] = _copied(parameter)
        state[f"{name}/fp32"] = _copied(safe_get_full_fp32_param(parameter))
        for moment in moments:
            value = safe_get_full_optimizer_state(parameter, moment)
            state[f"{name}/{moment}"] = _copied(value)
    return state


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    # A clone, because on a machine without a GPU, .cpu() returns the live tensor itself.
    return tensor.detach().cpu().clone()


def optimizer_state(optimizer: Any) -> Iterator[torch.Tensor]:
    """Yield each fp32 master and Adam moment of a ZeRO optimizer of DeepSpeed, in DeepSpeed's order, without a copy."""
    partitioned = hasattr(optimizer, "fp32_partitioned_groups_flat")  # ZeRO-3
    masters = optimizer.fp32_partitioned_groups_flat if partitioned else optimizer.single_partition_of_fp32_groups
    for master in masters:
        yield master
        state = optimizer.optimizer.state.get(master, {})
        yield from (state[key] for key in MOMENTS if key in state)


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """Return one xxh3-128 hash, in hexadecimal, of the concatenated bytes of a series of tensors."""
    whole = xxhash.xxh3_128()
    for tensor in tensors:
        flat = tensor.detach().cpu().contiguous().view(-1)
        whole.update(flat.view(torch.uint8).numpy().data)
    return whole.hexdigest()


def differences(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> tuple[str, ...]:
    """Return the sorted names of tensors that differ between two training results, as `state_of` returns them.

    Tensors differ if they are not `torch.equal`, have different dtypes, or exist in only one of the results.
    """
    names = sorted(ours.keys() | theirs.keys())
    return tuple(
        name for name in names if name not in ours or name not in theirs or not _same(ours[name], theirs[name])
    )


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)
