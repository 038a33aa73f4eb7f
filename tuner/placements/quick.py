"""Short plan searches, which make a small fraction of the simulations of a full search: for interactive use, and for
use while training runs (``plan="auto"`` and later changes of its plan).

They need neither pandas nor matplotlib.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ebbtide.simulator.limits import Limits
from ebbtide.simulator.machine import Machine
from ebbtide.simulator.plan import Plan
from ebbtide.simulator.rules import worded
from ebbtide.simulator.schedules.footprint import footprint
from ebbtide.simulator.workload import Workload
from ebbtide.tuner.answer.verdict import LITTLE, above_bound
from ebbtide.tuner.placements.candidate import Candidate
from ebbtide.tuner.placements.decision import QUICK, Decision, PlanQuestion, decide, most_micro_batches
from ebbtide.tuner.placements.impossible import ImpossibleError
from ebbtide.tuner.placements.locations import about_pinned, begun, brought
from ebbtide.tuner.placements.planning import plan_of, predict
from ebbtide.tuner.placements.search import Search
from ebbtide.tuner.placements.speculation import about_early_updates
from ebbtide.tuner.placements.subgroup_sizes import SIZES


@dataclass(frozen=True)
class QuickPlan:
    """The result of a short plan search that runs during training.

    Attributes:
        plan: Best plan. It is the plan in force (``current``) if nothing is faster.
        iteration_s: Predicted mean iteration time under ``plan``, in seconds.
        current_s: Predicted mean iteration time under the plan in force, in seconds.
    """

    plan: Plan
    iteration_s: float
    current_s: float


def quicker_plan(
    workload: Workload,
    machine: Machine,
    current: Plan,
    *,
    device_bytes: int | None = None,
    host_bytes: int | None = None,
    effort: float = QUICK,
) -> QuickPlan:
    """Search for a better plan while training runs (`ebbtide.tuner.placements.decision`), and return the best plan
    found.

    The new plan keeps three settings of the plan in force: the subgroups, the number of CPU threads, and whether
    updates overlap with the next forward. `ebbtide.tuner.plan`, which plans before training, may choose these three
    settings. All other settings are chosen in the same way by both functions. The result is deterministic.

    Args:
        current: Plan in force. The new plan is no slower than ``current`` in simulation. The new plan keeps the state
            of a subgroup on drives only if ``current`` does so too, since the drives have no room for other subgroups.
        device_bytes: GPU memory in bytes that this rank's training may use. If None, the memory that ``current`` uses.
        host_bytes: Host memory of this rank in bytes. If None, its share of the machine's, or the memory that
            ``current`` uses if that is more.
        effort: Fraction of a full search's evaluations.
    """
    whole = _limits(workload, machine, current, device_bytes, host_bytes)
    # The new plan keeps the checkpoint settings, whose memory the search does not count.
    limits = replace(whole, host_bytes=max(0, whole.host_bytes - current.checkpoint.automatic_bytes))
    question = PlanQuestion(workload, machine, limits, effort=effort, running=current)
    try:
        # In a longer step, updates are too small a part to be worth a minute of search.
        found = decide(question) if workload.gradient_accumulation_steps <= most_micro_batches(workload) else None
    except ImpossibleError:  # the present plan takes more memory
        found = None
    search = Search(workload, machine, limits) if found is None else found.search
    current_s = search.seconds_anyhow(Candidate.of_plan(current))
    if found is None or not found.iteration_s < current_s:
        return QuickPlan(current, current_s, current_s)
    made = current.with_ways(**found.chosen.settings, prediction=None, alternatives=(), reasons=())
    # The runtime pauses early updates by the predicted times.
    prediction = predict(search.workload, machine, made, whole)
    return QuickPlan(made.model_copy(update={"prediction": prediction}), found.iteration_s, current_s)


def _limits(
    workload: Workload, machine: Machine, current: Plan, device_bytes: int | None, host_bytes: int | None
) -> Limits:
    held = footprint(workload, current)
    return Limits(
        held["device"] + workload.activation_bytes if device_bytes is None else device_bytes,
        max(machine.host_memory_bytes // workload.ranks_per_node, held["host"]) if host_bytes is None else host_bytes,
        storage_bytes=held["storage"] or None,
    )


def quick_plan(
    workload: Workload,
    machine: Machine,
    limits: Limits,
    *,
    subgroup_sizes: Sequence[int] = SIZES,
    offload_parameters: bool = True,
    folders: Mapping[str, Any] | None = None,
) -> Plan:
    """Return the training plan that a short plan search finds, with its predicted iteration and a lower bound
    of the iteration time.

    The plan's field ``reasons`` says if a full search, as by ``tune plan``, may find a faster plan.

    Raises:
        ImpossibleError: No plan fits into memory.
    """
    question = PlanQuestion(
        workload, machine, limits, subgroup_sizes, offload_parameters, folders=folders or {}, effort=QUICK
    )
    return best_of(decide(question))


def quick_or_roomiest(workload: Workload, machine: Machine, limits: Limits, **freedom: Any) -> Plan:
    """Return the training plan that a short plan search finds. If no plan fits into memory, return a plan that lacks
    little memory.
    """
    try:
        return quick_plan(workload, machine, limits, **freedom)
    except ImpossibleError:
        search = begun(workload, machine, limits)
        return min(search.scores, key=lambda c: limits.missing_bytes(search.scores[c])).plan(workload)


def best_of(found: Decision) -> Plan:
    """Convert the decision of a short plan search into a plan, with its predicted iteration and the reasons for it."""
    made, search = plan_of(found), found.search
    assert made.prediction is not None
    near = above_bound(made.prediction) < LITTLE
    more = f"a full search can make it at most {LITTLE:.1%} faster" if near else "a full search may find a better one"
    facts = (*about_early_updates(search, made), *brought(search, made), *about_pinned(search, made))
    why = (f"a quick plan: {more}", *facts, *search.workload.notes)
    return made.model_copy(update={"reasons": tuple(map(worded, why))})
