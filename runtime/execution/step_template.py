"""What the runtime executes at every step, cut out of a schedule's steady state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ebbtide.simulator.plan import Plan
from ebbtide.simulator.schedule import Op, OpKind
from ebbtide.simulator.schedules.ebbtide import build_schedule
from ebbtide.simulator.update.recipes import Slot, Wait
from ebbtide.simulator.update.way import ways
from ebbtide.simulator.workload import Layer, Workload

_STEPS = [step for way in ways() for step in way.recipe.steps]
_EXECUTED = {step.kind for step in _STEPS}
_AHEAD = {step.kind for step in _STEPS if step.early}
_VISITS = {step.kind for step in _STEPS if step.takes == Slot.STAGING}
_READ_GRADIENTS = {step.kind for step in _STEPS if Wait.GRADIENT in step.waits}
_GRADIENTS = {step.kind for way in ways() for step in way.recipe.gradient_steps}


@dataclass(frozen=True, slots=True)
class TemplateOp:
    """One op of every step.

    Attributes:
        now: positions, in the template, of ops of the same step it waits for.
        before: positions of ops of the previous step it waits for. Who takes a staging slot waits
            for who gave it back: `Visits` knows.
        ahead: it starts behind the rest, and is the next step's.
        needs_norm: it waits for the norm barrier itself, not only for an op that does.
        needs_gradient: it reads its subgroup's gradient.
        needs_arrival: which is complete when its way home has ended; else the norm is behind it.
        guessed: it starts in backward, as far as its gradient is complete, if anybody guesses; else
            ahead of the op that reads its result, behind the norm.
    """

    op: Op
    now: tuple[int, ...]
    before: tuple[int, ...]
    ahead: bool
    needs_norm: bool
    needs_gradient: bool
    needs_arrival: bool
    guessed: bool


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


def step_template(
    subgroups: tuple[int, ...], wire_dtype: str, plan: Plan, arrival: Sequence[int] | None = None
) -> list[TemplateOp]:
    """The update ops of one steady-state iteration of ``build_schedule``, in issue order.

    The third iteration is taken: by then every slot has been used, so that all waits for the
    previous iteration are there. In the first step they are trivially satisfied.

    Args:
        arrival: in which order gradients are complete; None: the last subgroup's first.

    Raises:
        PlanError: the plan is for another number of subgroups.
    """
    workload = _skeleton(subgroups, wire_dtype)
    schedule = build_schedule(workload, plan, iterations=3, arrival=arrival)
    last = [op for op in schedule.ops if op.iteration == 2 and op.kind in _EXECUTED]
    now = {op.id: position for position, op in enumerate(last)}
    twins = [op for op in schedule.ops if op.iteration == 1 and op.kind in _EXECUTED]
    keys = {(op.kind, op.subgroup): position for position, op in enumerate(last)}
    before = {op.id: keys[op.kind, op.subgroup] for op in twins}
    updates = {op.subgroup: op.id for op in last if op.kind in _READ_GRADIENTS}
    norm = schedule.of_kind(OpKind.NORM, iteration=2)[0].id
    guessed = {s for s, early in enumerate(plan.guessed) if early}
    return [
        TemplateOp(
            op=op,
            now=tuple(now[i] for i in op.after if i in now and op.kind not in _VISITS),
            before=tuple(before[i] for i in op.after if i in before and op.kind not in _VISITS),
            ahead=op.kind in _AHEAD and op.id > updates[op.subgroup],
            needs_norm=norm in op.after,
            needs_gradient=op.kind in _READ_GRADIENTS,
            needs_arrival=any(schedule.ops[i].kind in _GRADIENTS for i in op.after),
            guessed=op.subgroup in guessed and op.id < norm,
        )
        for op in last
    ]


def gradient_template(subgroups: tuple[int, ...], wire_dtype: str, plan: Plan) -> list[GradientOp]:
    """The ops of gradients in a first micro-batch, and in each of those behind it."""
    workload = _skeleton(subgroups, wire_dtype, micro_batches=2)
    schedule = build_schedule(workload, plan, iterations=1)
    home = set[int]()  # subgroups whose gradient of the first micro-batch has been sent
    items = []
    for op in schedule.ops:
        if op.kind not in _GRADIENTS:
            continue
        before = [schedule.ops[i] for i in op.after]
        after = tuple(other.kind for other in before if other.kind in _GRADIENTS)
        reduced = len(after) < len(before)
        items.append(GradientOp(op, op.subgroup in home, reduced, after))
        if op.kind == OpKind.GRADIENT_D2H:
            home.add(op.subgroup)
    return items


def _skeleton(subgroups: tuple[int, ...], wire_dtype: str, micro_batches: int = 1) -> Workload:
    """The update's DAG depends on the subgroups alone, so one layer each will do."""
    return Workload(
        name="template",
        layers=tuple(Layer(params=n, forward_s=1.0, backward_s=1.0) for n in subgroups),
        subgroups=subgroups,
        wire_dtype=wire_dtype,  # type: ignore[arg-type]
        gradient_accumulation_steps=micro_batches,
    )
