"""How often to checkpoint: by expected goodput under the given failures."""

from __future__ import annotations

from dataclasses import dataclass

from simulator.goodput import best_interval_steps
from simulator.machine import Machine
from simulator.plan import CheckpointPlan, Plan
from simulator.simulate import capacities
from simulator.workload import Workload
from tuner.memory import Limits

LEAST_BUDGET_BYTES = 256 * 2**20


@dataclass(frozen=True)
class CheckpointCost:
    """One lazy checkpoint: seconds the loop waits, is slowed down by, and until it is committed."""

    stall_s: float
    interference_s: float
    persist_s: float
    copied_bytes: float


def lazy_cost(
    workload: Workload, machine: Machine, window_s: float, budget_bytes: int
) -> CheckpointCost:
    """What streaming from the live buffers with copy on update costs.

    Until the next update (``window_s``) writers stream without being in anybody's way. What is not
    on disk by then is copied at memory speed while the budget lasts; the update waits for the
    rest to be written.
    """
    ranks = max(1, workload.ranks_per_node)
    share = capacities(machine, ranks)
    write = share["storage"]
    size = float(workload.checkpoint_bytes)
    left = max(0.0, size - window_s * write)
    copied = min(left, float(budget_bytes))
    copy_s = copied / (machine.rate("host_copy_bytes_per_s") / ranks)
    waited_s = (left - copied) / write
    # The bytes cross DRAM once on their way out, beside whatever the iteration does.
    interference_s = size / share["dram"]
    persist_s = size / write + machine.storage_fsync_s
    return CheckpointCost(copy_s + waited_s, interference_s, persist_s, copied)


def checkpoint_plan(
    plan: Plan,
    workload: Workload,
    machine: Machine,
    limits: Limits,
    mtbf_s: float | None,
    restart_s: float,
    folder: str | None,
) -> CheckpointPlan:
    """The checkpoint part of a plan; without an MTBF no interval is set.

    Raises:
        ValueError: mtbf_s or restart_s is not positive.
    """
    assert plan.prediction is not None
    spare = max(0, limits.host_bytes - plan.prediction.host_peak_bytes)
    budget = int(min(workload.checkpoint_bytes, max(LEAST_BUDGET_BYTES, spare // 2)))
    if mtbf_s is None:
        return CheckpointPlan(dir=folder, copy_budget_bytes=min(budget, LEAST_BUDGET_BYTES))
    if mtbf_s <= 0 or restart_s < 0:
        raise ValueError(
            f"mtbf_s (--mtbf) must be > 0 and restart_s (--restart) >= 0, but got {mtbf_s} and "
            f"{restart_s}"
        )
    prediction = plan.prediction
    window_s = prediction.forward_s + prediction.backward_s
    cost = lazy_cost(workload, machine, window_s, budget)
    interval = best_interval_steps(
        prediction.iteration_s, cost.stall_s, cost.interference_s, mtbf_s, restart_s,
        cost.persist_s,
    )  # fmt: skip
    return CheckpointPlan(interval_steps=interval, dir=folder, copy_budget_bytes=budget)
