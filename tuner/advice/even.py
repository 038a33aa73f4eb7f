"""A short plan search for interactive use, which makes a small fraction of the simulations of a full search."""

from collections.abc import Mapping, Sequence
from typing import Any

from ebbtide.simulator.limits import Limits
from ebbtide.simulator.machine import Machine
from ebbtide.simulator.plan import Plan
from ebbtide.simulator.rules import worded
from ebbtide.simulator.workload import Workload
from ebbtide.tuner.answer.verdict import LITTLE, above_bound
from ebbtide.tuner.candidates.cuts import SIZES
from ebbtide.tuner.placements.decision import QUICK, Decision, Question, decide
from ebbtide.tuner.placements.locations import about_pinned, begun, brought
from ebbtide.tuner.placements.memory import ImpossibleError
from ebbtide.tuner.placements.planning import plan_of
from ebbtide.tuner.placements.speculation import about_early_updates


def even_plan(
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
    question = Question(
        workload, machine, limits, subgroup_sizes, offload_parameters, folders=folders or {}, effort=QUICK
    )
    return best_of(decide(question))


def quick_or_none(workload: Workload, machine: Machine, limits: Limits, **freedom: Any) -> Plan | None:
    """Return the training plan that a short plan search finds, or None if no plan fits into memory."""
    try:
        return even_plan(workload, machine, limits, **freedom)
    except ImpossibleError:
        return None


def quick_or_roomiest(workload: Workload, machine: Machine, limits: Limits, **freedom: Any) -> Plan:
    """Return the training plan that a short plan search finds. If no plan fits into memory, return a plan that lacks
    little memory.
    """
    found = quick_or_none(workload, machine, limits, **freedom)
    if found is not None:
        return found
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
