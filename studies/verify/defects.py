"""Defects that the test of `tune verify` puts into DeepSpeed, each with the first step and tensors that it changes."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from ebbtide.runtime.verify.lines import Piece
from ebbtide.runtime.zero.pieces import pieces

Arm = Callable[[Any], None]
Updated = list[torch.Tensor]  # the fp32 masters, with gradients, of one call of the inner optimizer
AT, FLIPPED_AT = 3, 5  # optimizer steps in which defects are made
TENSOR = "blocks.1.widen.weight"


@dataclass(frozen=True)
class Defect:
    """A defect that is put into a DeepSpeed engine to test `tune verify`.

    Attributes:
        step: Step after which the defect shows.
        names: Function that returns the names of the values in which the defect shows first. A correct
            judgement names one of them.
    """

    name: str
    arm: Arm
    step: int
    names: Callable[[Any], Collection[str]]


def piece_of(engine: Any, name: str) -> Piece | None:
    return next((piece for piece in pieces(engine, frozen=False) if piece.name == name), None)


def masters(engine: Any) -> list[str]:
    return [f"{name}/fp32" for name, _ in engine.module.named_parameters()]


# -- where a defect comes in ---------------------------------------------------------------------


def wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace a method of ``owner`` in order to put a defect into training."""
    original = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: wrapper(original, *args, **kwargs))


def around_step(engine: Any, before: Callable[[], Any], after: Callable[[Any], None]) -> None:
    """Call ``before`` and ``after`` around each optimizer step of a DeepSpeed engine.

    ``after`` gets the result of ``before``.
    """

    def stepped(step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        taken, kept = engine.global_steps, before()
        result = step(*args, **kwargs)
        if engine.global_steps != taken:
            after(kept)
        return result

    wrap(engine, "step", stepped)


def around_updates(
    engine: Any,
    before: Callable[[int, Updated], object] = lambda *_: None,
    after: Callable[[int, Updated], object] = lambda *_: None,
) -> None:
    """Call ``before`` and ``after`` around each call of the inner optimizer of a DeepSpeed engine.

    There is one such call per subgroup (ZeRO-3) or parameter group. Both functions get the number of
    the call within the step, counted from 1, and the fp32 masters that the call updates. If ``before``
    returns True, the call is left out.
    """
    inner, calls = engine.optimizer.optimizer, [0, -1]  # number of calls in this step, and number of the step

    def stepped(step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if calls[1] != engine.global_steps:
            calls[:] = [0, engine.global_steps]
        calls[0] += 1
        updated = [p for group in inner.param_groups for p in group["params"]]
        if before(calls[0], updated) is True:
            return None
        result = step(*args, **kwargs)
        after(calls[0], updated)
        return result

    wrap(inner, "step", stepped)


def before(change: Callable[[Any], object]) -> Arm:
    """Return a function that puts a defect into a given engine, to test `tune verify`.

    The defective engine calls ``change`` once, with DeepSpeed's inner optimizer, immediately before one step (`AT`).
    """

    def arm(engine: Any) -> None:
        done: list[bool] = []

        def once() -> None:
            if engine.global_steps == AT - 1 and engine.is_gradient_accumulation_boundary():
                if not done:
                    change(engine.optimizer.optimizer)
                done.append(True)

        around_step(engine, once, lambda _: None)

    return arm


def of_states(change: Callable[[dict[str, Any]], object]) -> Arm:
    """Return a function that puts a defect into a given engine, to test `tune verify`."""
    return before(lambda inner: [change(state) for state in inner.state.values()])


def after_step(change: Callable[[Any], object], steps: Collection[int] = (AT,)) -> Arm:
    def arm(engine: Any) -> None:
        def changed(_: None) -> None:
            if engine.global_steps in steps:
                change(engine)

        around_step(engine, lambda: None, changed)

    return arm


def in_tensor(
    name: str, change: Callable[[torch.Tensor], object], steps: Collection[int] = (AT,), *, first: bool = False
) -> Arm:
    """Build a defect that changes the values of one tensor of a DeepSpeed engine after given training steps.

    The result is a function that puts the defect into an engine, to test `tune verify`.

    Args:
        steps: Steps after which the values are changed.
        first: True to change only the part on the rank that holds the start of the tensor.
    """

    def changed(engine: Any) -> None:
        piece = piece_of(engine, name)
        if piece is not None and (piece.start == 0 or not first):
            change(piece.values)

    return after_step(changed, steps)


def flipped(name: str, bit: int, kind: torch.dtype, step: int = AT) -> Arm:
    return in_tensor(name, lambda v: v.view(kind)[7].bitwise_xor_(1 << bit), (step,), first=True)


def narrow(values: torch.Tensor) -> None:
    values.copy_(values.bfloat16().float())


def scaled_loss(engine: Any, factor: Callable[[int], float]) -> None:
    """Multiply the loss of each micro-batch of an engine by ``factor``, as a defect to test `tune verify`.

    ``factor`` is a function of the number of the micro-batch, counted from 1 over all steps.
    """
    seen = [0]

    def scaled(backward: Callable[..., Any], loss: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        seen[0] += 1
        by = factor(seen[0])
        return backward(loss if by == 1.0 else by * loss, *args, **kwargs)

    wrap(engine, "backward", scaled)


# -- the defects ---------------------------------------------------------------------------------


def dropped_micro_batch(engine: Any) -> None:
    """Put a defect into a DeepSpeed engine, to test `tune verify`: in one step (`AT`), the last rank loses
    the second micro-batch's gradients.
    """
    last = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
    number = (AT - 1) * engine.gradient_accumulation_steps() + 2
    scaled_loss(engine, lambda seen: 0.0 if last and seen == number else 1.0)


def values_of(engine: Any) -> torch.Tensor | None:
    """Return a copy of the values that this rank holds of the model's tensor `TENSOR`. None if it holds none."""
    piece = piece_of(engine, TENSOR)
    return None if piece is None else piece.values.clone()


def stale_parameter(engine: Any) -> None:
    """Put a defect into a DeepSpeed engine, to test `tune verify`: a parameter of the model keeps its old
    value after the update of one step (`AT`).
    """

    def restore(kept: torch.Tensor | None) -> None:
        piece = piece_of(engine, TENSOR)
        if engine.global_steps == AT and piece is not None and kept is not None:
            piece.values.copy_(kept)

    around_step(engine, lambda: values_of(engine), restore)


def skipped(some: Callable[[int], bool]) -> Arm:
    """Build a defect that leaves out some calls of DeepSpeed's inner optimizer in one step (`AT`)."""
    return lambda engine: around_updates(engine, lambda call, _: engine.global_steps == AT - 1 and some(call))


def lost_names(engine: Any) -> list[str]:
    """Return the names of the fp32 masters in an engine's second subgroup (ZeRO-3) or second parameter group (ZeRO-1
    and 2).

    Some defects in the test of `tune verify` concern only these masters.
    """
    optimizer = engine.optimizer

    def is_inside(parameter: Any) -> bool:
        if engine.zero_optimization_stage() < 3:
            return bool(parameter.dim() == 1)
        return bool(optimizer.grad_position[optimizer.get_param_id(parameter)][0] == 1)

    named = engine.module.named_parameters()
    return [f"{name}/fp32" for name, parameter in named if is_inside(parameter)]


def ahead(state: dict[str, Any]) -> None:
    state["step"] += 1


def swap_betas(inner: Any) -> None:
    for group in inner.param_groups:
        group["betas"] = tuple(reversed(group["betas"]))


MASTER = f"{TENSOR}/fp32"
DEFECTS = (
    Defect("dropped micro-batch", dropped_micro_batch, AT, lambda _: ["gradient norm"]),
    Defect("stale parameter", stale_parameter, AT, lambda _: [TENSOR]),
    Defect("skipped update", skipped(lambda _: True), AT, masters),
    Defect("wrong step count", of_states(ahead), AT, masters),
    Defect("bf16 master", in_tensor(MASTER, narrow, range(AT, 10**9)), AT, lambda _: [MASTER]),
    Defect("lost subgroup", skipped(lambda call: call == 2), AT, lost_names),
    Defect("swapped betas", before(swap_betas), AT, masters),
    Defect("flipped bit", flipped(MASTER, 20, torch.int32, FLIPPED_AT), FLIPPED_AT, lambda _: [MASTER]),
    Defect("low bit of a master", flipped(MASTER, 0, torch.int32), AT, lambda _: [MASTER, TENSOR]),
    Defect("low bit of a parameter", flipped(TENSOR, 0, torch.int16), AT, lambda _: [TENSOR]),
)
