"""A decision that is short enough for a training loop: what ``plan="auto"`` and re-planning call.

Needs neither pandas nor matplotlib.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ebbtide.simulator.limits import Limits
from ebbtide.simulator.machine import Machine
from ebbtide.simulator.plan import Plan
from ebbtide.simulator.update.footprint import footprint
from ebbtide.simulator.update.order import FORWARD
from ebbtide.simulator.update.way import of_codes
from ebbtide.simulator.workload import Workload
from ebbtide.tuner.placements.cuts import finer, merged
from ebbtide.tuner.placements.decision import Level, improve, with_early
from ebbtide.tuner.placements.locations import begun
from ebbtide.tuner.placements.moves import STAGED, STORED
from ebbtide.tuner.placements.planning import predict
from ebbtide.tuner.placements.search import Candidate, Search

EFFORT = 0.2  # of a search's evaluations, while training waits
MERGED = (4, 2)  # neighbouring subgroups that are planned as one first


@dataclass(frozen=True)
class QuickPlan:
    """The result of a short search.

    Attributes:
        plan: ``current`` itself if nothing is better.
        iteration_s, current_s: predicted mean iterations of both.
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
    effort: float = EFFORT,
    seed: int = 0,
    move_parameters: bool = False,
) -> QuickPlan:
    """Return the best plan of a short search, with the subgroups, the threads and the overlap of ``current``.

    `ebbtide.tuner.plan` decides in the same way, with subgroup sizes, threads and overlap too. Deterministic under
    ``seed``.

    Args:
        current: the plan that runs. What is found is no slower by the simulation, and stores no subgroup that
            this one does not: there is room for no other.
        device_bytes: device memory of this rank for all of the workload. None: what ``current`` takes.
        host_bytes: host memory of this rank. None: its share of the machine's, or what ``current`` takes if that
            is more.
        move_parameters: between device and host. Otherwise they live where they do under ``current``.
    """
    limits = _limits(workload, machine, current, device_bytes, host_bytes)
    now = current.parameter_locations if "host" in current.parameter_locations else ()
    stored = [s for s, placement in enumerate(current.placements) if placement in STORED] or None
    new = partial(Search, workload, machine, limits, seed, _fixed(current), storable=stored, effort=effort)
    search = new(locations=now)
    running = _running(current)
    current_s = search.seconds_anyhow(running)
    levels = list[Level]()
    if not (machine.unified_memory or now or stored or move_parameters):
        levels = _coarser(workload, machine, limits, seed, _fixed(current))
    search.score(replace(running, early=()))
    search.try_first()
    for level in levels:
        search.score(finer(level.plain.best(), level.plain.workload, workload))
    found = [with_early(search, levels)] if search.fits else []
    if move_parameters:
        whole, tried = new() if now else search, (now,) if now else ()
        other = begun(workload, machine, limits, seed, freely=True, whole=whole, tried=tried)
        found += [with_early(other)] if other is not search and other.fits else []
    if not found:
        return QuickPlan(current, current_s, current_s)
    level = min(found, key=lambda level: level.seconds)
    if not machine.unified_memory:
        improve(level, effort)
    if not level.seconds < current_s:
        return QuickPlan(current, current_s, current_s)
    return QuickPlan(_as_plan(current, level.chosen, level), level.seconds, current_s)


def _coarser(workload: Workload, machine: Machine, limits: Limits, seed: int, fixed: dict[str, Any]) -> list[Level]:
    """Return the first guesses for neighbouring subgroups that are planned as one."""
    levels = list[Level]()
    for many in MERGED:
        search = Search(merged(workload, many), machine, limits, seed, fixed)
        search.try_first()
        if search.fits:
            levels.append(with_early(search, levels))
    return levels


def _as_plan(current: Plan, best: Candidate, level: Level) -> Plan:
    staged, search = not STAGED.isdisjoint(best.placements), level.search
    made = current.with_ways(
        of_codes(best.codes),
        order=best.order or FORWARD,
        staging_slots=best.staging_slots if staged else 0,
        prefetch=best.prefetch if staged else 0,
        prediction=None,
        alternatives=(),
        reasons=(),
        host_slots=best.host_slots,
    )
    # The runtime pauses early updates by the times that are predicted.
    return made.model_copy(update={"prediction": predict(search.workload, search.machine, made, search.limits)})


def _running(current: Plan) -> Candidate:
    """Return the plan that runs as the search sees it."""
    return Candidate(
        current.placements,
        max(1, current.staging_slots),
        current.prefetch,
        order=current.order,
        host_slots=current.host_slots,
        device_sums=sum(current.summed_on_device),
        early=current.updated_early if any(current.updated_early) else (),
    )


def _fixed(current: Plan) -> dict[str, Any]:
    """Return the fields that stay as they are."""
    return {"threads": current.threads, "overlap_forward": current.overlap_forward}


def _limits(
    workload: Workload, machine: Machine, current: Plan, device_bytes: int | None, host_bytes: int | None
) -> Limits:
    """Return the limits. Of storage what ``current`` takes: its files have that room."""
    held = footprint(workload, current)
    return Limits(
        held["device"] + workload.activation_bytes if device_bytes is None else device_bytes,
        max(machine.host_memory_bytes // workload.ranks_per_node, held["host"]) if host_bytes is None else host_bytes,
        storage_bytes=held["storage"] or None,
    )
