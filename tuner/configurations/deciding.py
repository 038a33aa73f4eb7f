"""The choice of the training configurations to simulate, so that the fastest one is found for certain.

A search also finds the fastest configuration for each value of each varied setting. An upper bound of a configuration's
speed takes microseconds, without a simulation. Configurations are taken in the order of their bounds, the highest
first. One is simulated only if its bound exceeds the best speed so far, overall or for one of its settings' values.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from ebbtide.simulator.analysis.bound import lower_bound
from ebbtide.simulator.engines.reference import capacities
from ebbtide.simulator.estimates.models.blocks import ModelError
from ebbtide.simulator.limits import Limits
from ebbtide.simulator.schedules.stock_options import HOST_GRADIENT_BYTES
from ebbtide.simulator.update.footprint import moved_out
from ebbtide.simulator.update.holding import Holding
from ebbtide.simulator.update.optimizer import FP32_BYTES
from ebbtide.simulator.update.steps import Bytes
from ebbtide.simulator.update.tiers import TIERS
from ebbtide.simulator.update.way import plain_ways
from ebbtide.simulator.workload import Workload
from ebbtide.tuner.candidates.cuts import SIZES
from ebbtide.tuner.candidates.moves import STORED
from ebbtide.tuner.configurations.answer import Answer
from ebbtide.tuner.configurations.evaluation import PLANNED, Outcome, Question
from ebbtide.tuner.configurations.space import Configuration, Space
from ebbtide.tuner.placements.decision import QUICK

MOST = 3000  # most simulations of a search
SLACK = 0.002  # share of the best speed, or of the missing memory. A configuration that may gain less is not simulated
SHOWN = 0.005  # share of the highest speed that the table does not show, because it rounds to percent
APART = 0.03  # configurations that differ by less than this share in speed and memory are one point of the front


@dataclass(frozen=True)
class Promise:
    """Bounds on a training configuration, found without a simulation.

    Attributes:
        tokens_per_s: Upper bound of the throughput.
        device_bytes: Lower bound of the peak GPU memory in bytes.
        missing_bytes: Lower bound of the bytes that GPU and host memory lack together. Above 0, the configuration
            cannot fit.
        refused: Reason that the configuration cannot be simulated, or empty.
        tight: True if ``tokens_per_s`` takes into account the lower bound of the iteration time over all plans.
            Computing this lower bound takes milliseconds, so it is left out at first.
    """

    tokens_per_s: float = 0.0
    device_bytes: int = 0
    missing_bytes: int = 0
    refused: str = ""
    tight: bool = False


def promise(question: Question, c: Configuration) -> Promise:
    """Return quick bounds on the speed and the memory of a training configuration. The bounds hold for any
    subgroup size, and nothing is simulated.
    """
    try:
        work = question.workload(c.changed(sub_group_size=10**9))
        name, options = question.strategy(c)
    except ModelError as error:
        return Promise(refused=str(error))
    busy_s = work.pipeline_idle_s + work.forward_s + work.backward_s
    if name == "zero_infinity":  # DeepSpeed runs nothing else during its updates
        busy_s += work.params * Bytes.of(work).adams / question.machine.rate("host_adam_params_per_s")
    # Without pipelining, reads, updates and writes follow one after the other.
    if options.get("optimizer") == "nvme" and not options["pipelined"]:
        rates = capacities(question.machine, work.ranks_per_node)
        state_bytes = work.params * work.optimizer_state.state_bytes
        busy_s += (state_bytes + work.params * FP32_BYTES) / rates["storage_read"] + state_bytes / rates["storage"]
    planned, limits = name == "ebbtide", question.limits(work)
    device, missing = _of_a_plan(work, limits) if planned else _of_stock(work, limits, name, options)
    return Promise((work.tokens_per_iteration or 0) / busy_s, device, missing, tight=not planned)


def tightened(question: Question, c: Configuration, loose: Promise) -> Promise:
    """Return a copy of ``loose``, the bounds of a training configuration. If possible, the upper bound of the
    throughput is lower in the copy.

    The new upper bound follows from the lower bound of the iteration time over all plans. Computing it takes
    milliseconds.
    """
    if loose.tight or loose.refused:
        return loose
    work = question.workload(c)
    try:
        bound = lower_bound(work, question.machine, question.limits(work))
    except ValueError:  # the workload alone does not fit. Its simulation reports how much memory is missing
        return replace(loose, tight=True)
    best = (work.tokens_per_iteration or 0) / bound.iteration_s
    return replace(loose, tokens_per_s=min(loose.tokens_per_s, best), tight=True)


def _moved_bytes(work: Workload) -> int:
    return moved_out(work, [layer.params for layer in work.layers]) * work.wire_bytes


def _of_a_plan(work: Workload, limits: Limits) -> tuple[int, int]:
    device = work.device_base_bytes + work.activation_bytes
    held = Holding.of_workload(work)
    kinds = zip(plain_ways(), *(held.per_param[memory] for memory in TIERS), strict=True)
    stores = limits.storage_bytes is not None
    here = ((way.placement, each) for way, *each in kinds if way.parameters == "device")
    least = min(sum(each) for placement, each in here if stores or placement not in STORED)
    beyond_both = device + work.params * least - limits.total_bytes
    device = max(0, device - _moved_bytes(work)) if work.zero_stage == 3 else device
    return device, max(0, beyond_both, *limits.missing(device, 0).values())


def _of_stock(work: Workload, limits: Limits, name: str, options: dict[str, object]) -> tuple[int, int]:
    state = work.params * work.optimizer_state.state_bytes
    device = work.device_base_bytes + (0 if options.get("activations") == "cpu" else work.activation_bytes)
    device += state if name == "no_offload" else 0
    host = 0
    if name == "zero_infinity" and options["optimizer"] == "cpu":
        host = state + work.params * HOST_GRADIENT_BYTES
    if options.get("parameters") == "cpu":
        device = max(0, device - _moved_bytes(work))
        host += work.params * work.wire_bytes
    return device, sum(limits.missing(int(device), int(host)).values())


@dataclass
class Contests:
    """The training configurations that a search has simulated so far, and the fastest one of each group.

    A group is all configurations with the same value of one setting.

    Attributes:
        question: Model and machine that the search is for.
        space: Set of configurations that is searched.
        most: Largest number of simulations. The remaining configurations are then neither simulated nor ruled out.
        seen: Called with the number of simulated configurations.
    """

    question: Question
    space: Space
    most: int
    seen: Callable[[int], object]
    outcomes: dict[Configuration, Outcome] = field(default_factory=dict)
    complete: bool = True
    _leaders: dict[object, float] = field(default_factory=dict)

    def of(self, c: Configuration) -> Iterator[object]:
        """Yield the groups that a training configuration belongs to, so that the search finds the fastest configuration
        of each group.

        One group has all configurations. Each value of a varied setting has a group of the configurations with this
        value. If the setting ``offload`` is varied, the configurations that do not offload are one more group, and
        those that do are another one.
        """
        yield "all"
        for knob in self.space.free:
            value = getattr(c, knob)
            yield knob, value
            if knob == "offload":
                yield "stays", value == "none"

    def simulate(self, c: Configuration) -> Outcome | None:
        """Return the prediction for a training configuration. If the configuration was simulated before, the
        earlier prediction is returned.

        Return None if the search has reached its largest number of simulations.
        """
        if c not in self.outcomes:
            if len(self.outcomes) == self.most:
                self.complete = False
                return None
            found = self.outcomes[c] = self.question.answer(c)
            if found.fits:
                for contest in self.of(c):
                    self._leaders[contest] = max(self._leaders.get(contest, 0.0), found.tokens_per_s)
            self.seen(len(self.outcomes))
        return self.outcomes[c]

    def beats(self, c: Configuration, tokens_per_s: float) -> bool:
        """Return True if a training configuration beats the fastest simulated configuration of at least one of its
        groups, by more than a small margin.

        A group is all configurations, or those with the same value of one setting, such as the micro-batch size.

        Args:
            c: Training configuration.
            tokens_per_s: Speed of the configuration, or an upper bound of its speed. With an upper bound, True means
                that the configuration is worth a simulation.
        """
        shown = SHOWN * self._leaders.get("all", 0.0)
        leaders = (self._leaders.get(contest, 0.0) for contest in self.of(c))
        return any(tokens_per_s > leader + max(SLACK * leader, shown * bool(leader)) for leader in leaders)

    def dominated(self, bounds: Promise) -> bool:
        """Return True if a training configuration need not be simulated, because another one that was simulated is
        about as good or better.

        This is so if the simulated configuration is faster than ``bounds.tokens_per_s``, or only slightly slower, and
        if it needs less GPU memory than ``bounds.device_bytes``, or only slightly more.

        Args:
            bounds: Upper bound of the speed, and lower bound of the GPU memory, of the configuration that was not
                simulated.
        """
        enough = bounds.tokens_per_s - APART * self._leaders.get("all", 0.0)
        lean = bounds.device_bytes * (1 + APART)
        found = self.outcomes.values()
        return any(o.fits and o.tokens_per_s >= enough and o.device_peak_bytes <= lean for o in found)

    def open(self, contest: object) -> bool:
        """Return True if no configuration of a group that was simulated so far fits into memory.

        Args:
            contest: Group of configurations: all of them, or those with the same value of one setting, such as the
                micro-batch size.
        """
        return contest not in self._leaders


def explore(
    question: Question, space: Space, *, trials: int = MOST, progress: Callable[[int, int], object] = lambda *_: None
) -> Answer:
    """Find the fastest training configuration, and the fastest one for each value of each varied setting.

    Args:
        trials: Largest number of simulations. If it is too small, the answer is not complete.
        progress: Called with the number of simulated configurations, and the largest possible number.

    Raises:
        ValueError: trials < 1, more memory is requested than the machine has, or no configuration can be simulated.
    """
    if trials < 1:
        raise ValueError(f"--trials must be >= 1, but got {trials}")
    every = list(space)
    promises = {c: promise(question, c) for c in every}
    refused = Counter(bounds.refused for bounds in promises.values() if bounds.refused)
    if refused.total() == len(every):
        raise ValueError(next(iter(refused)))
    most = min(trials, len(every))
    contests = Contests(question, space, most, lambda done: progress(done, most))
    may = [c for c in every if not (promises[c].refused or promises[c].missing_bytes)]
    _by_speed(contests, may, promises)
    _by_need(contests, [c for c in every if not promises[c].refused], promises)
    _front(contests, may, promises)
    progress(len(contests.outcomes), len(contests.outcomes))
    answer = Answer(space, tuple(contests.outcomes.values()), contests.complete, refused, len(every))
    answer = _decided(question, answer)
    return replace(answer, spread=question.spread(answer.fitting[0])) if answer.fitting else answer


def _decided(question: Question, answer: Answer) -> Answer:
    """Return the answer of a configuration search with better plans for the fastest configurations.

    The search itself only compares simple plans for each configuration. Afterwards, this function goes through the
    kinds of offload that train under a plan. For the fastest configuration with each kind, it makes a quick plan
    search. A plan that is faster than the simple one replaces it. If the search varies the subgroup size, the quick
    plan search chooses it among the sizes in `SIZES`.
    """
    sizes, better = SIZES if "sub_group_size" in answer.space.free else (), dict[Configuration, Outcome]()
    for offload in PLANNED:
        some = (o for o in answer.fitting if o.plan is not None and o.configuration.offload == offload)
        sketched = next(some, None)
        if sketched is not None:
            found = question.answer(sketched.configuration, QUICK, sizes)
            if found.tokens_per_s > sketched.tokens_per_s:
                better[found.configuration] = found
    kept = [o for o in answer.outcomes if o.configuration not in better]
    return replace(answer, outcomes=(*kept, *better.values()))


def _by_speed(contests: Contests, may: Sequence[Configuration], promises: dict[Configuration, Promise]) -> None:
    turns = [(-promises[c].tokens_per_s, number) for number, c in enumerate(may)]
    heapq.heapify(turns)
    while turns:
        _, number = heapq.heappop(turns)
        c = may[number]
        if not contests.beats(c, promises[c].tokens_per_s):
            continue
        if not promises[c].tight:
            promises[c] = tightened(contests.question, c, promises[c])
            heapq.heappush(turns, (-promises[c].tokens_per_s, number))
        elif contests.simulate(c) is None:
            return


def _by_need(contests: Contests, every: Sequence[Configuration], promises: dict[Configuration, Promise]) -> None:
    by_need = sorted(every, key=lambda c: promises[c].missing_bytes)
    for contest in ("all", ("stays", True), ("stays", False)):
        some = [c for c in by_need if contest in contests.of(c)]
        least = float("inf")
        for c in some if contests.open(contest) else ():
            if promises[c].missing_bytes >= least * (1 - SLACK):
                break
            found = contests.simulate(c)
            if found is None:
                return
            least = min(least, found.missing_bytes)


def _front(contests: Contests, may: Sequence[Configuration], promises: dict[Configuration, Promise]) -> None:
    lean = _least_and_most_accumulated(may)
    for c in sorted(lean, key=lambda c: (promises[c].device_bytes, -promises[c].tokens_per_s)):
        if c in contests.outcomes or contests.dominated(promises[c]):
            continue
        promises[c] = tightened(contests.question, c, promises[c])
        if not contests.dominated(promises[c]) and contests.simulate(c) is None:
            return


def _least_and_most_accumulated(some: Sequence[Configuration]) -> list[Configuration]:
    by_rest: dict[Configuration, list[Configuration]] = {}
    for c in some:
        by_rest.setdefault(c.changed(accumulation=1), []).append(c)
    ends = [sorted(same, key=lambda c: c.accumulation) for same in by_rest.values()]
    return list(dict.fromkeys(c for same in ends for c in (same[0], same[-1])))
