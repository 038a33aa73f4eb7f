"""A search that is short enough for a training loop: what `plan="auto"` and re-planning call.

Needs neither pandas nor matplotlib.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

from ebbtide.simulator.limits import Limits
from ebbtide.simulator.machine import Machine
from ebbtide.simulator.plan import Plan
from ebbtide.simulator.update.footprint import footprint
from ebbtide.simulator.update.way import of_codes
from ebbtide.simulator.workload import Workload
from ebbtide.tuner.placements.annealing import anneal
from ebbtide.tuner.placements.homes import begun
from ebbtide.tuner.placements.moves import STORED, VISITING
from ebbtide.tuner.placements.search import Candidate, Search

EVALUATIONS = 400


@dataclass(frozen=True)
class QuickPlan:
    """The result of a short search.

    Attributes:
        plan: ``current`` itself if nothing is better.
        iteration_s, current_s: the simulator's predictions of both.
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
    evaluations: int = EVALUATIONS,
    seed: int = 0,
    move_parameters: bool = False,
) -> QuickPlan:
    """The best plan of a short search, with the threads and the overlap of ``current``.

    `ebbtide.tuner.plan` searches longer, with threads and overlap too. Deterministic under ``seed``.

    Args:
        current: the plan that runs; what is found is no slower by the simulation, and stores no
            subgroup that this does not: there is room for no other.
        device_bytes: device memory of this rank for all of the workload; None: what ``current``
            takes.
        host_bytes: host memory of this rank; None: its share of the machine's, or what ``current``
            takes where that is more.
        move_parameters: between device and host; else they live where they do under ``current``.
    """
    limits = _limits(workload, machine, current, device_bytes, host_bytes)
    now = current.parameter_homes if "host" in current.parameter_homes else ()
    stored = [s for s, placement in enumerate(current.placements) if placement in STORED] or None
    new = partial(
        Search, workload, machine, limits, seed, _fixed(current), storable=stored, speculates=any(current.guessed)
    )
    search = new(homes=now)
    running = _running(current)
    current_s = search.seconds_anyhow(running)
    search.score(running)
    if move_parameters:
        whole = new() if now else search
        tried = (now,) if now else ()
        other = begun(workload, machine, limits, seed, freely=True, whole=whole, tried=tried)
        search = other if other.best_s < search.best_s else search
    else:
        search.guess()
    if not machine.unified_memory and search.fits:
        anneal(search, evaluations, search.fluid.iteration_s)
    best = search.best()
    best_s = search.score(best).iteration_s
    if not best_s < current_s:
        return QuickPlan(current, current_s, current_s)
    visits = not VISITING.isdisjoint(best.placements)
    made = current.with_ways(
        of_codes(best.codes),
        order=best.order,
        staging_slots=best.staging_slots if visits else 0,
        prefetch=best.prefetch if visits else 0,
        prediction=None,
        alternatives=(),
        reasons=(),
        host_slots=best.host_slots,
    )
    return QuickPlan(made, best_s, current_s)


def _running(current: Plan) -> Candidate:
    """Return the running plan as a candidate of the search."""
    return Candidate(
        current.placements,
        max(1, current.staging_slots),
        current.prefetch,
        order=current.order,
        host_slots=current.host_slots,
        device_sums=sum(current.summed_on_device),
    )


def _fixed(current: Plan) -> dict[str, Any]:
    """Return what stays as it is: the threads, the overlap, and early updates, for which there is memory."""
    same: dict[str, Any] = {"threads": current.threads, "overlap_forward": current.overlap_forward}
    return same | ({"early": current.guessed} if any(current.guessed) else {})


def _limits(
    workload: Workload, machine: Machine, current: Plan, device_bytes: int | None, host_bytes: int | None
) -> Limits:
    """Return the limits. For storage the limit is what ``current`` takes: its files have that room."""
    held = footprint(workload, current)
    return Limits(
        held["device"] + workload.activation_bytes if device_bytes is None else device_bytes,
        max(machine.host_memory_bytes // workload.ranks_per_node, held["host"]) if host_bytes is None else host_bytes,
        storage_bytes=held["storage"] or None,
    )
