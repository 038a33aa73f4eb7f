"""The choice of sub_group_size: small ones fill and drain the lanes better, large ones cost less per op."""

from collections.abc import Sequence

from ebbtide.simulator.limits import Limits
from ebbtide.simulator.machine import Machine
from ebbtide.simulator.workload import Workload
from ebbtide.tuner.placements.homes import quick_iteration_s
from ebbtide.tuner.placements.search import Search

SIZES = (10**9, 5 * 10**8, 2 * 10**8, 10**8, 5 * 10**7, 2 * 10**7, 10**7)
LARGE = 2 * 10**8  # elements: above it smaller subgroups may be worth a sentence
MOST_SUBGROUPS = 400
WORTH = 0.995  # smaller subgroups must bring half a percent
TOLD = 0.97  # and where others were asked for, this to be told


def recuts(workload: Workload, sizes: Sequence[int] = SIZES) -> list[Workload]:
    """Return the workload as it is and with other subgroups, largest first, each cut once.

    Raises:
        ValueError: The workload does not know its parameters.
    """
    result = {workload.subgroups: workload}
    for size in sizes:
        cut = workload.recut(size)
        if len(cut.subgroups) <= MOST_SUBGROUPS:
            result.setdefault(cut.subgroups, cut)
    return sorted(result.values(), key=lambda w: len(w.subgroups))


def best_cut(
    workloads: Sequence[Workload], machine: Machine, limits: Limits, seed: int, effort: float | None = None
) -> tuple[Workload, float]:
    """Return the workload with the fastest plan after a short search, and the time of an iteration.

    Of equally fast workloads, the one with the largest subgroups is returned.
    """
    best, best_s = workloads[0], float("inf")
    for workload in workloads:
        seconds = quick_iteration_s(workload, machine, limits, seed, effort)
        if seconds < WORTH * best_s:
            best, best_s = workload, seconds
    return best, best_s


def about_subgroups(search: Search) -> list[str]:
    """Return a sentence with what other subgroups would bring, if those asked for are large.

    Returns:
        No sentence if the gain is small.
    """
    work, machine = search.workload, search.machine
    if not work.parameters or work.subgroup_size <= LARGE or machine.unified_memory:
        return []
    other, seconds = best_cut(recuts(work), machine, search.limits, search.seed, search.effort)
    if other is work or seconds > TOLD * search.best_s:
        return []
    return [
        f"all of a subgroup of {work.subgroup_size:.0e} elements is in one place: with "
        f"--subgroup-size {other.subgroup_size:.0e} an iteration takes {seconds * 1e3:.0f} ms"
    ]
