"""Held-out defects for the test of `tune verify`, which finds differences between training runs.

The defects were written after the code of `tune verify`, so that the code was not made to find them.
"""

from collections.abc import Callable
from typing import Any

import torch
from ebbtide.runtime.zero.pieces import pieces

from studies.verify.defects import (
    AT,
    MASTER,
    TENSOR,
    Arm,
    Defect,
    after_step,
    around_step,
    around_updates,
    flipped,
    in_tensor,
    masters,
    narrow,
    of_states,
    piece_of,
    scaled_loss,
    values_of,
    wrap,
)


def wrong_settings(**wrong: Any) -> Arm:
    """Return a function that puts a defect into an engine, to test `tune verify`: DeepSpeed's inner optimizer has wrong
    settings in one step (`AT`).

    Args:
        wrong: For each setting, by name, its wrong value, or a function that computes the wrong value from the right
            one.
    """

    def arm(engine: Any) -> None:
        right: list[dict[str, Any]] = []
        groups = engine.optimizer.optimizer.param_groups

        def change(*_: Any) -> None:
            if engine.global_steps != AT - 1:
                return
            right[:] = [{key: group.get(key) for key in wrong} for group in groups]
            for group in groups:
                group.update({k: new(group[k]) if callable(new) else new for k, new in wrong.items()})

        def back(*_: Any) -> None:
            for group, settings in zip(groups, right, strict=False):
                group.update(settings)
            right.clear()

        around_updates(engine, change, back)

    return arm


def loss_scaled_twice(engine: Any) -> None:
    micro_batches = engine.gradient_accumulation_steps()
    scaled_loss(engine, lambda seen: 4.0 if (seen - 1) // micro_batches + 1 == AT else 1.0)


def _wrong_gradient(change: Callable[[torch.Tensor, list[torch.Tensor]], torch.Tensor]) -> Arm:
    """Build a defect that changes the gradients of one tensor in one step (`AT`), to test `tune verify`.

    ``change`` gets the newest gradient of the tensor, and a list with this gradient and all earlier ones. Each backward
    pass adds one gradient to the list. ``change`` returns the wrong gradient.
    """

    def arm(engine: Any) -> None:
        seen: list[torch.Tensor] = []

        def changed(gradient: torch.Tensor) -> torch.Tensor:
            seen.append(gradient.detach().clone())
            return change(gradient, seen) if engine.global_steps == AT - 1 else gradient

        dict(engine.module.named_parameters())[TENSOR].register_hook(changed)

    return arm


def _swap_halves(values: torch.Tensor) -> None:
    half = values.numel() // 2
    first = values[:half].clone()
    values[:half] = values[half : 2 * half]
    values[half : 2 * half] = first


def _narrow_masters(engine: Any) -> None:
    for piece in pieces(engine, frozen=False):
        if piece.name.endswith("/fp32"):
            narrow(piece.values)


def norm_name(engine: Any) -> str:
    """Return the name of the method of DeepSpeed's optimizer that computes the gradient norm.

    The test of `tune verify` replaces this method to cause a defect.
    """
    name = "_get_norm_groups"
    return name if hasattr(engine.optimizer, name) else "scaled_global_norm"


def norm_of_less(engine: Any) -> None:
    """Put a defect into a DeepSpeed engine, to test `tune verify`: in one step (`AT`), clipping uses a
    gradient norm that is too small.

    The norm is what it would be if some gradients were missing.
    """

    def less(whole: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        share, norms = 0.6 if engine.global_steps == AT - 1 else 1.0, whole(*args, **kwargs)
        return [share * norm for norm in norms] if isinstance(norms, list) else share * norms

    wrap(engine.optimizer, norm_name(engine), less)


def not_clipped(engine: Any) -> None:
    optimizer = engine.optimizer

    def without(clip: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        limit = optimizer.clip_grad
        optimizer.clip_grad = 0.0 if engine.global_steps == AT - 1 else limit
        try:
            return clip(*args, **kwargs)
        finally:
            optimizer.clip_grad = limit

    wrap(optimizer, "unscale_and_clip_grads", without)


def stale_in_one_forward(engine: Any) -> None:
    """Put a defect into a DeepSpeed engine, to test `tune verify`: the forward after one step (`AT`) reads
    the old value of one tensor.

    After this forward, the value is right again.
    """
    kept: list[torch.Tensor | None] = [None]

    def keep(values: torch.Tensor | None) -> None:
        if engine.global_steps == AT:
            kept[0] = values

    around_step(engine, lambda: values_of(engine), keep)

    def passed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        piece = piece_of(engine, TENSOR) if engine.global_steps == AT else None
        if piece is None or kept[0] is None:
            return forward(*args, **kwargs)
        new = piece.values.clone()
        piece.values.data.copy_(kept[0])  # without autograd noticing it
        try:
            return forward(*args, **kwargs)
        finally:
            piece.values.data.copy_(new)

    wrap(engine, "forward", passed)


def _sums(_: Any) -> list[str]:
    losses = [f"loss of micro-batch {micro}, rank {rank}" for micro in (1, 2) for rank in (0, 1)]
    return [*losses, "gradient norm"]


def _norm_or_master(_: Any) -> list[str]:
    return ["gradient norm", MASTER]


def _of_tensor(_: Any) -> list[str]:
    return [MASTER, TENSOR]


HELD_OUT = (
    Defect("wrong eps", wrong_settings(eps=1e-5), AT, masters, by_size=False),
    Defect("decay twice", wrong_settings(weight_decay=lambda decay: 2 * decay), AT, masters, by_size=False),
    Defect("wrong learning rate", wrong_settings(lr=lambda rate: 1.1 * rate), AT, masters),
    Defect("no bias correction", wrong_settings(bias_correction=False), AT, masters),
    Defect("loss scaled twice", loss_scaled_twice, AT, _sums),
    Defect("lost gradient", _wrong_gradient(lambda new, _: 0 * new), AT, _norm_or_master),
    Defect("stale gradient", _wrong_gradient(lambda _, seen: seen[-3]), AT, _norm_or_master),
    Defect("swapped halves", in_tensor(MASTER, _swap_halves), AT, _of_tensor),
    Defect("bf16 masters", after_step(_narrow_masters), AT, masters),
    Defect("not a number", in_tensor(MASTER, lambda v: v[3].fill_(float("nan")), first=True), AT, _of_tensor),
    Defect("low bit of a master", flipped(MASTER, 0, torch.int32), AT, _of_tensor, by_size=False),
    Defect("low bit of a parameter", flipped(TENSOR, 0, torch.int16), AT, _of_tensor),
    Defect("norm of less", norm_of_less, AT, lambda _: ["gradient norm"]),
    Defect("not clipped", not_clipped, AT, masters),
    Defect("lost momentum", of_states(lambda state: state["exp_avg"].zero_()), AT, masters),
    Defect("stale in one forward", stale_in_one_forward, AT + 1, _sums),
)
