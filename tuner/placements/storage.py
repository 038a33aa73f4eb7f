"""The storage of optimizer state on drives: how many bytes fit, the directories, and the cost in time and wear."""

from collections.abc import Mapping
from typing import Any

from ebbtide.simulator.limits import GIB, Limits
from ebbtide.simulator.machine import Machine, shares
from ebbtide.simulator.plan import Plan
from ebbtide.simulator.schedules.footprint import footprint
from ebbtide.simulator.update.steps import Bytes
from ebbtide.simulator.workload import Workload
from ebbtide.tuner.placements.candidate import HOST, STORED, Candidate
from ebbtide.tuner.placements.search import Search
from ebbtide.tuner.quantities import seconds_text

DAY_S = 86400.0
YEAR_DAYS = 365.0
UNWORN = "memory holds all optimizer state, so no drive is worn"


def with_storage(
    workload: Workload, machine: Machine, storage: Mapping[str, int] | None, **asked: Any
) -> tuple[Limits, Machine, dict[str, Any]]:
    """Return limits, the machine with the directories' speeds, and the plan file's fields that name them.

    The key ``""`` of ``storage`` (bytes by directory) is a directory that the plan does not name. It is assumed to be
    as fast as the machine's storage for checkpoints. ``asked`` are further arguments of `Limits.of`.
    """
    if not storage:
        return Limits.of(workload, machine, **asked), machine, {}
    limits = Limits.of(workload, machine, **asked, storage_bytes=room(machine, storage))
    return limits, machine.storing_in(list(storage)), named(machine, storage)


def room(machine: Machine, storage: Mapping[str, int]) -> int:
    """Return how many bytes of optimizer state fit into storage directories of the given sizes."""
    part = _shares(machine, storage)
    return int(min(size / part[name] for name, size in storage.items()))


def named(machine: Machine, storage: Mapping[str, int]) -> dict[str, Any]:
    """Return a dict of those fields of a plan file that name the directories for optimizer state on drives."""
    if len(storage) < 2:
        return {"storage_dir": next(iter(storage), None) or None}
    return {"storage_shares": {n: round(s, 4) for n, s in _shares(machine, storage).items()}}


def _shares(machine: Machine, storage: Mapping[str, int]) -> dict[str, float]:
    return shares({name: machine.storage_of(name) for name in storage})


def written_bytes(workload: Workload, plan: Plan) -> int:
    """Return the number of bytes that all ranks of a node together write to storage in each step under a plan."""
    stored = zip(workload.subgroups, plan.placements, strict=True)
    elements = sum(n for n, placement in stored if placement in STORED)
    return elements * Bytes.of(workload).state * workload.ranks_per_node


def about_storage(search: Search, c: Candidate, endurance_bytes: float | None) -> list[str]:
    """Return a list of sentences about the optimizer state that a plan keeps on drives.

    If all state is in memory, the list is empty, unless the endurance of the drives is given.
    """
    work = search.workload
    if STORED.isdisjoint(c.placements):
        return [] if endurance_bytes is None else [UNWORN]
    seconds, plan = search.score(c).iteration_s, c.plan(work)
    return [_in_memory(search, c, plan, seconds), wear(work, plan, seconds, endurance_bytes)]


def _in_memory(search: Search, c: Candidate, plan: Plan, seconds: float) -> str:
    hosted = tuple(HOST if p in STORED else p for p in c.placements)
    work = search.workload
    faster_s = search.seconds_anyhow(search.ordered(c.with_placements(hosted)))
    taken, needed = footprint(work, plan), footprint(work, plan.placed(hosted))
    more = (needed["host"] - taken["host"]) * work.ranks_per_node / GIB
    saved = f"{seconds_text(faster_s)} instead of {seconds_text(seconds)}"
    if seconds - faster_s <= 1e-3 * seconds:
        saved = "no less time"
    return (
        f"{sum(p in STORED for p in c.placements)} of {len(c.placements)} subgroups' state is on "
        f"a drive ({taken['storage'] / GIB:.1f} GiB per rank, room for two versions). In host "
        f"memory, of which a node would need {more:.1f} GiB more, the same plan "
        f"would take {saved}"
    )


def wear(work: Workload, plan: Plan, seconds: float, endurance_bytes: float | None) -> str:
    """Return a sentence about the bytes that a plan writes to drives per step and per day, and about the
    lifetime of the drives.
    """
    step = written_bytes(work, plan)
    day = step * DAY_S / seconds
    reason = f"a node writes {step / 1e9:.2f} GB of state in each step, {day / 1e12:.1f} TB in a day of training"
    if endurance_bytes is None:
        return f"{reason}. How long the drives last follows from the bytes that they are rated for"
    life = _life(endurance_bytes / day)
    return f"{reason}. Drives rated for {endurance_bytes / 1e12:,.0f} TB last {life}"


def _life(days: float) -> str:
    if days < 2 * YEAR_DAYS:
        return f"{days:,.0f} days" if days >= 10 else f"{days:.1f} days"
    return f"{days / YEAR_DAYS:,.1f} years"
