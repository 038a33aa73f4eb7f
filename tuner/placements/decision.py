"""The decision on a training job's plan and its subgroup size, used by every planning command.

Every command calls `decide`. The decision may vary the subgroup size, the placement of each subgroup
(the memory of its optimizer state), the order of updates, early updates (before the gradient norm is
known), on-device gradient accumulation, buffers, CPU threads and overlap. If allowed, 16-bit parameters
also move to host memory, and optimizer state to storage. The memory margin is the same for all commands,
but the effort is not: a sketch compares simple plans, a quick decision a few subgroup sizes, and a full
one all sizes (few if a step has very many operations). A full one also anneals for longer.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from ebbtide.simulator.analysis.bounds import Bounds
from ebbtide.simulator.limits import Limits
from ebbtide.simulator.machine import Machine
from ebbtide.simulator.plan import Plan
from ebbtide.simulator.rules import RuleError
from ebbtide.simulator.update.way import PARAMETERS_ON_HOST
from ebbtide.simulator.workload import Workload
from ebbtide.tuner.garbage import without_garbage_collection
from ebbtide.tuner.placements.annealing import anneal
from ebbtide.tuner.placements.candidate import STORED, Candidate
from ebbtide.tuner.placements.division import check_bytes
from ebbtide.tuner.placements.impossible import ImpossibleError
from ebbtide.tuner.placements.locations import begun
from ebbtide.tuner.placements.search import Search
from ebbtide.tuner.placements.shares import best_worth_moving, descend, free_parameters, try_first
from ebbtide.tuner.placements.speculation import fewest, try_early
from ebbtide.tuner.placements.storage import with_storage
from ebbtide.tuner.placements.subgroup_sizes import SIZES, WORTH, finer, merged, quick_cuts, recuts
from ebbtide.tuner.progress import ShowProgress, silently

FULL, QUICK = 1.0, 0.1  # fractions of a full search's evaluations. Up to QUICK, only first plans are tried
FINALISTS = 2  # number of subgroup sizes that a full answer improves
MOST_PASSES = 2**15  # largest number of layer passes in a step. Hundreds of such steps are simulated, twelve at a time
NEAR = 1.05  # factor on the time of the best subgroup size's first plan. Slower sizes are no finalists
FEW_STEPS = 4  # micro-batches. Longer steps take longer to simulate, so that fewer subgroup sizes are compared
LONG_OPS = 60_000  # ops of an iteration. Above, a full answer tries only the subgroup sizes of a quick answer
GLANCED = 1.02  # as NEAR, for a quick answer
GLANCE = 800  # evaluations of a quick answer
GLIMPSE = 150  # evaluations at each subgroup size, which show the size that leads to the best plan
GLANCED_OPS = 8_000_000  # simulated ops of the evaluations of a quick answer (`Search.affordable`)
MERGED = (4, 2)  # numbers of neighboring subgroups that are first planned as one, if the subgroup size is fixed
DESCENT, DESCENT_OPS = 100, 1_200_000  # evenly spread plans from each start, and most simulated ops of them
AT_FIRST, AT_LAST = 0.2, 0.9  # fractions of the evaluations for each finalist, and for the best of them


@dataclass(frozen=True)
class PlanQuestion:
    """The input of the decision on a plan: the training job, the machine, the memory limits, and the effort.

    Attributes:
        limits: Memory that plans may use.
        subgroup_sizes: Subgroup sizes to try, in elements, in addition to the workload's own. If
            empty, only the workload's own size is used.
        offload_parameters: True if 16-bit parameters may live in host memory even if they fit on the GPU.
        folders: Fields of the plan's file that name the directories for stored optimizer state.
        effort: Fraction of a full search's evaluations.
        pieces: True if DeepSpeed keeps its own subgroup size. The plan may then divide DeepSpeed's subgroups. Ignored
            below ZeRO-3.
        running: Plan that training runs under, or None before training. The new plan then keeps this plan's subgroups,
            number of CPU threads and overlap of updates with the next forward. State is on drives only for subgroups
            that already have it there, since the drives have no room for others.
    """

    workload: Workload
    machine: Machine
    limits: Limits
    subgroup_sizes: Sequence[int] = SIZES
    offload_parameters: bool = True
    folders: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    effort: float = FULL
    pieces: bool = False
    running: Plan | None = None

    def __post_init__(self) -> None:
        if not 0 < self.effort <= 1:
            raise ValueError(f"effort must be above 0 and at most 1, but got {self.effort}. 1 is the full search")
        if self._divides and self.limits.storage_bytes is not None:
            raise ValueError(
                "--subgroup-size=pieces must not be given if optimizer state is stored on a drive, because a drive "
                "holds whole subgroups of DeepSpeed only. Use --subgroup-size=auto, or leave out --storage and "
                "offload_optimizer.device nvme"
            )

    @classmethod
    def of(
        cls,
        workload: Workload,
        machine: Machine,
        *,
        device_memory_bytes: int | None = None,
        host_memory_bytes: int | None = None,
        memory_margin: float | None = None,
        storage: Mapping[str, int] | None = None,
        **freedom: Any,
    ) -> "PlanQuestion":
        """Build the input of a plan search from the arguments of a planning command."""
        asked = {"device_memory_bytes": device_memory_bytes, "host_memory_bytes": host_memory_bytes}
        limits, machine, folders = with_storage(workload, machine, storage, **asked, margin=memory_margin)
        return cls(workload, machine, limits, folders=folders, **freedom)

    @property
    def _divides(self) -> bool:
        return self.pieces and self.workload.zero_stage == 3  # ZeRO-1 and 2 ignore sub_group_size

    @property
    def cuts(self) -> list[Workload]:
        """Return a list of workloads, one for each subgroup size that the plan search tries, the largest subgroups
        first.

        Before training, the list has only the workload itself if the machine has unified memory, if the workload lists
        no parameters, or if no other sizes may be tried.

        While training runs, its subgroups cannot change. The list then has two copies of the workload, followed by the
        workload itself. In the first copy, every four neighboring subgroups are joined, and in the second copy every
        two. The best plans for the copies are only starting points of the search for the workload itself. If the
        running plan has state on drives, or the machine has unified memory, there are no copies.
        """
        if (
            self.running is None
            and self.workload.parameters
            and self.subgroup_sizes
            and not self.machine.unified_memory
        ):
            return recuts(self.workload, self.subgroup_sizes, pieces=self._divides)
        if self.running is None or self.running.stores or self.machine.unified_memory:
            return [self.workload]
        return [*(merged(self.workload, many) for many in MERGED), self.workload]

    def search(self, cut: Workload, bounds: Bounds) -> Search:
        """Begin a short plan search at one subgroup size (see `begun`).

        Args:
            bounds: Lower bounds that searches at other subgroup sizes have computed.
        """
        kept: dict[str, Any] = {}
        if self.running is not None:
            plan = self.running
            kept["fixed"] = {"threads": plan.threads, "overlap_forward": plan.overlap_forward}
            kept["storable"] = [s for s, placement in enumerate(plan.placements) if placement in STORED] or None
        found = begun(cut, self.machine, self.limits, self.seed, effort=QUICK, bounds=bounds, **kept)
        if self.running is not None and cut is self.workload:
            now = Candidate.of_plan(self.running)
            if found.moves_parameters or not now.count(PARAMETERS_ON_HOST):
                found.score(now)
        return found


@dataclass(frozen=True)
class Decision:
    """The decision for a training job: the chosen plan, with its subgroup size.

    Attributes:
        question: Training job, machine and memory limits for which the plan was chosen.
    """

    question: PlanQuestion
    search: Search
    chosen: Candidate

    @property
    def iteration_s(self) -> float:
        return self.search.score(self.chosen).iteration_s

    @property
    def folders(self) -> Mapping[str, Any]:
        """Return the plan file's fields that name the directories for stored optimizer state."""
        return {} if STORED.isdisjoint(self.chosen.placements) else self.question.folders


@dataclass
class _Found:
    """The results so far of a decision, which its quick part and its full part share.

    Attributes:
        searches: Plan searches, by the position of their subgroup size in `PlanQuestion.cuts`.
        bounds: Lower bounds of the iteration time.
    """

    searches: dict[int, Search] = field(default_factory=dict)
    bounds: Bounds = field(default_factory=Bounds)


@without_garbage_collection()
def decide(question: PlanQuestion, progress: ShowProgress = silently) -> Decision:
    """Decide on the plan and the subgroup size of a training job.

    The plan is the fastest one that a search with the given effort finds, or one with larger subgroups
    if that takes at most about 0.5% longer. A full search starts with a quick one, so the full search's
    plan is never slower than the quick plan.

    Args:
        progress: Called with the finished fraction and the name of the current phase.

    Raises:
        ImpossibleError: No plan fits into memory. If the bytes of the job's state alone cannot fit,
            nothing is simulated.
        RuleError: The step has too many micro-batches for its number of layers.
    """
    check_length(question.workload)
    check_bytes(question.workload, question.machine, question.limits)
    found = _Found()
    if question.effort <= QUICK:
        return _quickly(question, progress, found)
    within, quick = replace(question, effort=QUICK), None
    with suppress(ImpossibleError):  # plans with whole subgroups of another size may fit
        quick = _quickly(within, lambda share, what: progress(0.2 * share, what), found, last=False)
    finalists = _finalists(_searches(question, lambda share, what: progress(0.2 + 0.4 * share, what), found))
    for number, search in enumerate(finalists):
        progress(0.6 + 0.3 * number / len(finalists), "improving the best plans")
        search.effort = question.effort
        try_first(search)
        descend(search, _changes(search))
        improve(search, AT_FIRST * question.effort)
        if question.offload_parameters:
            free_parameters(search, _changes(search), again=True)
    best = min(finalists, key=lambda search: search.best_s)
    improve(best, AT_LAST * question.effort)
    full = _decided(question, _largest_of_the_best(finalists, quick))
    return full if quick is None or full.iteration_s <= quick.iteration_s else replace(quick, question=question)


def _quickly(question: PlanQuestion, progress: ShowProgress, found: _Found, *, last: bool = True) -> Decision:
    searches = _searches(question, progress, found, last=last)
    most = 1 if question.workload.gradient_accumulation_steps > FEW_STEPS else FINALISTS
    finalists = _finalists(searches, GLANCED)[:most]
    if question.offload_parameters:
        free_parameters(finalists[0], _changes(finalists[0]))
    for search in finalists:
        anneal(search, min(GLANCE, search.affordable(GLANCED_OPS)))
    return _decided(question, _largest_of_the_best(finalists))


def _decided(question: PlanQuestion, best: Search) -> Decision:
    fastest = best.best() if question.running is None else best_worth_moving(best)
    return Decision(question, best, fewest(best, fastest))


def _searches(question: PlanQuestion, progress: ShowProgress, found: _Found, *, last: bool = True) -> list[Search]:
    cuts, searches = question.cuts, found.searches

    def best_s(number: int) -> float:
        if number not in searches:
            progress(number / len(cuts), f"subgroups of {cuts[number].subgroup_size:.0e} elements")
            coarser = [searches[n] for n in sorted(searches) if n < number and searches[n].fits]
            searches[number] = question.search(cuts[number], found.bounds)
            if searches[number].fits:
                follow(searches[number], coarser)
                anneal(searches[number], min(GLIMPSE, searches[number].affordable(GLANCED_OPS // 8)))
        return searches[number].best_s

    if question.running is not None or (question.effort > QUICK and not _long(searches)):
        for number in range(len(cuts)):
            best_s(number)
    else:
        few = quick_cuts(cuts)
        few = few[-1:] if question.workload.gradient_accumulation_steps > FEW_STEPS else few
        number = min(few, key=best_s)
        for step in (1, -1):
            while 0 <= number + step < len(cuts) and best_s(number + step) < WORTH * best_s(number):
                number += step
        if math.isinf(best_s(number)) and last:
            best_s(len(cuts) - 1)
    # While training runs, subgroups cannot be joined. Plans for joined ones only guide the search.
    own = [searches[number] for number in (sorted(searches) if question.running is None else [len(cuts) - 1])]
    fitting = [search for search in own if search.fits]
    if fitting:
        return fitting
    tried = [peaks for search in own for peaks in search.scores.values()]
    raise ImpossibleError.explain(question.workload, question.limits, tried)


def _long(searches: Mapping[int, Search]) -> bool:
    return any(search.fits and search.most_ops > LONG_OPS for search in searches.values())


def most_micro_batches(workload: Workload) -> int:
    """Return the largest number of micro-batches per step with which a plan search simulates a training job."""
    # With more micro-batches, a search would take hours and many GiB.
    return MOST_PASSES // len(workload.layers)


def check_length(workload: Workload) -> None:
    """Refuse a training job with so many micro-batches per step that the plan search would take hours and many GiB.

    Nothing is simulated.

    Raises:
        RuleError: The step has too many micro-batches for its number of layers.
    """
    micro, most = workload.gradient_accumulation_steps, most_micro_batches(workload)
    if micro > most:
        raise RuleError(
            f"accumulation (--accumulation) must be at most {most} for {len(workload.layers)} layers, but got {micro}. "
            f"Plan with {most}: the plan also serves steps of more micro-batches",
            key="accumulation",
        )


def follow(search: Search, coarser: Sequence[Search]) -> None:
    """Try further plans in a plan search.

    The first plans are the best ones of searches with larger subgroups, converted to this search's smaller subgroups.
    Then plans follow that spread their placements evenly over the model. Plans with early updates are last.
    """
    for other in coarser:
        if search.moves_parameters or not other.moves_parameters:
            search.score(finer(other.best(), other.workload, search.workload))
    descend(search, _changes(search), near=bool(coarser))
    try_early(search)


def _changes(search: Search) -> int:
    return min(DESCENT, search.affordable(DESCENT_OPS))


def improve(search: Search, effort: float) -> None:
    """Improve the plans that a plan search has found, by simulated annealing."""
    search.effort = min(1.0, effort)
    anneal(search)


def _finalists(searches: Sequence[Search], near: float = NEAR) -> list[Search]:
    by_time = sorted(searches, key=lambda search: search.best_s)
    return [search for search in by_time if search.best_s <= near * by_time[0].best_s][:FINALISTS]


def _largest_of_the_best(searches: Sequence[Search], quick: Decision | None = None) -> Search:
    best_s = min(search.best_s for search in searches)
    most_s = max(best_s, min(best_s / WORTH, quick.iteration_s if quick else math.inf))
    near = [search for search in searches if search.best_s <= most_s]
    return min(near, key=lambda search: len(search.workload.subgroups))
