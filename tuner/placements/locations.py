"""The choice of subgroups with 16-bit parameters that leave the device between their uses.

The cost is a fetch for each pass. The gain is room: for a workload that would not fit at
all, or for state and slots while the link is idle during passes. No bit depends on it. The chosen
subgroups are evenly spaced, so that each fetch has the passes between for itself.
"""

import math
from typing import Any

from ebbtide.simulator.limits import GIB, Limits
from ebbtide.simulator.machine import Machine
from ebbtide.simulator.plan import ParameterLocation
from ebbtide.simulator.update.footprint import fetched_elements, moved_out
from ebbtide.simulator.workload import Workload
from ebbtide.tuner.placements.moves import HOST, STORED
from ebbtide.tuner.placements.search import Search, evenly
from ebbtide.tuner.quantities import told_seconds

SHARES = (0.25, 0.5, 1.0)  # of the subgroups that could still leave: tried beside the fewest


def spaced(count: int, away: int) -> tuple[ParameterLocation, ...]:
    """Homes with ``away`` of ``count`` on the host, evenly spaced; empty: none are."""
    if not away:
        return ()
    turns = [i * away // count for i in range(count + 1)]
    return tuple("host" if turns[i + 1] > turns[i] else "device" for i in range(count))


def begun(
    workload: Workload,
    machine: Machine,
    limits: Limits,
    seed: int = 0,
    *,
    freely: bool = False,
    whole: Search | None = None,
    tried: tuple[tuple[ParameterLocation, ...], ...] = (),
    effort: float | None = None,
) -> Search:
    """The search whose guesses are best, by where parameters live; state goes to storage only where
    not all of it fits into memory.

    Args:
        freely: parameters may leave although plans fit with all of them on the device.
        whole: the search with all parameters on the device, to be begun.
        tried: further homes.
        effort: share of a search's evaluations (`Search`).
    """
    some = limits if whole is not None else limits.in_memory
    found = _at_locations(workload, machine, some, seed, freely, whole, tried, effort)
    if some == limits or workload.zero_stage < 3 or (found.fits and not found.locations):
        return found
    spilled = _at_locations(workload, machine, limits, seed, freely, None, tried, effort)
    return spilled if spilled.best_s < found.best_s or not found.fits else found


def _at_locations(
    workload: Workload,
    machine: Machine,
    limits: Limits,
    seed: int,
    freely: bool,
    whole: Search | None,
    tried: tuple[tuple[ParameterLocation, ...], ...],
    effort: float | None,
) -> Search:
    """`begun`, with storage or without as the limits say."""
    whole = whole or Search(workload, machine, limits, seed, effort=effort)
    whole.try_first()
    whole_s = whole.best_s
    if workload.zero_stage < 3 or machine.unified_memory or (whole.fits and not freely):
        return whole
    count = len(workload.subgroups)
    fewest = 0 if whole.fits else _fewest(whole, count)
    numbers = {fewest, *(fewest + round(share * (count - fewest)) for share in SHARES)} - {0}
    best, best_s = whole, whole.best_s
    for locations in dict.fromkeys([*tried, *(spaced(count, n) for n in sorted(numbers))]):
        more: dict[str, Any] = {"speculates": whole.speculates, "effort": whole.effort}
        search = Search(workload, machine, limits, seed, whole.fixed, locations, whole.storable, **more)
        if search.floor_s < best_s:  # else no plan of it can be better
            search.try_first()
        if search.best_s < best_s:
            best, best_s = search, search.best_s
    if math.isinf(best_s):  # the one that lacks less says why
        search.score(evenly({HOST: count}))
        best = min(whole, search, key=lambda s: min(map(limits.missing_bytes, s.scores.values())))
    best.whole_s = whole_s
    return best


def brought(search: Search) -> list[str]:
    """Return a sentence about the gain of parameters on the host, or nothing if none are there."""
    w = search.workload
    size = moved_out(w, fetched_elements(w, search.locations)) * w.wire_bytes if search.locations else 0
    if not size:
        return []
    told = f"{size / GIB:.1f} GiB of 16-bit parameters are in host memory and are copied to the GPU for each pass. "
    if math.isinf(search.whole_s):
        return [told + "With all of them on the GPU nothing fits"]
    saved_s = search.whole_s - search.best_s
    return [
        told + f"This saves {told_seconds(saved_s)} compared with all of them on the GPU "
        f"({told_seconds(saved_s / (size / GIB))} per GiB)"
    ]


def _fewest(search: Search, count: int) -> int:
    """Return how many subgroups' parameters must leave so that all host updates fit, with stored state if needed.

    If even all of them do not suffice, return all.
    """
    low, high = 0, count
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _hold(search, count, middle) else (middle, high)
    return high


def _hold(search: Search, count: int, away: int) -> bool:
    placement = next((p for p in search.choices if p in STORED), HOST)
    score = search.peaks(evenly({placement: count}), spaced(count, away))
    return search.limits.missing_bytes(score) == 0
