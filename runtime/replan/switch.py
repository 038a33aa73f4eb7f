"""Changes the plan of a running engine between two steps."""

from __future__ import annotations

from typing import Any

from runtime.zero.checks.guard import check_plan
from simulator.plan import Plan


def switch_plan(engine: Any, plan: Plan) -> None:
    """Moves every subgroup to where ``plan`` wants it; no bit of training changes.

    To be called by the training thread between `step()` and the next backward. Waits for running
    updates and for a running checkpoint, whose bytes are still in the old buffers.

    Raises:
        PlanError: the plan is for other subgroups.
        BackgroundError, CheckpointError: something failed in the background before.
    """
    session = engine.optimizer._ebbtide
    check_plan(plan, session.engine.sizes(), session.plan.subgroup_size)
    session.executor.wait_all()
    waiting = getattr(engine.checkpoint_engine, "wait", None)
    if callable(waiting):
        waiting()
    session.switch(plan)
