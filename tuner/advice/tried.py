"""The memory and the speed of a training job with changed settings.

The advice that makes a job fit, the advice that makes it faster, and `tune search` all ask here.
"""

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from ebbtide.simulator.analysis.best_setting import simulated
from ebbtide.simulator.analysis.bounds import rough_bound_s
from ebbtide.simulator.estimates.estimate import estimated
from ebbtide.simulator.estimates.job import Job
from ebbtide.simulator.estimates.knobs import OF_MACHINE, Changes, applied, needs, price, same_samples
from ebbtide.simulator.estimates.models.blocks import ModelError
from ebbtide.simulator.estimates.offloading import plan_refusal
from ebbtide.simulator.limits import Limits, Peaks, size
from ebbtide.simulator.machine import Machine
from ebbtide.simulator.plan import Plan
from ebbtide.simulator.rules import RuleError
from ebbtide.simulator.workload import Workload
from ebbtide.tuner.advice.flags import config_of, label_of, options_of
from ebbtide.tuner.placements.decision import FULL, QUICK, PlanQuestion, decide
from ebbtide.tuner.placements.division import ImpossibleError, check_bytes
from ebbtide.tuner.placements.planning import best_of, plan_of
from ebbtide.tuner.placements.storage import with_storage
from ebbtide.tuner.quantities import seconds_text

_FEW = 2  # micro-batches. More change neither what fits nor what overlaps with the update
ONE_SIZE = 2 * 10**8  # elements of a subgroup where only one size is tried


@dataclass(frozen=True)
class JobOutcome:
    """The predicted time and memory of a training job with changed settings.

    Attributes:
        why_not: Empty if the job fits. Otherwise the missing memory, or the reason that it cannot be simulated.
        plan: Plan for its optimizer state, with a prediction. None: DeepSpeed trains alone, or nothing fits.
        missing_bytes: Bytes that GPU and host memory lack together.
    """

    iteration_s: float = 0.0
    tokens_per_s: float | None = None
    device_peak_bytes: int = 0
    host_peak_bytes: int = 0
    why_not: str = ""
    plan: Plan | None = field(default=None, repr=False)
    missing_bytes: int = 0

    @property
    def fits(self) -> bool:
        return not self.why_not


@dataclass(frozen=True)
class Tried:
    """A training job with changed settings, and the answers on its memory and speed.

    Attributes:
        changes: What differs from the asker's job.
        freedom: Arguments of `PlanQuestion` on what plans may do.
        folders: Fields of a plan's file that name the directories for stored optimizer state.
    """

    changes: Changes
    job: Job
    workload: Workload
    machine: Machine
    limits: Limits
    freedom: Mapping[str, Any]
    folders: Mapping[str, Any]

    @cached_property
    def alone(self) -> tuple[str, dict[str, Any]] | None:
        """Return DeepSpeed's own strategy with its options if the job cannot train under a plan, otherwise None."""
        nvme = self.changes.get("offload") == "nvme"
        if (
            self.job.offload.optimizer != "none"
            and not nvme
            and not plan_refusal(self.job.deepspeed(), self.job.offload)
        ):
            return None
        name, options = self.job.offload.strategy(self.workload.zero_stage)
        return name, options

    @cached_property
    def least_s(self) -> float:
        """Return seconds that computing a step takes at least, without any update."""
        work = self.workload.planned
        return work.pipeline_idle_s + work.forward_s + work.backward_s

    @cached_property
    def own(self) -> JobOutcome:
        """Return what DeepSpeed alone takes, if the job cannot train under a plan."""
        assert self.alone is not None
        name, options = self.alone
        one = simulated(name, self.workload, self.machine, self.limits, options).result
        return self._outcome(one.iteration_s, one)

    @cached_property
    def unfit(self) -> JobOutcome | None:
        """Return the missing memory if the job's bytes cannot fit, otherwise None. Under a plan, nothing is
        simulated.
        """
        if self.alone is not None:
            return None if self.own.fits else self.own
        try:
            check_bytes(self.workload, self.machine, self.limits)
        except ImpossibleError as error:
            return self._unfit(error)
        return None

    @cached_property
    def bound_s(self) -> float:
        """Return a lower bound of the iteration time under any plan."""
        if self.alone is not None:
            return self.own.iteration_s
        try:
            return max(self.least_s, rough_bound_s(self.workload, self.machine, self.limits))
        except ValueError:
            return self.least_s

    def question(self, effort: float = QUICK, **freedom: Any) -> PlanQuestion:
        """Return the question for a plan of this job."""
        return PlanQuestion(
            self.workload, self.machine, self.limits, folders=self.folders, effort=effort, **{**self.freedom, **freedom}
        )

    @cached_property
    def brief(self) -> JobOutcome:
        """Return the outcome of a search with few micro-batches and one subgroup size. Several lines of advice ask."""
        return self.outcome(QUICK, few=True)

    def outcome(self, effort: float = QUICK, *, few: bool = False, **freedom: Any) -> JobOutcome:
        """Search a plan for this job, and return its time and memory. Without a plan, DeepSpeed alone is simulated.

        Args:
            few: True to search with few micro-batches a step and one subgroup size, which takes a third of the time.
                All micro-batches are simulated afterwards.
            freedom: Arguments of `PlanQuestion` that replace those of the asker.
        """
        if self.unfit is not None:
            return self.unfit
        if self.alone is not None:
            return self.own
        question = self.question(effort, **freedom)
        if few:
            question = replace(question, workload=self._shortened(), subgroup_sizes=())
        try:
            found = decide(question)
        except ImpossibleError as error:
            return self._unfit(error)
        except RuleError as error:  # too many micro-batches per step to plan
            return JobOutcome(why_not=str(error))
        if not few:
            plan = best_of(found) if effort < FULL else plan_of(found)
            assert plan.prediction is not None
            return self._outcome(plan.prediction.iteration_s, plan.prediction, plan)
        plan = found.chosen.plan(found.search.workload, **found.folders)
        steps = plan.trained_as and plan.trained_as.model_copy(update={"accumulation": self.job.accumulation})
        plan = plan.model_copy(update={"trained_as": steps})
        one = simulated("ebbtide", self.workload.cut_as(plan), self.machine, self.limits, {"plan": plan}).result
        return self._outcome(one.iteration_s, one, plan)

    def _shortened(self) -> Workload:
        work = self.workload
        if work.gradient_accumulation_steps > _FEW:
            job = self.job.changed(accumulation=_FEW)
            work = estimated(job, self.machine)
        chosen = self.freedom.get("subgroup_sizes", (ONE_SIZE,))
        return work.recut(min(ONE_SIZE, work.params)) if chosen else work

    def _outcome(self, seconds: float, peaks: Peaks, plan: Plan | None = None) -> JobOutcome:
        tokens = self.workload.tokens_per_iteration
        return JobOutcome(
            seconds,
            tokens / seconds if tokens else None,
            peaks.device_peak_bytes,
            peaks.host_peak_bytes,
            self.limits.shortfall(peaks),
            plan,
            self.limits.missing_bytes(peaks),
        )

    def _unfit(self, error: ImpossibleError) -> JobOutcome:
        lacking = sum(error.missing.values())
        peaks = error.nearest
        device, host = (peaks.device_peak_bytes, peaks.host_peak_bytes) if peaks else (0, 0)
        return JobOutcome(
            device_peak_bytes=device, host_peak_bytes=host, why_not=error.fact, missing_bytes=max(1, lacking)
        )


@dataclass
class Changing:
    """A training job and a machine, to be asked with changed settings and memory.

    Attributes:
        asked: Memory limits and storage that the user gave: arguments of `with_storage`.
        freedom: Arguments of `PlanQuestion` on what plans may do, such as ``subgroup_sizes``.
    """

    job: Job
    machine: Machine
    asked: Mapping[str, Any] = field(default_factory=dict)
    freedom: Mapping[str, Any] = field(default_factory=dict)
    _known: dict[tuple[tuple[str, Any], ...], Tried | str] = field(default_factory=dict, repr=False)

    def tried(self, changes: Changes) -> Tried | str:
        """Return the job with some changes, or the reason that the job cannot have them together."""
        key = tuple(sorted(changes.items()))
        if key not in self._known:
            self._known[key] = self._tried(changes)
        return self._known[key]

    def _tried(self, changes: Changes) -> Tried | str:
        memory = {name: size for name, size in changes.items() if name in OF_MACHINE}
        machine = self.machine.with_rates(**memory) if memory else self.machine
        asked = {name: value for name, value in self.asked.items() if name not in memory and value is not None}
        storage = asked.pop("storage", None)
        if "storage_bytes" in changes:
            storage = {"": changes["storage_bytes"]}
        try:
            job = applied(self.job, changes)
            if job.offload.activations and not job.recompute:
                return (
                    "activation_checkpointing.cpu_checkpointing needs recomputed activations, but got kept ones: "
                    "remove this key, or leave --keep-activations out"
                )
            workload = estimated(job, machine)
            if storage and self.freedom.get("pieces") and workload.zero_stage == 3:
                return "a drive holds whole subgroups of DeepSpeed, no parts of them"
            limits, machine, folders = with_storage(workload, machine, storage, **asked)
            freedom = dict(self.freedom)
            if changes.get("offload") == "parameters":
                freedom["offload_parameters"] = True
            made = Tried(changes, job, workload, machine, limits, freedom, folders)
            made.alone  # noqa: B018  # raises an error if DeepSpeed does not have the offload at this stage
        except ModelError as error:
            return str(error)
        return made


def asked_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the options of a plan search say on the plans and the memory, as ``freedom`` and ``asked``."""
    names = ("subgroup_sizes", "pieces", "offload_parameters")
    limits = {name: options.get(name) for name in ("device_memory_bytes", "host_memory_bytes", "storage")}
    return {
        "freedom": {name: value for name in names if (value := options.get(name)) is not None},
        "asked": {**limits, "margin": options.get("memory_margin")},
    }


LINES = (0, 1, 2)  # the best change of the DeepSpeed config alone, then with the trainer's arguments, then with kernels
WORTH = 0.03  # share of the time that a line must save to be told beside the line before
NEEDLESS = 0.01  # share of the time up to which a part of a change counts as saving nothing
MOST_SEARCHES = 2  # plan searches for one line
FAR = 0.04  # share of a bound. A plan that is further above its bound leaves room for another change with a low bound


@dataclass(frozen=True)
class Faster:
    """A change that leaves the samples of a step as they are, with which they train faster.

    Attributes:
        changes: New values of fields of the job.
        outcome: Predicted time and memory, and the plan of a short search. Without a plan, nothing is offloaded.
        factor: How many times as fast as the job as given.
    """

    changes: Changes
    job: Job
    workload: Workload
    outcome: JobOutcome
    factor: float

    @property
    def label(self) -> str:
        """Return the changes in words, such as "ZeRO-2, micro-batch 4, accumulation 4"."""
        return label_of(self.changes)

    def options(self, job: Job) -> str:
        """Return the ``tune`` options, or keys of the DeepSpeed config, that make the changes to a job."""
        return options_of(self.changes, job)

    def line(self, job: Job) -> str:
        """Return the line for the user: the options, the time, the factor and the memory."""
        memory = (
            f"{size(self.outcome.device_peak_bytes)} of GPU and {size(self.outcome.host_peak_bytes)} of host memory"
        )
        return f"{self.options(job)}: {seconds_text(self.outcome.iteration_s)} ({self.factor:.2f}x, {memory})"

    def deepspeed(self, config: Mapping[str, Any] | None, plan: str = "automatic") -> dict[str, Any]:
        """Return the DeepSpeed config that trains with these changes."""
        return config_of(self.job, config, plan if self.outcome.plan is not None else None)


def faster(
    job: Job,
    machine: Machine,
    seconds: float,
    *,
    freedom: Mapping[str, Any] | None = None,
    asked: Mapping[str, Any] | None = None,
    most: int = LINES[-1],
) -> list[Faster]:
    """Return up to three changes with which the same samples train faster than ``seconds``, the dearest one last.

    Each is clearly faster than the one before. The first needs another DeepSpeed config only, the second may need other
    arguments of the trainer, and the third other kernels in the training script.

    Args:
        freedom: Arguments of `Question` on what plans may do. None: their defaults.
        asked: Memory limits and storage, as arguments of `with_storage`.
        most: What a change may ask of the user at most (`Knob.needs`).
    """
    space = Changing(job, machine, asked or {}, freedom or {})
    found: list[Faster] = []
    least_s, every = seconds, [changes for changes in same_samples(job) if changes]
    for asks in LINES[: most + 1]:
        one = _best(space, [changes for changes in every if needs(changes) == asks], (1 - WORTH) * least_s)
        if one is not None:
            changed, outcome = one
            least_s = outcome.iteration_s
            found.append(Faster(changed.changes, changed.job, changed.workload, outcome, seconds / least_s))
    return found


def _best(space: Changing, every: list[Changes], below_s: float) -> tuple[Tried, JobOutcome] | None:
    best: tuple[Tried, JobOutcome] | None = None
    searches = 0
    for tried in by_bound(space, every, below_s):
        if tried.bound_s >= below_s or searches == MOST_SEARCHES:
            break
        leaner = _leaner(space, tried)
        outcome = leaner.brief
        searches += leaner.alone is None
        if outcome.fits and outcome.iteration_s < below_s:
            best, below_s = (leaner, outcome), outcome.iteration_s * (1 - NEEDLESS)
        if outcome.fits and outcome.iteration_s < (1 + FAR) * leaner.bound_s:
            break
    return best


def by_bound(space: Changing, every: list[Changes], below_s: float = float("inf")) -> Iterator[Tried]:
    """Yield the sets of changes whose bytes fit, the one with the lowest bound of the time first.

    A bound costs a linear program, so that a lower one, the time of computing alone, decides which are computed.

    Args:
        below_s: Sets whose computing takes longer are left out.
    """
    turns: list[tuple[float, int, int, Tried, bool]] = []
    for number, changes in enumerate(every):
        tried = space.tried(changes)
        if isinstance(tried, Tried) and tried.least_s < below_s:
            turns.append((tried.least_s, price(changes), number, tried, False))
    heapq.heapify(turns)
    while turns:
        _, dear, number, tried, bounded = heapq.heappop(turns)
        if bounded:
            yield tried
        elif tried.unfit is None:
            heapq.heappush(turns, (tried.bound_s, dear, number, tried, True))


def _leaner(space: Changing, tried: Tried) -> Tried:
    most_s = tried.bound_s * (1 + NEEDLESS)
    for name in sorted(tried.changes, key=lambda name: -price({name: tried.changes[name]})):
        together = {"micro_batch", "accumulation"} if name in ("micro_batch", "accumulation") else {name}
        fewer = {key: value for key, value in tried.changes.items() if key not in together}
        without = space.tried(fewer) if fewer else ""
        if isinstance(without, Tried) and without.least_s <= most_s and without.unfit is None:
            tried = without if without.bound_s <= most_s else tried
    return tried
