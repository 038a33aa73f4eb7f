"""Which sub_group_size to train with: small ones fill and drain the lanes better, large ones cost
less per op.
"""

from collections.abc import Sequence

from ebbtide.simulator.limits import Limits
from ebbtide.simulator.machine import Machine
from ebbtide.simulator.workload import Workload
from ebbtide.tuner.placements.homes import quick_iteration_s
from ebbtide.tuner.placements.search import Search

# None of many layers: it is simulated as if its gradient left when the last of them has one, and
# the ranks' sums came in at once, where training sends and fetches each parameter's. With gradient
# accumulation such subgroups seemed up to a fifth faster than they train.
SIZES = (2 * 10**8, 10**8, 5 * 10**7, 2 * 10**7, 10**7)
MOST_SUBGROUPS = 400
WORTH = 0.995  # smaller subgroups must bring half a percent
TOLD = 0.97  # and where others were asked for, this to be told


def recuts(workload: Workload, sizes: Sequence[int] = SIZES) -> list[Workload]:
    """The workload with other subgroups, largest first; each cut once. As it is, if its own are no
    larger, or others would be too many.

    Raises:
        ValueError: the workload does not know its parameters.
    """
    result = {} if workload.subgroup_size > max(sizes) else {workload.subgroups: workload}
    for size in sizes:
        cut = workload.recut(size)
        if len(cut.subgroups) <= MOST_SUBGROUPS:
            result.setdefault(cut.subgroups, cut)
    return sorted(result.values(), key=lambda w: len(w.subgroups)) or [workload]


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
    """What other subgroups would bring, where those that were asked for are large: all of one is in
    one place. A sentence with figures, or nothing.
    """
    work, machine = search.workload, search.machine
    if not work.parameters or work.subgroup_size <= max(SIZES) or machine.unified_memory:
        return []
    other, seconds = best_cut(recuts(work), machine, search.limits, search.seed, search.effort)
    if seconds > TOLD * search.best_s:
        return []
    return [
        f"all of a subgroup of {work.subgroup_size:.0e} elements is in one place: with "
        f"--subgroup-size {other.subgroup_size:.0e} an iteration takes {seconds * 1e3:.0f} ms"
    ]
