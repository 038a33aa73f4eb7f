"""Changes the plan of a running engine between two steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from runtime.execution.gradients import GradientHomes
from runtime.execution.subgroup_state import SubgroupState
from runtime.zero.guard import check_plan
from simulator.plan import Plan

if TYPE_CHECKING:
    from runtime.zero.stage3 import Attachment


def switch_plan(engine: Any, plan: Plan) -> None:
    """Moves every subgroup to where ``plan`` wants it; no bit of training changes.

    To be called by the training thread between `step()` and the next backward. Waits for running
    updates and for a running checkpoint, whose bytes are still in the old buffers.

    Raises:
        PlanError: the plan is for other subgroups.
        BackgroundError, CheckpointError: something failed in the background before.
    """
    optimizer = engine.optimizer
    own = optimizer._ebbtide
    old = own.executor
    check_plan(plan, tuple(s.elements for s in old.states), own.plan.subgroup_size)
    old.wait_all()
    waiting = getattr(engine.checkpoint_engine, "wait", None)
    if callable(waiting):
        waiting()
    old.close(with_device=False)
    for slot in old.parameter_slots:
        old.device.host_release(slot)
    before = list(old.states)
    plan, executor = own.rebuild(optimizer, plan, before)
    _release_left(old.device, before, executor.states)
    executor.gate, executor.before_op = old.gate, old.before_op
    own.plan, own.executor = plan, executor
    own.homes = _rehomed(own.homes, executor.states)
    _register(own)


def _release_left(device: Any, before: list[SubgroupState], after: list[SubgroupState]) -> None:
    """Page locks of host buffers that nobody holds any more."""
    for old, new in zip(before, after, strict=True):
        pairs = zip((*old.state, old.gradient), (*new.state, new.gradient), strict=True)
        for left, kept in pairs:
            if left.data_ptr() != kept.data_ptr():
                device.host_release(left)


def _register(own: Attachment) -> None:
    register = getattr(own.executor.gate, "register_all", None)
    if callable(register):
        register({i: own.saved_state(i) for i in own.plan.issue_order})


def _rehomed(homes: GradientHomes, states: list[SubgroupState]) -> GradientHomes:
    """The same gradients, kept ones included, beside the states' new homes."""
    homes.close()
    for piece in homes.slices.values():
        device = states[piece.subgroup].gradient.device
        if piece.kept is not None:
            piece.kept = piece.kept.to(device)
        if piece.apart is not None:
            piece.apart = piece.apart.to(device)
    return GradientHomes(homes.device, states, homes.slices, homes.last_scale)
