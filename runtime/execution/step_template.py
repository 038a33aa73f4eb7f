"""The gradients' ops of every step, cut out of a schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ebbtide.simulator.plan import Plan
from ebbtide.simulator.schedule import Op, OpKind
from ebbtide.simulator.schedules.ebbtide import build_schedule
from ebbtide.simulator.update.recipes import Bytes
from ebbtide.simulator.update.way import ways
from ebbtide.simulator.workload import Layer, Workload

_GRADIENTS = {step.kind for way in ways() for step in way.recipe.gradient_steps}


@dataclass(frozen=True, slots=True)
class GradientOp:
    """One op of every micro-batch.

    Attributes:
        summed: of every micro-batch but the first; False where there is one in the last alone.
        reduced: it waits for the reduction.
        after: the ops of its subgroup's gradient that it waits for, the latest of each kind.
    """

    op: Op
    summed: bool
    reduced: bool
    after: tuple[OpKind, ...]


def amounts(subgroups: Sequence[int], wire_dtype: str = "bf16") -> Bytes:
    """Return the bytes per parameter of what is executed, for the measured timeline."""
    return Bytes.of(_skeleton(tuple(subgroups), wire_dtype))


def gradient_template(subgroups: tuple[int, ...], wire_dtype: str, plan: Plan) -> list[GradientOp]:
    """Return the ops of gradients in a first micro-batch, and in each of those behind it."""
    workload = _skeleton(subgroups, wire_dtype, micro_batches=2)
    schedule = build_schedule(workload, plan, iterations=1)
    sent = set[int]()  # subgroups whose gradient of the first micro-batch has been sent
    items = []
    for op in schedule.ops:
        if op.kind not in _GRADIENTS:
            continue
        before = [schedule.ops[i] for i in op.after]
        after = tuple(other.kind for other in before if other.kind in _GRADIENTS)
        reduced = len(after) < len(before)
        items.append(GradientOp(op, op.subgroup in sent, reduced, after))
        if op.kind == OpKind.GRADIENT_D2H:
            sent.add(op.subgroup)
    return items


def _skeleton(subgroups: tuple[int, ...], wire_dtype: str, micro_batches: int = 1) -> Workload:
    """Return the update's DAG depends on the subgroups alone, so one layer each will do."""
    return Workload(
        name="template",
        layers=tuple(Layer(params=n, forward_s=1.0, backward_s=1.0) for n in subgroups),
        subgroups=subgroups,
        wire_dtype=wire_dtype,  # type: ignore[arg-type]
        gradient_accumulation_steps=micro_batches,
    )
