"""The choice among values of DeepSpeed's ``sub_group_size``: the number of elements in a subgroup, a part
of optimizer state.

With small subgroups, copies and updates overlap better. Large subgroups need fewer operations, and each
operation has a fixed cost.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from ebbtide.simulator.update.order import FORWARD, issue_order, order_of
from ebbtide.simulator.update.way import SUMMED
from ebbtide.simulator.workload import Workload
from ebbtide.tuner.placements.candidate import ALLOWED, STAGED, Candidate

SIZES = (10**9, 5 * 10**8, 2 * 10**8, 10**8, 5 * 10**7, 2 * 10**7, 10**7)
LARGE = 2 * 10**8  # elements. Smaller subgroups may be worth a note only above this size
QUICK_COUNTS = (32, 110)  # a quick answer tries the subgroup sizes that give about these numbers of subgroups
MOST_SUBGROUPS = 400
FINER = 1.3  # a smaller size is tried only if it gives at least this many times as many subgroups
WORTH = 0.998  # smaller subgroups must save 0.2% of the time
TOLD = 0.97  # a note names a better subgroup size if it saves at least 3%


def recuts(workload: Workload, sizes: Sequence[int] = SIZES, *, pieces: bool = False) -> list[Workload]:
    """Return a list of workloads: the given one with its own subgroups, and copies with subgroups of other
    sizes, the largest subgroups first.

    A size is left out if it gives nearly as many subgroups as a larger size, or more than `MOST_SUBGROUPS`.

    Args:
        workload: Training job of one rank.
        pieces: True if DeepSpeed keeps its own subgroups. Each subgroup of the plan is then a part
            of one of DeepSpeed's.

    Raises:
        ValueError: The workload does not list its parameters.
    """
    result = {len(workload.subgroups): workload}
    for size in sorted(sizes, reverse=True):
        cut = workload.in_pieces(size) if pieces else workload.recut(size)
        count = len(cut.subgroups)
        if count <= MOST_SUBGROUPS and not any(known <= count < FINER * known for known in result):
            result[count] = cut
    return sorted(result.values(), key=lambda w: len(w.subgroups))


def quick_cuts(cuts: Sequence[Workload]) -> list[int]:
    """Return the indices of the workloads that a quick plan search tries first: those with about 32 and about 110
    subgroups.
    """

    def distance(number: int, count: int) -> float:
        return abs(math.log(len(cuts[number].subgroups) / count))

    return sorted({min(range(len(cuts)), key=lambda number: distance(number, count)) for count in QUICK_COUNTS})


def merged(workload: Workload, many: int) -> Workload:
    """Return a copy of a workload with every ``many`` neighboring subgroups of optimizer state joined into one."""
    sizes = workload.subgroups
    joined = tuple(sum(sizes[i : i + many]) for i in range(0, len(sizes), many))
    return workload.model_copy(update={"subgroups": joined, "subgroup_size": 0, "parameters": ()})


def finer(candidate: Candidate, coarse: Workload, fine: Workload) -> Candidate:
    """Return a plan for small subgroups that copies the choices of a plan for large subgroups of the same model.

    Each small subgroup gets the placement and flags of the large subgroup that holds its middle element.
    """
    ends, begin, owner = list(accumulate(coarse.subgroups)), 0, list[int]()
    for size in fine.subgroups:
        owner.append(min(bisect_right(ends, begin + size // 2), len(ends) - 1))
        begin += size
    made = replace(candidate, ways=bytes(ALLOWED[candidate.ways[c] | SUMMED] for c in owner))
    ratio = max(1, round(len(fine.subgroups) / len(coarse.subgroups)))
    inside: dict[int, list[int]] = {}
    for subgroup, c in enumerate(owner):
        inside.setdefault(c, []).append(subgroup)
    issue = [s for c in issue_order(candidate.placements, candidate.order or FORWARD) for s in inside.get(c, ())]
    staged = sum(p in STAGED for p in made.placements)
    slots = max(1, min(candidate.staging_slots * ratio, staged))
    return replace(
        made,
        order=order_of(issue, made.placements),
        staging_slots=slots,
        prefetch=min(candidate.prefetch * ratio, slots),
    )
