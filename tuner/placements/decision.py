"""The decision on a training job's plan and its subgroup size, used by every planning command.

Every command calls `decide`. The decision may vary the subgroup size, the placement of each subgroup, the order of
updates, early updates, on-device gradient accumulation, buffers, CPU threads and overlap. If allowed, 16-bit parameters
also move to host memory, and optimizer state to storage. The memory margin is the same for all commands,
but the effort is not: a sketch compares simple plans, a quick decision a few subgroup sizes, and a full
one all sizes (few if a step has very many operations). A full one also anneals for longer.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, product
from random import Random
from typing import Any

from ebbtide.simulator.analysis.bounds import Bounds
from ebbtide.simulator.limits import Limits
from ebbtide.simulator.machine import Machine
from ebbtide.simulator.plan import Plan
from ebbtide.simulator.rules import RuleError
from ebbtide.simulator.update.order import FORWARD, Direction, UpdateOrder, issue_order, order_of
from ebbtide.simulator.update.way import PARAMETERS_ON_HOST, SUMMED
from ebbtide.simulator.workload import Workload
from ebbtide.tuner.garbage import without_garbage_collection
from ebbtide.tuner.placements.candidate import ALLOWED, PLAIN, STAGED, STORED, Candidate, Moved
from ebbtide.tuner.placements.division import ImpossibleError, check_bytes
from ebbtide.tuner.placements.parameters_and_early import begun, fewest, try_early
from ebbtide.tuner.placements.search import Search
from ebbtide.tuner.placements.shares import best_worth_moving, descend, free_parameters, try_first
from ebbtide.tuner.placements.storage import with_storage
from ebbtide.tuner.progress import ShowProgress, silently

CLOSE = 1.001  # factor on the lower bound. Closer to it, a better plan would not be worth the search
BETTER = 1e-6
EVALUATIONS_EACH, MOST_EVALUATIONS = 400, 10_000  # evaluations per subgroup, and largest total
MOST_OPS = 14_000_000  # simulated ops, which limit the evaluations of long iterations (`Search.affordable`)
HEAT = 0.08  # first temperature, as a fraction of the CPU update of an average subgroup
MOST_SLOTS = 8
HOST_SLOTS = [1, 2, 3, 4, 6, 8, 12, 16]  # the values that are tried
DIRECTIONS: tuple[Direction, ...] = ("forward", "arrival")
LEAST_STARTS, MOST_STARTS, STARTS_TIMES_SUBGROUPS = 3, 16, 200


def anneal(search: Search, evaluations: int | None = None) -> None:
    """Look for faster plans by simulated annealing, deterministic for the search's seed, and add them to the scores.

    Placements and the order of updates are changed together, by the moves of `Moved`. Changing only one of the two
    often gets stuck, since only slower plans lie between two good ones.

    The first half of the evaluations starts from several known plans, since annealing mostly changes single subgroups
    and seldom gets from one of these plans to another one. The second half starts from the best plan, at a lower
    temperature.
    """
    count = len(search.workload.subgroups)
    if evaluations is None:
        evaluations = search.share_of(min(MOST_EVALUATIONS, EVALUATIONS_EACH * count, search.affordable(MOST_OPS)))
    heat_s = HEAT * search.workload.params / count / search.machine.host_adam_params_per_s.median
    if search.best_s > _near_s(search):
        settings(search)
    starts = _starts(search, max(LEAST_STARTS, min(MOST_STARTS, STARTS_TIMES_SUBGROUPS // count)))
    each = evaluations // (2 * len(starts))
    for number, start in enumerate(starts):
        _Walk(search, start).cool(heat_s, each, Random(f"{search.seed} {number}"))
    for part in range(2):
        walk = _Walk(search, search.ordered(search.best()))
        walk.cool(heat_s / 2 ** (part + 1), evaluations // 4, Random(search.seed + part))


def _near_s(search: Search) -> float:
    return CLOSE * search.bound_with(None if search.moves_parameters else search.locations).iteration_s


def settings(search: Search) -> None:
    """Vary the best plan of a plan search, one setting at a time. Simulate each variant, and add its result to
    the search's scores.
    """
    best = search.best()
    most = max(1, min(MOST_SLOTS, sum(p in STAGED for p in best.placements)))
    values: dict[str, list[Any]] = {
        "threads": [0, *sorted(search.machine.host_adam_by_threads)],
        "staging_slots": list(range(max(1, best.prefetch), most + 1)),
        "prefetch": list(range(most + 1)),
        "overlap_forward": [True, False],
        "host_slots": HOST_SLOTS if not STORED.isdisjoint(best.placements) else [],
        "order": [UpdateOrder(host=host, device=device) for host, device in product(DIRECTIONS, repeat=2)],
    }
    for name, some in values.items():
        best = search.best()
        for value in some:
            if name != "prefetch" or value <= best.staging_slots:
                search.score(replace(best, **{name: value}))


def _starts(search: Search, most: int) -> list[Candidate]:
    known = [c for c, score in search.scores.items() if not math.isinf(score.iteration_s)]
    known.sort(key=lambda c: search.scores[c].iteration_s)
    # Dicts keep the order, so the fastest plans are first.
    slots, numbers = dict[int, Candidate](), dict[bytes, Candidate]()
    for c in known:
        slots.setdefault(c.staging_slots, c)
        numbers.setdefault(bytes(sorted(c.ways.translate(PLAIN))), c)
    return list(dict.fromkeys(chain(known[:1], slots.values(), numbers.values())))[:most]


class _Walk:
    """One simulated annealing over training plans.

    The object holds the plan that was accepted last. The next plan to try is a random change of that plan. A slower
    plan is accepted only by chance, and less often as the temperature falls.
    """

    def __init__(self, search: Search, base: Candidate) -> None:
        self.search, self.base = search, base
        self.state = base.movable(search.free)
        self.state_s = self.best_s = search.score(base).iteration_s

    def cool(self, heat_s: float, evaluations: int, rng: Random) -> None:
        near_s = _near_s(self.search)
        for step in range(evaluations):
            if self.search.best_s <= near_s:
                return
            self._try(self.state.moved(rng), heat_s * (1 - step / evaluations), rng)

    def _try(self, tried: Moved, heat_s: float, rng: Random) -> None:
        codes, issue = tried.arrays()
        options = (tried.slots, tried.prefetch, tried.threads, self.base.overlap_forward)
        most_s = self.state_s - heat_s * math.log(1.0 - rng.random())  # acceptance rule of Metropolis
        seconds = self.search.seconds(codes, *options, issue, tried.host_slots, most_s)
        if seconds > most_s:
            return
        self.state, self.state_s = tried, seconds
        if seconds < self.best_s * (1 - BETTER):
            found = replace(
                self.base,
                ways=codes.tobytes(),
                order=tried.order,
                staging_slots=tried.slots,
                prefetch=tried.prefetch,
                threads=tried.threads,
                host_slots=tried.host_slots,
            )
            self.best_s = min(self.best_s, self.search.score(found).iteration_s)


SIZES = (10**9, 5 * 10**8, 2 * 10**8, 10**8, 5 * 10**7, 2 * 10**7, 10**7)
LARGE = 2 * 10**8  # elements. Smaller subgroups may be worth a note only above this size
QUICK_COUNTS = (32, 110)  # a quick answer tries the subgroup sizes that give about these numbers of subgroups
MOST_SUBGROUPS = 400
FINER = 1.3  # a smaller size is tried only if it gives at least this many times as many subgroups
WORTH = 0.998  # smaller subgroups must save 0.2% of the time
TOLD = 0.97  # a note names a better subgroup size if it saves at least 3%


def recuts(workload: Workload, sizes: Sequence[int] = SIZES, *, pieces: bool = False) -> list[Workload]:
    """Return the workload and copies with subgroups of other sizes, the largest subgroups first.

    Small subgroups overlap copies and updates better. Large ones need fewer operations, each with a fixed cost. With
    ``pieces``, DeepSpeed keeps its own subgroups, and each one of the plan is a part of one of them.

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
    """Return the indices of the workloads that a quick search tries first: those nearest to `QUICK_COUNTS`."""

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
        """Return a workload for each subgroup size that the plan search tries, the largest subgroups first.

        While training runs, its subgroups cannot change. The best plans for copies with joined subgroups are then only
        starting points of the search for the workload itself, which comes last.
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
