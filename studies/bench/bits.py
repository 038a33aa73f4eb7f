"""Are two training results the same, bit for bit?"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import xxhash

MOMENTS = ("exp_avg", "exp_avg_sq")


def state_of(engine: Any) -> dict[str, torch.Tensor]:
    """Copies of everything that training has changed, by name, in host memory.

    Per trainable parameter, all in full size whatever the partitioning: ``NAME`` as the model
    computes with it, ``NAME/fp32`` the optimizer's master, and its moments (``NAME/exp_avg``,
    ``NAME/exp_avg_sq``). A collective operation with several ranks. Goes through DeepSpeed's public
    calls, so that stock and ebbtide are asked in the same way.
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
    # clone(): on a machine without a GPU .cpu() would hand out the live tensor itself.
    return tensor.detach().cpu().clone()


def optimizer_state(optimizer: Any) -> Iterator[torch.Tensor]:
    """Yield all masters and moments of a ZeRO-3 optimizer, in DeepSpeed's order, without a copy."""
    for master in optimizer.fp32_partitioned_groups_flat:
        yield master
        state = optimizer.optimizer.state.get(master, {})
        yield from (state[key] for key in MOMENTS if key in state)


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """xxh3-128 of their bytes."""
    whole = xxhash.xxh3_128()
    for tensor in tensors:
        flat = tensor.detach().cpu().contiguous().view(-1)
        whole.update(flat.view(torch.uint8).numpy().data)
    return whole.hexdigest()


def differences(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> tuple[str, ...]:
    """Return the names of tensors that are not `torch.equal` or that only one side has. Empty: same bits."""
    names = sorted(ours.keys() | theirs.keys())
    return tuple(
        name for name in names if name not in ours or name not in theirs or not _same(ours[name], theirs[name])
    )


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)
