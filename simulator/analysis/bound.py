"""The lower bound of a training iteration's time: a time that no plan for a job can beat on a machine.

It holds for every plan that stays within given memory limits. The plan may have any subgroup sizes, placements,
parameter locations, early updates, gradient sums on the GPU and order of updates, and any numbers of buffers and CPU
threads. `ebbtide.simulator.analysis.bounds.rules` has the rules from which the bound follows.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from ebbtide.simulator.analysis.bounds.rules import RULES, Problem
from ebbtide.simulator.analysis.many_plans import PlanSweep
from ebbtide.simulator.engines import summary
from ebbtide.simulator.limits import Limits
from ebbtide.simulator.machine import Machine
from ebbtide.simulator.quantity import Quantity
from ebbtide.simulator.update.holding import Holding
from ebbtide.simulator.update.recipes import RECIPES
from ebbtide.simulator.update.steps import Placement
from ebbtide.simulator.update.way import PLACEMENT_CODES, Way, ways
from ebbtide.simulator.workload import Workload

AT_ONCE = 1e18  # parameters/s: practically no time
ROUGH_BLOCKS = 1
ROUNDING, ROUNDING_S = 1e-5, 1e-6  # allowance for the solver's tolerances: relative, and in seconds


@dataclass(frozen=True)
class Bound:
    """A lower bound of a training iteration's time under any plan, and the placement of parameters that would reach it.

    Attributes:
        iteration_s: The bound, in mean seconds of an iteration in a steady state.
        binding: Names of the limits that determine the bound, such as GPU memory or DRAM bandwidth. The suffix
            ``(update)`` marks a resource that updates and their copies keep busy during all of the time that they have.
            This time starts when the gradient norm is known or, if some of the work can be done earlier, at the end of
            the last layer's backward. It ends when the next forward reaches the last layer.
    """

    iteration_s: float
    params: Mapping[Placement, float]
    binding: tuple[str, ...]


def lower_bound(
    workload: Workload, machine: Machine, limits: Limits | None = None, *, away: float | None = None
) -> Bound:
    """Return a lower bound for the mean iteration time of every plan that stays within given memory limits.

    The bound is for long training without checkpoints. The first few iterations may take less time than the bound,
    because each of them may postpone some copies to the GPU until a later iteration. So a simulation of only three
    iterations can give a time below the bound. Computing the bound takes some 40 milliseconds.

    Args:
        limits: Memory limits of one rank. Plans may store optimizer state on drives only if ``limits`` has a limit for
            drives. None: all memory of the machine, and no drives.
        away: Number of parameter elements with their 16-bit copy in host memory. None: plans may choose this number.

    Raises:
        ValueError: No plan fits into memory.
    """
    limits = limits or Limits.of(workload, machine, margin=0.0)
    p = problem(workload, machine, limits, early=_updates_early(workload, machine))
    if away is not None:
        there = [n for n, way in enumerate(p.ways) if way.parameters == "host"]
        p.rows.equal(away / workload.params, (p.x[:, there].ravel(), 1.0))
    clipping = workload.expected_clip_rate
    solved = p.rows.lowest(*p.mean(1 - clipping), *clipping_steps(p).mean(clipping))
    if solved is None:
        raise ValueError(
            "parameters, gradients, state and activations must fit into memory, but no plan fits into "
            f"{limits.device_bytes} bytes of GPU memory and {limits.host_bytes} of host memory"
        )
    seconds, x = solved
    split = dict.fromkeys(RECIPES, 0.0)
    for n, way in enumerate(p.ways):
        split[way.placement] += float(x[p.x[:, n]].sum()) * workload.params
    least_s = max(_rounded_down(p.rest_s + seconds), _passes_s(workload, machine))
    return Bound(least_s, split, p.rows.full(x))


def rough_bound_s(workload: Workload, machine: Machine, limits: Limits) -> float:
    """Return a time that is no longer than the bound of `lower_bound`, found in a tenth of its time.

    All layers are one block, and steps that clip count as steps that do not.

    Raises:
        ValueError: No plan fits into memory.
    """
    chosen = _ways(workload, machine, limits, early=_updates_early(workload, machine))
    p = _with_rules(Problem(workload, machine, limits, chosen, most_blocks=ROUGH_BLOCKS))
    solved = p.rows.lowest(*p.mean(1.0))
    if solved is None:
        raise ValueError("parameters, gradients, state and activations must fit into memory, but no plan fits")
    return _rounded_down(p.rest_s + solved[0])


def _updates_early(workload: Workload, machine: Machine) -> bool:
    return workload.zero_stage > 1 and not machine.unified_memory


def problem(workload: Workload, machine: Machine, limits: Limits, *, early: bool) -> Problem:
    """Return the linear program for the lower bound of the time of an iteration that clips no gradients."""
    return _with_rules(Problem(workload, machine, limits, _ways(workload, machine, limits, early=early)))


def clipping_steps(p: Problem) -> Problem:
    """Extend the linear program for the lower bound of an iteration's time by steps that clip gradients.

    Early updates start before the gradient norm is known. A step that clips discards them and repeats them after the
    norm, so it takes at least as long as a step under a plan without early updates. Therefore variables and constraints
    of a second plan are added to the linear program ``p``. The second plan has no early updates, but as many elements
    in each placement and the same buffers as the first plan. Its time is a lower bound for the steps that clip.

    Returns:
        The variables of the second plan.
    """
    ways = [way for way in p.ways if not way.early]
    q = _with_rules(Problem(p.given, p.machine, p.limits, ways, p.rows))
    for n, way in enumerate(ways):
        same = [m for m, other in enumerate(p.ways) if other._replace(early=False) == way]
        for block, column in enumerate(q.x[:, n]):
            p.rows.equal(0.0, (int(column), -1.0), (p.x[block, same], 1.0))
    for slot, size in q.slots.items():
        p.rows.equal(0.0, (size, 1.0), (p.slots[slot], -1.0))
    return q


def _with_rules(p: Problem) -> Problem:
    for rule in RULES:
        rule(p)
    return p


def _ways(workload: Workload, machine: Machine, limits: Limits, *, early: bool) -> list[Way]:
    moves = workload.zero_stage == 3 and not machine.unified_memory
    stores = limits.storage_bytes is not None and workload.zero_stage == 3
    sums = Holding.of_workload(workload).sums
    return [
        way
        for way in ways()
        if (early or not way.early)
        and (sums or not way.sum_on_device)
        and (moves or way.parameters == "device")
        and (stores or way.recipe.state != "storage")
    ]


def _passes_s(workload: Workload, machine: Machine) -> float:
    over_network = (n.network_gather_bytes + n.network_reduce_bytes for n in workload.layers)
    if not (workload.network_step_gather_bytes or any(over_network)):
        return 0.0
    at_once = {"device_adam_params_per_s": Quantity.exact(AT_ONCE), "launch_latency_s": 0.0}
    # The bound leaves out the issue time of modules, because some plans do not wait for it.
    work = workload.one_subgroup.model_copy(update={"module_issue_s": 0.0})
    sweep = PlanSweep(work, machine.model_copy(update=at_once))
    placed = np.array([PLACEMENT_CODES["resident"]], dtype=np.int8)
    row = sweep.evaluate(placed, 0, overlap_forward=workload.overlaps_forward)
    return _rounded_down(float(row[summary.ITERATION_S]))


def _rounded_down(seconds: float) -> float:
    return max(0.0, seconds * (1 - ROUNDING) - ROUNDING_S)
