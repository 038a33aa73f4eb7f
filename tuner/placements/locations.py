"""The choice of the subgroups with 16-bit parameters in host memory between their uses.

Such parameters must be fetched for each forward and backward pass. In return there is GPU memory for a
workload that would not fit, or for more state and buffers while the link is idle. Results are
bit-identical. The chosen subgroups are evenly spaced, so that fetches do not delay each other.
"""

import math

from ebbtide.simulator.limits import GIB, Limits
from ebbtide.simulator.machine import Machine
from ebbtide.simulator.plan import ParameterLocation, Plan
from ebbtide.simulator.update.footprint import fetched_elements, moved_out
from ebbtide.simulator.workload import Workload
from ebbtide.tuner.placements.moves import HOST, STORED
from ebbtide.tuner.placements.search import Search, evenly
from ebbtide.tuner.quantities import told_seconds

SHARES = (0.25, 0.5, 1.0)  # of the subgroups that could still leave: tried beside the fewest


def spaced(count: int, away: int) -> tuple[ParameterLocation, ...]:
    """Return parameter locations with ``away`` of ``count`` subgroups in host memory, evenly spaced.

    An empty tuple means that all parameters stay on the GPU.
    """
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
    effort: float | None = None,
) -> Search:
    """Return the search with its first guesses. Parameters leave the device, and state goes to storage, only
    where not all of it fits into memory.

    Args:
        freely: parameters may leave although plans fit with all of them on the device.
        effort: share of a search's evaluations (`Search`).
    """
    found = Search(workload, machine, limits.in_memory, seed, effort=effort)
    found.try_first()
    if found.fits or limits.storage_bytes is None or workload.zero_stage < 3:
        if freely or not found.fits:
            move_parameters(found)
        return found
    move_parameters(found)
    spilled = Search(workload, machine, limits, seed, effort=effort)
    spilled.try_first()
    if freely or not spilled.fits:
        move_parameters(spilled)
    return spilled if spilled.best_s < found.best_s or not found.fits else found


def move_parameters(search: Search, tried: tuple[ParameterLocation, ...] = ()) -> None:
    """Let parameters live on the host, with first guesses of how many: the fewest that fit, and shares of the others.

    Args:
        tried: further locations.
    """
    if search.workload.zero_stage < 3 or search.machine.unified_memory:
        return
    search.moves_parameters = True
    count, base, best_s = len(search.workload.subgroups), search.locations, search.best_s
    fewest = 0 if search.fits else _fewest(search, count)
    numbers = {fewest, *(fewest + round(share * (count - fewest)) for share in SHARES)} - {0}
    best = base
    for locations in dict.fromkeys([tried, *(spaced(count, n) for n in sorted(numbers))]):
        if locations and search.floor_s(locations) < best_s:  # else no plan of it can be better
            seconds = search.try_first(locations)
            best, best_s = (locations, seconds) if seconds < best_s else (best, best_s)
    search.locations = best


def brought(search: Search, made: Plan) -> list[str]:
    """Return a sentence about the gain of a plan's parameters in host memory, or an empty list if there are none."""
    w = search.workload
    size = moved_out(w, fetched_elements(w, made.parameter_locations)) * w.wire_bytes
    if not size or made.prediction is None:
        return []
    told = f"{size / GIB:.1f} GiB of 16-bit parameters are in host memory and are copied to the GPU for each pass. "
    if math.isinf(search.whole_s):
        return [told + "With all of them on the GPU nothing fits"]
    saved_s = search.whole_s - made.prediction.iteration_s
    return [
        told + f"This saves {told_seconds(saved_s)} compared with all of them on the GPU "
        f"({told_seconds(saved_s / (size / GIB))} per GiB)"
    ]


def _fewest(search: Search, count: int) -> int:
    """Return the fewest subgroups with parameters in host memory such that a plan with CPU updates fits.

    Stored state is used if needed. If even all subgroups do not suffice, return the number of subgroups.
    """
    low, high = 0, count
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _hold(search, count, middle) else (middle, high)
    return high


def _hold(search: Search, count: int, away: int) -> bool:
    placement = next((p for p in search.choices if p in STORED), HOST)
    score = search.peaks(evenly({placement: count}, locations=spaced(count, away)))
    return search.limits.missing_bytes(score) == 0
