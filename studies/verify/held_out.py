"""Defects that the judge of `tune verify` was not written beside: tried on it afterwards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from runtime.zero.pieces import pieces
from studies.verify.defects import (
    AT,
    TENSOR,
    Defect,
    around_step,
    before,
    masters,
    piece_of,
)

MASTER = f"{TENSOR}/fp32"


def _wrong_settings(**wrong: Any) -> Callable[[Any], None]:
    """The inner optimizer's groups have other settings in step `AT`; a callable changes one."""

    def arm(engine: Any) -> None:
        inner = engine.optimizer.optimizer
        step = inner.step

        def stepped(*args: Any, **kwargs: Any) -> Any:
            if engine.global_steps != AT - 1:
                return step(*args, **kwargs)
            right = [{key: group.get(key) for key in wrong} for group in inner.param_groups]
            for group in inner.param_groups:
                group.update(_changed(group, wrong))
            try:
                return step(*args, **kwargs)
            finally:
                for group, settings in zip(inner.param_groups, right, strict=True):
                    group.update(settings)

        inner.step = stepped

    return arm


def _changed(group: Mapping[str, Any], wrong: Mapping[str, Any]) -> dict[str, Any]:
    return {key: new(group[key]) if callable(new) else new for key, new in wrong.items()}


def loss_scaled_twice(engine: Any) -> None:
    backward, seen = engine.backward, [0]

    def scaled(loss: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        seen[0] += 1
        step = (seen[0] - 1) // engine.gradient_accumulation_steps() + 1
        return backward(4.0 * loss if step == AT else loss, *args, **kwargs)

    engine.backward = scaled


def _wrong_gradient(
    change: Callable[[torch.Tensor, list[torch.Tensor]], torch.Tensor],
) -> Callable[[Any], None]:
    """One tensor's gradients of step `AT` are changed, with those that came before at hand."""

    def arm(engine: Any) -> None:
        seen: list[torch.Tensor] = []

        def changed(gradient: torch.Tensor) -> torch.Tensor:
            seen.append(gradient.detach().clone())
            return change(gradient, seen) if engine.global_steps == AT - 1 else gradient

        dict(engine.module.named_parameters())[TENSOR].register_hook(changed)

    return arm


def _after_step(change: Callable[[Any], None], step: int = AT) -> Callable[[Any], None]:
    def arm(engine: Any) -> None:
        around_step(
            engine, lambda: None, lambda _: change(engine) if engine.global_steps == step else None
        )

    return arm


def _swap_halves(engine: Any) -> None:
    piece = piece_of(engine, MASTER)
    if piece is not None:
        half = piece.values.numel() // 2
        first = piece.values[:half].clone()
        piece.values[:half] = piece.values[half : 2 * half]
        piece.values[half : 2 * half] = first


def _narrow_masters(engine: Any) -> None:
    for piece in pieces(engine, frozen=False):
        if piece.name.endswith("/fp32"):
            piece.values.copy_(piece.values.bfloat16().float())


def _not_a_number(engine: Any) -> None:
    piece = piece_of(engine, MASTER)
    if piece is not None and piece.start == 0:
        piece.values[3] = float("nan")


def _low_bit(name: str, kind: torch.dtype) -> Callable[[Any], None]:
    def flip(engine: Any) -> None:
        piece = piece_of(engine, name)
        if piece is not None and piece.start == 0:
            piece.values.view(kind)[7] ^= 1

    return flip


def norm_of_less(engine: Any) -> None:
    """The clipping factor comes from a norm that lacks some gradients."""
    optimizer, factor = engine.optimizer, 0.6
    share = lambda: factor if engine.global_steps == AT - 1 else 1.0  # noqa: E731
    if hasattr(optimizer, "_get_norm_groups"):
        groups = optimizer._get_norm_groups
        optimizer._get_norm_groups = lambda *a, **k: [share() * norm for norm in groups(*a, **k)]
    else:
        whole = optimizer.scaled_global_norm
        optimizer.scaled_global_norm = lambda *a, **k: share() * whole(*a, **k)


def not_clipped(engine: Any) -> None:
    optimizer, unscale = engine.optimizer, engine.optimizer.unscale_and_clip_grads

    def without(*args: Any, **kwargs: Any) -> Any:
        limit = optimizer.clip_grad
        optimizer.clip_grad = 0.0 if engine.global_steps == AT - 1 else limit
        try:
            return unscale(*args, **kwargs)
        finally:
            optimizer.clip_grad = limit

    optimizer.unscale_and_clip_grads = without


def lost_momentum(engine: Any) -> None:
    def lose(inner: Any) -> None:
        for state in inner.state.values():
            state["exp_avg"].zero_()

    before(engine, lose)


def stale_in_one_forward(engine: Any) -> None:
    """The passes behind step `AT` read one tensor as it was; afterwards it is right again."""
    kept: list[torch.Tensor | None] = [None]

    def old() -> torch.Tensor | None:
        piece = piece_of(engine, TENSOR)
        return None if piece is None else piece.values.clone()

    def keep(values: torch.Tensor | None) -> None:
        if engine.global_steps == AT:
            kept[0] = values

    around_step(engine, old, keep)
    forward = engine.forward

    def passed(*args: Any, **kwargs: Any) -> Any:
        piece = piece_of(engine, TENSOR) if engine.global_steps == AT else None
        if piece is None or kept[0] is None:
            return forward(*args, **kwargs)
        new = piece.values.clone()
        piece.values.data.copy_(kept[0])  # autograd does not hear of it
        try:
            return forward(*args, **kwargs)
        finally:
            piece.values.data.copy_(new)

    engine.forward = passed


def _sums(_: Any) -> list[str]:
    losses = [f"loss of micro-batch {micro}, rank {rank}" for micro in (1, 2) for rank in (0, 1)]
    return [*losses, "gradient norm"]


def _norm_or_master(_: Any) -> list[str]:
    return ["gradient norm", MASTER]


def _of_tensor(_: Any) -> list[str]:
    return [MASTER, TENSOR]


HELD_OUT = (
    Defect("wrong eps", _wrong_settings(eps=1e-5), AT, masters, by_size=False),
    Defect("decay twice", _wrong_settings(weight_decay=lambda decay: 2 * decay), AT, masters,
           by_size=False),
    Defect("wrong learning rate", _wrong_settings(lr=lambda rate: 1.1 * rate), AT, masters),
    Defect("no bias correction", _wrong_settings(bias_correction=False), AT, masters),
    Defect("loss scaled twice", loss_scaled_twice, AT, _sums),
    Defect("lost gradient", _wrong_gradient(lambda new, _: 0 * new), AT, _norm_or_master),
    Defect("stale gradient", _wrong_gradient(lambda _, seen: seen[-3]), AT, _norm_or_master),
    Defect("swapped halves", _after_step(_swap_halves), AT, _of_tensor),
    Defect("bf16 masters", _after_step(_narrow_masters), AT, masters),
    Defect("not a number", _after_step(_not_a_number), AT, _of_tensor),
    Defect("low bit of a master", _after_step(_low_bit(MASTER, torch.int32)), AT, _of_tensor,
           by_size=False),
    Defect("low bit of a parameter", _after_step(_low_bit(TENSOR, torch.int16)), AT, _of_tensor),
    Defect("norm of less", norm_of_less, AT, lambda _: ["gradient norm"]),
    Defect("not clipped", not_clipped, AT, masters),
    Defect("lost momentum", lost_momentum, AT, masters),
    Defect("stale in one forward", stale_in_one_forward, AT + 1, _sums),
)  # fmt: skip
