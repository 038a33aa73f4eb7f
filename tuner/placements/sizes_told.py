"""Sentences for the user about a plan's subgroups: whether smaller subgroups are faster, and whether the plan divides
DeepSpeed's subgroups.
"""

from dataclasses import replace

from ebbtide.simulator.workload import Workload
from ebbtide.tuner.candidates.cuts import LARGE, SIZES, TOLD
from ebbtide.tuner.placements.decision import QUICK, Question, decide
from ebbtide.tuner.placements.search import Search


def about_subgroups(search: Search, question: Question) -> list[str]:
    """Return advice to use a smaller subgroup size, if the plan's subgroups are large.

    A quick plan search finds the smaller size.

    Args:
        question: Input of the search that found the plan.

    Returns:
        A list with one sentence, or an empty list if a smaller size would gain little, or if the search tried several
        sizes itself.
    """
    work, machine = search.workload, search.machine
    if question.subgroup_sizes or not work.parameters or work.subgroup_size <= LARGE or machine.unified_memory:
        return []
    found = decide(replace(question, workload=work, subgroup_sizes=SIZES, effort=QUICK))
    other, seconds = found.search.workload, found.iteration_s
    if other is work or seconds > TOLD * search.best_s:
        return []
    return [
        f"smaller subgroups than {work.subgroup_size:.0e} elements are faster: with "
        f"{other.subgroup_size:.0e} elements an iteration takes {seconds * 1e3:.0f} ms"
    ]


def about_pieces(work: Workload) -> list[str]:
    """Return a list with one sentence on how a plan divides DeepSpeed's subgroups. The list is empty if the plan does
    not divide them.
    """
    if not work.deepspeed_subgroup_size:
        return []
    return [
        f"DeepSpeed keeps sub_group_size {work.deepspeed_subgroup_size} and therefore its exact results. The "
        f"plan's {len(work.subgroups)} subgroups are parts of DeepSpeed's own"
    ]
