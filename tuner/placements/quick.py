"""A short plan search for use in a training process: for ``plan="auto"``, and for a new plan while training runs.

The search needs neither pandas nor matplotlib.
"""

from dataclasses import dataclass, replace

from ebbtide.simulator.limits import Limits
from ebbtide.simulator.machine import Machine
from ebbtide.simulator.plan import Plan
from ebbtide.simulator.schedules.footprint import footprint
from ebbtide.simulator.workload import Workload
from ebbtide.tuner.candidates.candidate import Candidate
from ebbtide.tuner.placements.decision import QUICK, Question, decide, most_micro_batches
from ebbtide.tuner.placements.memory import ImpossibleError
from ebbtide.tuner.placements.planning import predict
from ebbtide.tuner.placements.search import Search


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


def quick_plan(
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
    question = Question(workload, machine, limits, effort=effort, running=current)
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
    told = predict(search.workload, machine, made, whole)
    return QuickPlan(made.model_copy(update={"prediction": told}), found.iteration_s, current_s)


def _limits(
    workload: Workload, machine: Machine, current: Plan, device_bytes: int | None, host_bytes: int | None
) -> Limits:
    held = footprint(workload, current)
    return Limits(
        held["device"] + workload.activation_bytes if device_bytes is None else device_bytes,
        max(machine.host_memory_bytes // workload.ranks_per_node, held["host"]) if host_bytes is None else host_bytes,
        storage_bytes=held["storage"] or None,
    )
