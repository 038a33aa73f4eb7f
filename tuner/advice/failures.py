"""The effect of failures on training: its goodput, and the best interval between checkpoints."""

from collections.abc import Iterator, Mapping
from typing import Any

from ebbtide.simulator.analysis.goodput import (
    SAVE_S,
    CheckpointCost,
    CheckpointPrice,
    Failures,
    best_interval_steps,
    expected_goodput,
    streamed_bytes,
)
from ebbtide.simulator.engines.reference import capacities
from ebbtide.simulator.limits import Limits
from ebbtide.simulator.machine import Machine
from ebbtide.simulator.plan import CheckpointPlan, Plan, Prediction
from ebbtide.simulator.workload import Workload
from ebbtide.tuner.answer.verdict import Role
from ebbtide.tuner.placements.checkpointing import (
    LEAST_BUDGET_BYTES,
    WRITERS_BYTES,
    Choice,
    blocks,
    rated,
    saved,
    thriftiest,
)

RESTART_S = 60.0  # the default of `tune plan --restart`


def checkpointed(
    plan: Plan, workload: Workload, machine: Machine, limits: Limits, mtbf_s: float
) -> tuple[Plan, Choice]:
    """Return a plan with the checkpoint interval of the highest goodput, and these settings with cost and goodput.

    If the plan already has an interval, its cap on the write bandwidth and its copy budget stay. Otherwise a small and
    a large copy budget are tried, which is quick and seldom worse than a search.
    """
    price = CheckpointPrice(workload, plan, machine)
    failures = Failures(mtbf_s, RESTART_S)
    if plan.checkpoint.interval_steps:
        choice = rated(price, plan.checkpoint, failures)
        return plan.model_copy(update={"checkpoint": choice.saving}), choice
    assert plan.prediction is not None
    spare = max(0, limits.spare_host_bytes(plan.prediction) - WRITERS_BYTES)
    whole = blocks(streamed_bytes(workload, plan))
    budgets = sorted({min(LEAST_BUDGET_BYTES, whole, spare), min(whole, spare)})
    choice = thriftiest([rated(price, CheckpointPlan(copy_budget_bytes=n), failures) for n in budgets])
    return saved(plan, choice, limits), choice


def goodput_of(
    predicted: Mapping[Role, Prediction], workload: Workload, machine: Machine, choice: Choice | None, mtbf_s: float
) -> dict[str, Any]:
    """Return the goodput under a plan, with stock DeepSpeed and without offload, as JSON data.

    Under a plan, checkpoints are written while training goes on. The other two wait for each checkpoint, and have their
    own best interval. ``choice`` is None if there is no plan.
    """
    result = dict(_waiting(predicted, workload, machine, mtbf_s))
    if choice is not None:
        plan_s = predicted["plan"].iteration_s
        steps, stall_s = choice.saving.interval_steps, choice.cost.stall_s
        result["plan"] = _row(plan_s, steps, stall_s, choice.goodput)
    return {"mtbf_s": mtbf_s, "restart_s": RESTART_S, "by_role": result}


def _waiting(
    predicted: Mapping[Role, Prediction], workload: Workload, machine: Machine, mtbf_s: float
) -> Iterator[tuple[str, dict[str, Any]]]:
    storage = capacities(machine, workload.ranks_per_node)["storage"]
    stall_s = SAVE_S + workload.checkpoint_bytes / storage
    cost, failures = CheckpointCost(stall_s, persist_s=stall_s), Failures(mtbf_s, RESTART_S)
    roles: tuple[Role, ...] = ("stock", "no offload")
    for role in roles:
        if role in predicted:
            iteration_s = predicted[role].iteration_s
            steps = best_interval_steps(iteration_s, cost, failures)
            goodput = expected_goodput(iteration_s, cost, failures, steps)
            yield role, _row(iteration_s, steps, stall_s, goodput)


def _row(iteration_s: float, steps: int, stall_s: float, goodput: float) -> dict[str, Any]:
    return {
        "interval_steps": steps,
        "stall_s": stall_s,
        "goodput": goodput,
        "useful_iteration_s": iteration_s / goodput if goodput else None,
    }
