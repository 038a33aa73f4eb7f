"""The memory and the speed of a training job with changed settings.

The advice that makes a job fit, the advice that makes it faster, and `tune search` all ask here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from ebbtide.simulator.analysis.best_setting import simulated
from ebbtide.simulator.analysis.bounds import rough_bound_s
from ebbtide.simulator.estimates.estimate import estimated
from ebbtide.simulator.estimates.job import Job
from ebbtide.simulator.estimates.knobs import OF_MACHINE, Changes, applied
from ebbtide.simulator.estimates.models.blocks import ModelError
from ebbtide.simulator.estimates.offloading import plan_refusal
from ebbtide.simulator.limits import Limits, Peaks
from ebbtide.simulator.machine import Machine
from ebbtide.simulator.plan import Plan
from ebbtide.simulator.rules import RuleError
from ebbtide.simulator.workload import Workload
from ebbtide.tuner.placements.decision import FULL, QUICK, PlanQuestion, decide
from ebbtide.tuner.placements.division import check_bytes
from ebbtide.tuner.placements.impossible import ImpossibleError
from ebbtide.tuner.placements.planning import plan_of
from ebbtide.tuner.placements.quick import best_of
from ebbtide.tuner.placements.storage import with_storage

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
