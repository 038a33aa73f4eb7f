"""The choice of a plan's checkpoint settings for the best expected goodput under failures.

The interval between checkpoints and the host memory for copies (the copy budget) are searched together.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ebbtide.simulator.analysis.goodput import (
    CheckpointCost,
    CheckpointPrice,
    Failures,
    best_interval_steps,
    checkfreq_interval_steps,
    daly_interval,
    expected_goodput,
    streamed_bytes,
    young_interval,
)
from ebbtide.simulator.engines.reference import capacities
from ebbtide.simulator.limits import Limits
from ebbtide.simulator.machine import Machine
from ebbtide.simulator.plan import BLOCK_BYTES, CheckpointPlan, Plan, Prediction
from ebbtide.simulator.rules import RuleError
from ebbtide.simulator.workload import Workload
from ebbtide.tuner.quantities import LONGEST_S, seconds_text

LEAST_BUDGET_BYTES = 256 * 2**20
BUDGET_SHARES = (0.0, 0.03, 0.1, 0.25, 0.5, 1.0)  # shares of a checkpoint's size
LEAST_GOODPUT = 0.01  # a job with less goodput makes no useful progress
SAME = 1e-4  # relative gain of goodput that is not worth more memory
WRITERS_BYTES = CheckpointPlan(copy_budget_bytes=0).reserved_bytes  # host memory of the writers of any checkpoint


@dataclass(frozen=True)
class Choice:
    """The checkpoint settings of a plan with the best interval, their predicted cost and their expected goodput."""

    saving: CheckpointPlan
    cost: CheckpointCost
    goodput: float


def planned_failures(mtbf_s: float, restart_s: float) -> Failures:
    """Build the failure model of a training job from its mean time between failures and its restart time.

    Raises:
        ValueError: A time is not positive, or longer than three centuries.
    """
    if not 0 < mtbf_s <= LONGEST_S or not 0 <= restart_s <= LONGEST_S:
        raise RuleError(
            "mtbf_s (--mtbf) must be > 0, restart_s (--restart) >= 0, and both at most "
            f"{LONGEST_S:g}, but got {mtbf_s:g} and {restart_s:g}",
            key="mtbf_s",
        )
    return Failures(mtbf_s, restart_s)


def rated(price: CheckpointPrice, saving: CheckpointPlan, failures: Failures) -> Choice:
    """Return settings with the interval of the highest expected goodput. The write cap and copy budget stay."""
    cost = price.cost(saving)
    steps = best_interval_steps(price.iteration_s, cost, failures)
    goodput = expected_goodput(price.iteration_s, cost, failures, steps)
    return Choice(saving.model_copy(update={"interval_steps": steps}), cost, goodput)


def best_checkpointing(
    price: CheckpointPrice, failures: Failures, spare_bytes: int, base: CheckpointPlan | None = None
) -> Choice:
    """Return the checkpoint settings of a training plan with the highest expected goodput."""
    base = base or CheckpointPlan()
    savings = [base.model_copy(update={"copy_budget_bytes": n}) for n in _budgets(price, spare_bytes, base)]
    return thriftiest([rated(price, saving, failures) for saving in savings])


def thriftiest(tried: Sequence[Choice]) -> Choice:
    """Return the settings that reserve the least host memory, among those that give the best goodput."""
    most = max(choice.goodput for choice in tried)
    equal = [choice for choice in tried if choice.goodput >= most * (1 - SAME)]
    return min(equal, key=lambda c: (c.cost.reserved_bytes, -c.goodput))


def _budgets(price: CheckpointPrice, spare_bytes: int, base: CheckpointPlan) -> list[int]:
    size = streamed_bytes(price.workload, price.plan)
    room = max(0, spare_bytes - base.model_copy(update={"copy_budget_bytes": 0}).reserved_bytes)
    wanted = {min(room, blocks(size * share)) for share in BUDGET_SHARES}
    return sorted({*wanted, min(room, LEAST_BUDGET_BYTES, blocks(size))})


def blocks(size_bytes: float) -> int:
    """Return a number of bytes rounded up to whole blocks of host memory, the unit of a checkpoint's copy buffers."""
    return -(-int(size_bytes) // BLOCK_BYTES) * BLOCK_BYTES


def rules_of_thumb(iteration_s: float, cost: CheckpointCost, failures: Failures) -> dict[str, int]:
    """Return a dict from rule of thumb (``Young``, ``Daly``, ``CheckFreq``) to the number of training steps
    between two checkpoints by this rule.

    No interval is shorter than the time until a checkpoint is complete. CheckFreq's rule ignores
    failures, and allows checkpoints as often as an overhead of 3.5% permits.
    """
    fewest = cost.fewest_steps(iteration_s)
    seconds = {
        "Young": young_interval(cost.cost_s, failures.mtbf_s),
        "Daly": daly_interval(cost.cost_s, failures.mtbf_s),
    }
    rules = {name: max(fewest, round(s / iteration_s)) for name, s in seconds.items()}
    rules["CheckFreq"] = checkfreq_interval_steps(iteration_s, cost)
    return rules


def check_failures(workload: Workload, machine: Machine, mtbf_s: float, restart_s: float) -> None:
    """Raise RuleError if under any plan failures leave less than `LEAST_GOODPUT` of the time for progress.

    This runs before a plan is searched, and assumes that steps are forward and backward only, and checkpoints are free.
    ``mtbf_s`` is for the whole job, and ``restart_s`` lasts from a failure until training runs again.
    """
    failures = planned_failures(mtbf_s, restart_s)
    persist_s = workload.checkpoint_bytes / capacities(machine, workload.ranks_per_node)["storage"]
    cost, step_s = CheckpointCost(0.0, persist_s=persist_s), workload.forward_s + workload.backward_s
    steps = best_interval_steps(step_s, cost, failures)
    _check_progress(failures, cost, expected_goodput(step_s, cost, failures, steps))


def _check_progress(failures: Failures, cost: CheckpointCost, goodput: float) -> None:
    if goodput < LEAST_GOODPUT:
        raise RuleError(
            f"mtbf_s (--mtbf) must leave time to train between failures, but with {failures.mtbf_s:g} s, only "
            f"{goodput:.1%} of the time would be progress. A restart takes {failures.restart_s:g} s (--restart), and a "
            f"checkpoint becomes durable after {cost.persist_s:.1f} s. Check the unit of --mtbf (4h, 30m, 90s)",
            key="mtbf_s",
        )


def with_checkpoints(
    plan: Plan,
    workload: Workload,
    machine: Machine,
    limits: Limits,
    mtbf_s: float | None,
    restart_s: float,
    folder: str | None,
) -> Plan:
    """Return a copy of a training plan with checkpoint settings. Its prediction has the stall of training for
    checkpoints, and its reasons explain the settings.

    Without a mean time between failures (``mtbf_s``), the copy has no checkpoint interval, and its prediction and
    reasons are those of the given plan.

    Raises:
        ValueError: ``mtbf_s`` or ``restart_s`` is not positive, or failures are too frequent for any progress.
    """
    assert plan.prediction is not None
    spare = limits.spare_host_bytes(plan.prediction)
    if mtbf_s is None:
        budget = min(LEAST_BUDGET_BYTES, blocks(streamed_bytes(workload, plan)), spare)
        return plan.model_copy(update={"checkpoint": CheckpointPlan(dir=folder, copy_budget_bytes=budget)})
    failures = planned_failures(mtbf_s, restart_s)
    price = CheckpointPrice(workload, plan, machine)
    choice = best_checkpointing(price, failures, spare, CheckpointPlan(dir=folder))
    _check_progress(failures, choice.cost, choice.goodput)
    reasons = (*plan.reasons, *_reasons(choice, price.iteration_s, failures))
    return saved(plan, choice, limits).model_copy(update={"reasons": reasons})


def saved(plan: Plan, choice: Choice, limits: Limits) -> Plan:
    """Return a copy of a training plan with checkpoint settings. Its prediction has the stall of training for
    checkpoints, and the host memory that they reserve.
    """
    assert plan.prediction is not None
    predicted, reserved = plan.prediction, choice.cost.reserved_bytes
    memory = {**predicted.memory}
    if host := memory.get("host"):
        memory["host"] = {**host, "staging": host.get("staging", 0) + reserved}
    changes = {
        "stall_s": choice.cost.stall_s,
        "host_peak_bytes": predicted.host_peak_bytes + reserved,
        "memory": memory,
        "limits": limits.by_memory,
    }
    prediction = Prediction.model_validate({**predicted.model_dump(), **changes})
    return plan.model_copy(update={"checkpoint": choice.saving, "prediction": prediction})


def without_writers(limits: Limits) -> Limits:
    """Return memory limits for a plan search, less the host memory that the writers of any checkpoint reserve."""
    return replace(limits, host_bytes=max(0, limits.host_bytes - WRITERS_BYTES))


def _reasons(choice: Choice, iteration_s: float, failures: Failures) -> Iterator[str]:
    cost, saving = choice.cost, choice.saving
    cap = saving.write_bytes_per_s
    speed = "written at full speed" if cap is None else f"written at no more than {cap / 1e9:.2f} GB/s"
    yield (
        f"a checkpoint every {saving.interval_steps} steps, {speed}: training stalls for "
        f"{seconds_text(cost.stall_s)}, and iterations are {cost.slowdown:.1%} slower until the checkpoint is "
        f"durable after {cost.persist_s:.2f} s. The expected goodput is {choice.goodput:.2%}"
    )
    rules = rules_of_thumb(iteration_s, cost, failures)
    listed = ", ".join(f"{name} every {steps}" for name, steps in rules.items())
    yield f"rules of thumb for this checkpoint cost: {listed}"
