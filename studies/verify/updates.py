"""Held-out defects for the test of `tune verify`: wrong inputs or arithmetic of the optimizer update.

All these defects were written before `tune verify` was tried on any of them. If `tune verify` missed a defect, its code
was improved afterwards. Most defects affect one subgroup (ZeRO-3) or one parameter group, as an offload that confuses
its buffers would.
"""

from collections.abc import Callable, Collection
from typing import Any

import torch

from studies.verify.defects import AT, Defect, Updated, around_updates, lost_names, masters, narrow, of_states, wrap
from studies.verify.held_out import norm_name, wrong_settings

BOTH = 2  # number of subgroups or parameter groups. The second one gets the defect


def scaled_gradient(engine: Any) -> None:
    """Put a defect into a DeepSpeed engine, to test `tune verify`: in one step (`AT`), a subgroup's gradient is scaled.

    The factor is 1 + 2^-7, which changes a bf16 number by about its last bit. Scaling happens after the
    gradient norm was computed.
    """

    def scaled(call: int, updated: Updated) -> None:
        if engine.global_steps == AT - 1 and call == BOTH:
            for master in updated:
                master.grad.mul_(1 + 2.0**-7)  # type: ignore[union-attr]

    around_updates(engine, scaled)


def decay_in_another_group(engine: Any) -> None:
    """Put a defect into a DeepSpeed engine, to test `tune verify`: in one step (`AT`), weight decay is
    applied to a parameter group that has none.
    """
    decay = max(group["weight_decay"] for group in engine.optimizer.optimizer.param_groups)
    wrong_settings(weight_decay=lambda own: own or decay)(engine)


def _lose_moments(state: dict[str, Any]) -> None:
    """Set both Adam moments in an optimizer state to zero.

    This is the defect of a resume that restores only masters and step counts.
    """
    state["exp_avg"].zero_()
    state["exp_avg_sq"].zero_()


def stale_master(engine: Any) -> None:
    """Put a defect into a DeepSpeed engine, to test `tune verify`: in one step (`AT`), one subgroup's
    update starts from its fp32 master copy of one step before.
    """
    old: Updated = []

    def restored(call: int, updated: Updated) -> None:
        if call != BOTH:
            return
        if engine.global_steps == AT - 2:
            old[:] = [master.detach().clone() for master in updated]
        if engine.global_steps == AT - 1:
            for master, kept in zip(updated, old, strict=True):
                master.data.copy_(kept)

    around_updates(engine, restored)


def _masters_of(optimizer: Any) -> Updated:
    """Return a list of the flat fp32 masters of DeepSpeed's optimizer: one per subgroup (ZeRO-3) or parameter group."""
    name = "fp32_partitioned_groups_flat"
    if hasattr(optimizer, name):
        return list(getattr(optimizer, name))
    return list(optimizer.single_partition_of_fp32_groups)


def _behind_the_norm(engine: Any, change: Callable[[Updated], None]) -> None:
    """Change the gradients of a DeepSpeed engine in one step (`AT`), after the gradient norm is computed and before
    clipping.

    ``change`` is called with a list of all flat fp32 master tensors. The gradients to change are their ``.grad``
    tensors. The change is a defect to test `tune verify`.
    """
    done: list[bool] = []

    def clipped(clip: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if engine.global_steps == AT - 1 and not done:
            done.append(True)
            change(_masters_of(engine.optimizer))
        return clip(*args, **kwargs)

    wrap(engine.optimizer, "unscale_and_clip_grads", clipped)


def exchanged_updates(engine: Any) -> None:
    """Put a defect into a DeepSpeed engine, to test `tune verify`: in one step (`AT`), two subgroups are
    updated with each other's gradients.

    If their sizes differ, only as many elements as the smaller one has are exchanged.
    """

    def exchange(flat: Updated) -> None:
        one, other = (master.grad for master in flat[:2])
        assert one is not None
        assert other is not None
        count = min(one.numel(), other.numel())
        kept = one[:count].clone()
        one[:count] = other[:count]
        other[:count] = kept

    _behind_the_norm(engine, exchange)


def exchanged_names(engine: Any) -> Collection[str]:
    optimizer = engine.optimizer
    if engine.zero_optimization_stage() < 3:
        return masters(engine)
    named = engine.module.named_parameters()
    return [
        f"{name}/fp32"
        for name, parameter in named
        if optimizer.grad_position[optimizer.get_param_id(parameter)][0] < BOTH
    ]


def narrow_sums(engine: Any) -> None:
    """Put a defect into a DeepSpeed engine, to test `tune verify`: in one step (`AT`), gradients summed
    over micro-batches are rounded to bf16.
    """

    def narrowed(flat: Updated) -> None:
        for master in flat:
            assert master.grad is not None
            narrow(master.grad)

    _behind_the_norm(engine, narrowed)


def norm_without_a_rank(engine: Any) -> None:
    """Put a defect into a DeepSpeed engine, to test `tune verify`: in one step (`AT`), the gradient norm
    lacks the gradients of the last rank.
    """
    import deepspeed.comm as dist

    def without(reduce: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kw: Any) -> Any:
        if dist.get_rank() == dist.get_world_size() - 1:
            tensor.zero_()
        return reduce(tensor, *args, **kw)

    def normed(whole: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if engine.global_steps != AT - 1:
            return whole(*args, **kwargs)
        reduce = dist.all_reduce
        wrap(dist, "all_reduce", without)
        try:
            return whole(*args, **kwargs)
        finally:
            dist.all_reduce = reduce

    wrap(engine.optimizer, norm_name(engine), normed)


def eps_inside(engine: Any) -> None:
    """Put a defect into a DeepSpeed engine, to test `tune verify`: each update is m / sqrt(v + eps) instead
    of m / (sqrt(v) + eps).
    """
    inner = engine.optimizer.optimizer

    def corrected(_: int, updated: Updated) -> None:
        group = inner.param_groups[0]
        (first, second), eps = group["betas"], group["eps"]
        for master in updated:
            state = inner.state[master]
            count = int(state["step"])
            m = state["exp_avg"] / (1 - first**count)
            v = state["exp_avg_sq"] / (1 - second**count)
            right, wrong = m / (v.sqrt() + eps), m / (v + eps).sqrt()
            master.data += group["lr"] * (right - wrong)

    around_updates(engine, after=corrected)


def never_corrected(engine: Any) -> None:
    """Put a defect into a DeepSpeed engine, to test `tune verify`: updates lack Adam's bias correction, so
    that each is m / sqrt(v).
    """
    for group in engine.optimizer.optimizer.param_groups:
        group["bias_correction"] = False


def late_rate(engine: Any) -> None:
    """Put a defect into a DeepSpeed engine, to test `tune verify`: from a certain step (`AT`) on, updates
    use the learning rate of the step before.
    """
    inner = engine.optimizer.optimizer
    last: dict[int, list[float]] = {}

    def late(*_: Any) -> None:
        now = [group["lr"] for group in inner.param_groups]
        last.setdefault(engine.global_steps, now)
        if engine.global_steps >= AT - 1:
            _set_rates(inner, last[engine.global_steps - 1])

    def again(*_: Any) -> None:
        _set_rates(inner, last[engine.global_steps])

    around_updates(engine, late, again)


def _set_rates(inner: Any, rates: list[float]) -> None:
    for group, rate in zip(inner.param_groups, rates, strict=False):
        group["lr"] = rate


def _vectors(engine: Any) -> list[str]:
    shapes = ((n, getattr(p, "ds_shape", p.shape)) for n, p in engine.module.named_parameters())
    return [f"{name}/fp32" for name, shape in shapes if len(shape) == 1]


UPDATES = (
    Defect("scaled gradient", scaled_gradient, AT, lost_names, dtype="fp32"),
    Defect("decay in another group", decay_in_another_group, AT, _vectors, dtype="fp32"),
    Defect("moments not loaded", of_states(_lose_moments), AT, masters),
    Defect("stale master", stale_master, AT, lost_names),
    Defect("exchanged updates", exchanged_updates, AT, exchanged_names),
    Defect("bf16 sums", narrow_sums, AT, masters, dtype="fp32"),
    Defect("norm without a rank", norm_without_a_rank, AT, lambda _: ["gradient norm"], least_ranks=2),
    Defect("eps inside the root", eps_inside, 1, masters),
    Defect("never bias-corrected", never_corrected, 1, masters),
    Defect("rate of the step before", late_rate, AT, masters),
)
