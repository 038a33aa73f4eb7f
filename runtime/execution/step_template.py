"""The operations on gradients in a training step, such as copies to host memory, and what each operation waits for.

The operations are taken from the simulated schedule of a plan, so that training runs the same operations as the
simulation.
"""

from __future__ import annotations

from dataclasses import dataclass

from ebbtide.simulator.layer import Layer
from ebbtide.simulator.plan import Plan
from ebbtide.simulator.schedule import Op, OpKind
from ebbtide.simulator.schedules.ebbtide import build_schedule
from ebbtide.simulator.update.way import ways
from ebbtide.simulator.workload import Workload

_GRADIENTS = {step.kind for way in ways() for step in way.recipe.gradient_steps}


@dataclass(frozen=True, slots=True)
class GradientOp:
    """An operation on a subgroup's gradient in a micro-batch, such as the copy of the gradient to host memory.

    Attributes:
        summed: True if an earlier micro-batch of the step has already copied this subgroup's gradient to host memory.
            The operation then handles the sum of several micro-batches' gradients. Always False if the GPU sums the
            gradients, because only the last micro-batch's sum is copied to host memory.
        reduced: True if the operation waits until the gradient is reduced among ranks.
        after: Kinds of the operations on this subgroup's gradient that must end first.
    """

    op: Op
    summed: bool
    reduced: bool
    after: tuple[OpKind, ...]


def gradient_template(subgroups: tuple[int, ...], wire_dtype: str, plan: Plan) -> list[GradientOp]:
    """Return the gradient operations, such as copies, of a step's first micro-batch and of each later micro-batch.

    They are taken from the simulated schedule of the plan.
    """
    workload = _skeleton(subgroups, wire_dtype)
    schedule = build_schedule(workload, plan, iterations=1)
    sent = set[int]()  # subgroups whose gradient of the first micro-batch was sent
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


def _skeleton(subgroups: tuple[int, ...], wire_dtype: str) -> Workload:
    return Workload(
        name="template",
        layers=tuple(Layer(params=n, forward_s=1.0, backward_s=1.0) for n in subgroups),
        subgroups=subgroups,
        wire_dtype=wire_dtype,  # type: ignore[arg-type]
        gradient_accumulation_steps=2,
    )
