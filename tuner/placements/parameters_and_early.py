"""The choice of the subgroups that keep their 16-bit parameters in host memory, and of those that are updated early.

Parameters in host memory must be copied to the GPU for each forward and backward pass. This frees GPU memory for a job
that would not fit, or for more optimizer state and buffers. The copies cost little while the link between host and GPU
is idle. Training results are bit-identical. The chosen subgroups are evenly spaced, so that the copies do not delay
each other.

Early updates take host memory, and a step that clips must undo and repeat all of them. So a plan has them only if they
shorten the mean iteration. If more steps clip than expected, the runtime stops early updates for a while. The plan is
then nearly as fast as the best plan without early updates.
"""

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from ebbtide.simulator.analysis.bounds import Bounds
from ebbtide.simulator.limits import GIB, Limits
from ebbtide.simulator.machine import Machine
from ebbtide.simulator.plan import Plan
from ebbtide.simulator.schedules.footprint import fetched_elements, moved_out
from ebbtide.simulator.update.recipes import RECIPES
from ebbtide.simulator.update.way import EARLY, SUMMED
from ebbtide.simulator.workload import Workload
from ebbtide.tuner.placements.candidate import HOST, STAGED, STORED, Candidate, able_early, evenly, turned
from ebbtide.tuner.placements.search import Search
from ebbtide.tuner.placements.shares import SHARES, spaced, try_first
from ebbtide.tuner.quantities import seconds_text


def begun(
    workload: Workload,
    machine: Machine,
    limits: Limits,
    seed: int = 0,
    *,
    effort: float = 1.0,
    bounds: Bounds | None = None,
    **kept: Any,
) -> Search:
    """Create a plan search for a training job, let it try some simple plans, and return it.

    The search first tries plans with all 16-bit parameters on the GPU and all optimizer state in memory. If none of
    them fits, it tries plans with parameters in host memory. If drives are given and the job uses ZeRO-3, a second
    search then tries plans with optimizer state on drives, and the search with the faster plan is returned.

    Args:
        limits: Memory and storage that plans may use.
        effort: Fraction of a full search's evaluations.
        bounds: Lower bounds of the iteration time that searches for the same job with other subgroup sizes have
            computed.
        kept: Further arguments of `Search`, such as settings of the plan that cannot change while training runs.
    """
    new = partial(Search, workload, machine, seed=seed, effort=effort, bounds=bounds, **kept)
    found = new(limits=limits.in_memory)
    try_first(found)
    if found.fits or limits.storage_bytes is None or workload.zero_stage < 3:
        if not found.fits:
            move_parameters(found)
        return found
    move_parameters(found)
    spilled = new(limits=limits, like=found)
    try_first(spilled)
    if not spilled.fits:
        move_parameters(spilled)
    return spilled if spilled.best_s < found.best_s or not found.fits else found


def move_parameters(search: Search) -> None:
    """Allow a plan search to keep 16-bit parameters in host memory, and try some plans with such parameters.

    First, as few subgroups as possible have their parameters in host memory, so that a plan just fits.
    Then several larger numbers of subgroups are tried.
    """
    if not search.can_move_parameters:
        return
    search.moves_parameters = True
    count, best, best_s = len(search.workload.subgroups), search.locations, search.best_s
    enough = partial(_hold, search, count)
    fewest = 0 if search.fits else bisect_left(range(count), True, 1, key=enough)
    numbers = {fewest, *(fewest + round(share * (count - fewest)) for share in SHARES)} - {0}
    for locations in (spaced(count, n) for n in sorted(numbers)):
        # Otherwise no plan with these locations can be faster.
        if math.isinf(best_s) or search.may_take_less(locations, best_s):
            seconds = try_first(search, locations)
            best, best_s = (locations, seconds) if seconds < best_s else (best, best_s)
    search.locations = best


MUCH = 0.9  # fraction of the usable host memory from which a plan says how much it pins


def about_pinned(search: Search, made: Plan) -> list[str]:
    """Return a list with one sentence if hardly any host memory is left, and otherwise an empty list."""
    prediction, limits, machine = made.prediction, search.limits, search.machine
    if prediction is None or limits.unified or prediction.host_peak_bytes <= MUCH * limits.host_bytes:
        return []
    ranks = search.workload.ranks_per_node
    taken, whole = prediction.host_peak_bytes * ranks / GIB, machine.host_memory_bytes / GIB
    return [
        f"{taken:.1f} GiB of the {whole:.0f} GiB of host memory are taken, nearly all of it pinned, so that the "
        "system cannot move it to a swap file. That a system has so much to give was not measured: desktop sessions, "
        "data loaders and file caches share the rest"
    ]


def brought(search: Search, made: Plan) -> list[str]:
    """Return a list with one sentence about the time or the GPU memory that a plan gains by keeping 16-bit
    parameters in host memory.

    The list is empty if no parameters are in host memory.
    """
    w = search.workload
    size = moved_out(w, fetched_elements(w, made.parameter_locations)) * w.wire_bytes
    if not size or made.prediction is None:
        return []
    reason = (
        f"{size / GIB:.1f} GiB of 16-bit parameters are in host memory and are copied to the GPU for each pass. "
        'This needs zero_optimization.offload_param.device "cpu" in the DeepSpeed config. '
    )
    if math.isinf(search.whole_s):
        return [reason + "With all of them on the GPU nothing fits"]
    saved_s = search.whole_s - made.prediction.iteration_s
    return [
        reason + f"This saves {seconds_text(saved_s)} compared with all of them on the GPU "
        f"({seconds_text(saved_s / (size / GIB))} per GiB)"
    ]


def _hold(search: Search, count: int, away: int) -> bool:
    placement = next((p for p in search.choices if p in STORED), HOST)
    return search.holds(search.ordered(evenly({placement: count}, locations=spaced(count, away))))


FEW = 3  # number of best plans without early updates from which the search starts
ROOM = 3  # most GPU-resident subgroups that may leave the GPU to make room for early staged updates
PARTS = 8  # number of steps from no early update to all of them
SPREADS = 4  # number of steps from neighboring early updates to evenly spread ones
LITTLE = 5e-4  # share of an iteration. Early updates and on-device sums that save less are left out


def try_early(search: Search) -> None:
    """Try plans with early updates in a plan search.

    Early updates of more or fewer subgroups are also tried.
    """
    if not (search.early and search.fits):
        return
    known = sorted((c for c in search.scores if not c.count(EARLY)), key=lambda c: search.scores[c].iteration_s)
    for candidate in known[:FEW]:
        search.score(search.with_early(candidate, ["host"]))
        for roomier in _with_room(candidate):
            search.score(search.with_early(roomier))
    _spread(search)


def _with_room(candidate: Candidate) -> Iterator[Candidate]:
    yield candidate
    placements = list(candidate.placements)
    if STAGED.isdisjoint(placements):
        return
    slots = range(1, candidate.staging_slots)
    yield from (replace(candidate, staging_slots=n, prefetch=min(n, candidate.prefetch)) for n in slots)
    stay = [i for i, p in enumerate(placements) if RECIPES[p].state == "device"]
    for subgroup in stay[: -ROOM - 1 : -1]:
        placements[subgroup] = next(p for p in placements if p in STAGED)
        yield candidate.with_placements(placements)


def _spread(search: Search) -> None:
    best = search.ordered(search.best())
    able = able_early(best, "host").tolist()
    early = [s for s in able if best.ways[s] & EARLY]
    others, count = turned(best, early, EARLY), len(able)
    for many in sorted({len(early) * i // PARTS for i in range(1, PARTS + 1)} - {0}):
        for among in sorted({many + (count - many) * i // SPREADS for i in range(SPREADS + 1)}):
            search.score(turned(others, [able[-1 - i * among // many] for i in range(many)], EARLY))


def fewest(search: Search, best: Candidate) -> Candidate:
    """Return a copy of a plan without the early updates and on-device gradient sums that together save at
    most 0.05% of the iteration time.
    """
    best = search.ordered(best)
    most_s = (1 + LITTLE) * search.score(best).iteration_s
    for bit in (EARLY, SUMMED):
        for parts in (1, 2, PARTS):
            some = [s for s, code in enumerate(best.ways) if code & bit]
            for part in range(parts):
                fewer = turned(best, some[len(some) * part // parts : len(some) * (part + 1) // parts], bit)
                if search.score(fewer).iteration_s <= most_s:
                    best = search.ordered(fewer)
    return best


def about_early_updates(search: Search, made: Plan) -> list[str]:
    """Return a list with one sentence about a plan's early updates and the time that they save over the search's best
    plan without them.

    The list is empty if the job cannot have early updates, as under ZeRO-1.
    """
    count, work, prediction = sum(made.updated_early), search.workload, made.prediction
    if prediction is None or not search.early:
        return []
    rate = f"{work.expected_clip_rate:.1%} of the steps clip"
    if work.clip_rate is None:
        rate = f"{work.expected_clip_rate:.0%} of the steps clip (assumed)"
    times = prediction.step_times
    if not count or times is None:
        return [f"no subgroup is updated early (before the gradient norm is known): it is not faster if {rate}"]
    return [
        f"{count} of {made.subgroup_count} subgroups are updated early (before the gradient norm is known), "
        f"which saves {seconds_text(search.plain_s - prediction.iteration_s)} if {rate}. An iteration takes "
        f"{seconds_text(times.right_s)} if no step clips, and {seconds_text(times.mean_s(1.0))} if every step clips"
    ]
