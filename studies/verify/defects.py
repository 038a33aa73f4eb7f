"""Defects that are put into a stock engine, each with where it shows first."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch

from runtime.verify.lines import Piece
from runtime.zero.pieces import pieces

AT, FLIPPED_AT = 3, 5  # optimizer steps
TENSOR = "blocks.1.widen.weight"


@dataclass(frozen=True)
class Defect:
    """What is done to an engine, before its steps are recorded.

    Attributes:
        step: after which it shows.
        names: what shows first; one of them is named if it is found rightly.
        by_size: it is large enough to be told from the rounding of another Adam.
        dtype: of the training that it is put into; what 16 bits would hide is put into fp32.
        least_ranks: that it can be put into.
    """

    name: str
    arm: Callable[[Any], None]
    step: int
    names: Callable[[Any], Collection[str]]
    by_size: bool = True
    dtype: str = "bf16"
    least_ranks: int = 1

    @property
    def folder(self) -> str:
        """Of its run."""
        return self.name if self.dtype == "bf16" else f"{self.dtype} {self.name}"


def piece_of(engine: Any, name: str) -> Piece | None:
    return next((piece for piece in pieces(engine, frozen=False) if piece.name == name), None)


def masters(engine: Any) -> list[str]:
    return [f"{name}/fp32" for name, _ in engine.module.named_parameters()]


def around_step(engine: Any, before: Callable[[], Any], after: Callable[[Any], None]) -> None:
    """Calls both around every optimizer step; ``after`` with what ``before`` gave."""
    step = engine.step

    def stepped(*args: Any, **kwargs: Any) -> Any:
        taken, kept = engine.global_steps, before()
        result = step(*args, **kwargs)
        if engine.global_steps != taken:
            after(kept)
        return result

    engine.step = stepped


def before(engine: Any, change: Callable[[Any], None]) -> None:
    """Calls ``change`` with DeepSpeed's inner optimizer once, before step `AT`."""
    done: list[bool] = []

    def once() -> None:
        if engine.global_steps == AT - 1 and engine.is_gradient_accumulation_boundary():
            if not done:
                change(engine.optimizer.optimizer)
            done.append(True)

    around_step(engine, once, lambda _: None)


def dropped_micro_batch(engine: Any) -> None:
    """The second one's gradients are lost on the last rank."""
    backward, seen = engine.backward, [0]
    last = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1

    def lossy(loss: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        seen[0] += 1
        number = (AT - 1) * engine.gradient_accumulation_steps() + 2
        return backward(loss * 0.0 if last and seen[0] == number else loss, *args, **kwargs)

    engine.backward = lossy


def stale_parameter(engine: Any) -> None:
    """One step's update does not reach what the model computes with."""

    def old() -> torch.Tensor | None:
        piece = piece_of(engine, TENSOR)
        return None if piece is None else piece.values.clone()

    def restore(kept: torch.Tensor | None) -> None:
        piece = piece_of(engine, TENSOR)
        if engine.global_steps == AT and piece is not None and kept is not None:
            piece.values.copy_(kept)

    around_step(engine, old, restore)


def _skip(engine: Any, skipped: Callable[[int], bool]) -> None:
    """Leaves out calls of the inner optimizer in step `AT`: one a subgroup or parameter group."""
    inner = engine.optimizer.optimizer
    step, calls = inner.step, [0, -1]  # calls in this step, which step

    def stepped(*args: Any, **kwargs: Any) -> Any:
        if calls[1] != engine.global_steps:
            calls[:] = [0, engine.global_steps]
        calls[0] += 1
        if engine.global_steps == AT - 1 and skipped(calls[0]):
            return None
        return step(*args, **kwargs)

    inner.step = stepped


def skipped_update(engine: Any) -> None:
    _skip(engine, lambda _: True)


def lost_subgroup(engine: Any) -> None:
    _skip(engine, lambda call: call == 2)


def lost_names(engine: Any) -> list[str]:
    """Of the second subgroup (ZeRO-3) or parameter group."""
    optimizer = engine.optimizer

    def is_inside(parameter: Any) -> bool:
        if engine.zero_optimization_stage() < 3:
            return bool(parameter.dim() == 1)
        return bool(optimizer.grad_position[optimizer.get_param_id(parameter)][0] == 1)

    named = engine.module.named_parameters()
    return [f"{name}/fp32" for name, parameter in named if is_inside(parameter)]


def wrong_step_count(engine: Any) -> None:
    def ahead(inner: Any) -> None:
        for state in inner.state.values():
            state["step"] += 1

    before(engine, ahead)


def swapped_betas(engine: Any) -> None:
    def swap(inner: Any) -> None:
        for group in inner.param_groups:
            group["betas"] = tuple(reversed(group["betas"]))

    before(engine, swap)


def narrow_master(engine: Any) -> None:
    def narrowed(_: None) -> None:
        piece = piece_of(engine, f"{TENSOR}/fp32")
        if engine.global_steps >= AT and piece is not None:
            piece.values.copy_(piece.values.bfloat16().float())

    around_step(engine, lambda: None, narrowed)


def flipped_bit(engine: Any) -> None:
    def flip(_: None) -> None:
        piece = piece_of(engine, f"{TENSOR}/fp32")
        if engine.global_steps == FLIPPED_AT and piece is not None and piece.start == 0:
            piece.values.view(torch.int32)[7] ^= 1 << 20

    around_step(engine, lambda: None, flip)


DEFECTS = (
    Defect("dropped micro-batch", dropped_micro_batch, AT, lambda _: ["gradient norm"]),
    Defect("stale parameter", stale_parameter, AT, lambda _: [TENSOR]),
    Defect("skipped update", skipped_update, AT, masters),
    Defect("wrong step count", wrong_step_count, AT, masters),
    Defect("bf16 master", narrow_master, AT, lambda _: [f"{TENSOR}/fp32"]),
    Defect("lost subgroup", lost_subgroup, AT, lost_names),
    Defect("swapped betas", swapped_betas, AT, masters),
    Defect("flipped bit", flipped_bit, FLIPPED_AT, lambda _: [f"{TENSOR}/fp32"], by_size=False),
)
