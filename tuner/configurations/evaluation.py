"""The prediction of one training configuration's iteration, by the planner and the simulator."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ebbtide.simulator import Machine, Workload, build_strategy
from ebbtide.simulator.analysis.best_setting import simulated
from ebbtide.simulator.analysis.many_plans import PlanSweep
from ebbtide.simulator.estimates.deepspeed_keys import BATCHES
from ebbtide.simulator.estimates.job import Job, plan_refusal
from ebbtide.simulator.estimates.models.architecture import architecture
from ebbtide.simulator.estimates.models.blocks import Architecture, ModelError
from ebbtide.simulator.limits import Limits, Peaks
from ebbtide.simulator.plan import Plan
from ebbtide.tuner.calibrate.interval import plan_interval_s, workload_interval_s
from ebbtide.tuner.configurations.space import Configuration
from ebbtide.tuner.placements.decision import SKETCH, decide, most_micro_batches
from ebbtide.tuner.placements.decision import Question as Decided
from ebbtide.tuner.placements.memory import ImpossibleError
from ebbtide.tuner.placements.storage import named, with_storage

PLANNED = ("optimizer", "parameters")  # offloads that can train under a plan
_PLANNED_MICRO_BATCHES = 3  # the first one, one that is like all others, and the last one


@dataclass(frozen=True)
class Outcome:
    """The predicted time and memory of a training configuration that was simulated.

    Attributes:
        why_not: Empty if the configuration fits. Otherwise the missing memory, or the reason that it
            cannot be simulated.
        plan: Plan for its offloaded optimizer state, or None.
        missing_bytes: Bytes that GPU and host memory lack together.
        refused: True if the configuration cannot be simulated, however much memory there is.
        deepspeed: Complete DeepSpeed config for it.
    """

    configuration: Configuration
    iteration_s: float = 0.0
    tokens_per_s: float = 0.0
    device_peak_bytes: int = 0
    host_peak_bytes: int = 0
    why_not: str = ""
    plan: Plan | None = field(default=None, repr=False)
    missing_bytes: int = 0
    refused: bool = False
    deepspeed: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def fits(self) -> bool:
        return not self.why_not


@dataclass(frozen=True)
class Question:
    """The input of a search for the fastest training configuration: a model, a machine and memory limits.

    Attributes:
        model: Model or its config.
        machine: Machine that trains.
        ds_config: DeepSpeed's config for settings that the search does not vary, such as precision
            and clipping. If empty, bf16 is used.
        device_memory_bytes: GPU memory of one rank in bytes. If None, the machine's.
        host_memory_bytes: Host memory of a node in bytes. If None, the machine's.
        margin: Fraction of both memories to leave free. If None, the planner's default.
        shape: Fields of a `Job` that no configuration changes, such as the kernels or how the ranks are started.
        storage: Directories for optimizer state that memory cannot hold, with the bytes that a node may use.
    """

    model: Architecture | Mapping[str, Any] | str | Path
    machine: Machine
    ds_config: Mapping[str, Any] = field(default_factory=dict)
    sequence: int = 2048
    device_memory_bytes: int | None = None
    host_memory_bytes: int | None = None
    margin: float | None = None
    shape: Mapping[str, Any] = field(default_factory=dict)
    storage: Mapping[str, int] = field(default_factory=dict)
    _known: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @cached_property
    def job(self) -> Job:
        """Return the training job of a configuration search before any configuration is applied.

        Without a DeepSpeed config, it trains in bf16.
        """
        given = {k: v for k, v in self.ds_config.items() if k not in BATCHES}
        config = given if self.ds_config else {"bf16": {"enabled": True}}
        return Job.of_deepspeed(architecture(self.model), config, sequence=self.sequence, **self.shape)

    def of(self, c: Configuration) -> Job:
        """Return the training job of this search's model with the settings of a training configuration.

        Raises:
            ModelError: The configuration and the search's DeepSpeed config contradict each other.
        """
        return self.job.changed(
            micro_batch=c.micro_batch,
            accumulation=c.accumulation,
            zero_stage=c.zero_stage,
            recompute=c.recompute,
            offload=c.offload,
            sub_group_size=c.sub_group_size,
            data_parallel=c.gpus,
        )

    def workload(self, c: Configuration) -> Workload:
        """Return the workload (the planner's input) of one rank under a training configuration.

        Raises:
            ModelError: The workload cannot be estimated.
        """
        shape = Configuration(**{**vars(c), "offload": "optimizer"})
        if shape not in self._known:
            self._known[shape] = self.of(c).workload(self.machine)
        found: Workload = self._known[shape]
        return found

    def limits(self, work: Workload) -> Limits:
        """Return the limits of the memory that plans for a workload may use, from this search's input.

        Raises:
            ValueError: More memory is requested than the machine has.
        """
        asked = {
            "device_memory_bytes": self.device_memory_bytes,
            "host_memory_bytes": self.host_memory_bytes,
            "margin": self.margin,
        }
        return with_storage(work, self.machine, self.storage, **asked)[0]

    @cached_property
    def _on(self) -> Machine:
        return self.machine.storing_in(list(self.storage)) if self.storage else self.machine

    def strategy(self, c: Configuration) -> tuple[str, dict[str, Any]]:
        """Return the name and options of the training strategy that stands for a training configuration in
        a simulation.

        The strategy is ``ebbtide`` (training under a plan) if a plan is possible, and otherwise DeepSpeed's own.

        Raises:
            ModelError: DeepSpeed's config offloads activations, but this configuration does not recompute them.
        """
        if c.offload not in self._known:
            job = self.of(c)
            self._known[c.offload] = (job.offload, bool(plan_refusal(job.deepspeed(), job.offload)))
        moved, unplanned = self._known[c.offload]
        if moved.activations and not c.recompute:
            raise ModelError(
                "activation_checkpointing.cpu_checkpointing needs recomputed activations, "
                "but got kept ones: remove this key, or leave --keep-activations out"
            )
        stock: tuple[str, dict[str, Any]] = moved.strategy(c.zero_stage)
        if c.offload in PLANNED and not unplanned:
            return "ebbtide", {"parameters": moved.parameters}
        return stock

    def answer(self, c: Configuration, effort: float = SKETCH, sizes: Sequence[int] = ()) -> Outcome:
        """Simulate one training configuration, and return its predicted time and memory.

        If the configuration cannot be simulated or does not fit into memory, the result gives the reason.

        Args:
            effort: Fraction of a full plan search's evaluations. With `SKETCH`, the search only compares simple plans.
            sizes: Subgroup sizes that the plan search may choose instead of the configuration's own.
        """
        try:
            work, (name, options) = self.workload(c), self.strategy(c)
        except ModelError as error:
            return Outcome(c, why_not=str(error), refused=True)
        limits, plan = self.limits(work), None
        if name == "ebbtide":
            plan, nearest = self._planned(c, effort, sizes)
            if plan is None:
                return self._outcome(c, work, limits, nearest)
            if sizes and plan.subgroup_size != c.sub_group_size:
                c, work = c.changed(sub_group_size=plan.subgroup_size), work.cut_as(plan)
            options = {"plan": plan}
        result = simulated(name, work, self._on, limits, options).result
        return self._outcome(c, work, limits, result, result.iteration_s, plan)

    def _outcome(
        self,
        c: Configuration,
        work: Workload,
        limits: Limits,
        peaks: Peaks,
        seconds: float = 0.0,
        plan: Plan | None = None,
    ) -> Outcome:
        return Outcome(
            c,
            seconds,
            (work.tokens_per_iteration or 0) / seconds if seconds else 0.0,
            peaks.device_peak_bytes,
            peaks.host_peak_bytes,
            limits.shortfall(peaks),
            plan,
            limits.missing_bytes(peaks),
            deepspeed=self.of(c).deepspeed(),
        )

    def _planned(self, c: Configuration, effort: float, sizes: Sequence[int]) -> tuple[Plan | None, Peaks]:
        """Return the plan that a plan search finds for a training configuration, and the plan's score.

        If no plan fits into memory, the plan is None, and the score is that of the plan which lacks the least memory.
        The search simulates at most a few micro-batches if ``effort`` is at most `SKETCH`, and otherwise at most
        `most_micro_batches`. More micro-batches would not change the memory or the overlap with updates.
        """
        most = _PLANNED_MICRO_BATCHES if effort <= SKETCH else most_micro_batches(self.workload(c))
        c = c.changed(accumulation=min(c.accumulation, most))
        key = ("plan", c, effort, tuple(sizes))
        if key not in self._known:
            work, away = self.workload(c), self.strategy(c)[1]["parameters"] == "cpu"
            folders = named(self.machine, self.storage) if self.storage else {}
            job = Decided(work, self._on, self.limits(work), sizes, away, folders, effort=effort)
            self._known[key] = _planned(job)
        found: tuple[Plan | None, Peaks] = self._known[key]
        return found

    def spread(self, outcome: Outcome) -> float:
        """Return the relative uncertainty of a configuration's predicted iteration time: nine runs in ten
        are expected within this fraction of the prediction.
        """
        work, plan = self.workload(outcome.configuration), outcome.plan
        if plan is not None:
            _, high_s = plan_interval_s(PlanSweep(work.cut_as(plan), self._on), plan)
        else:
            name, options = self.strategy(outcome.configuration)
            _, high_s = workload_interval_s(lambda one: build_strategy(name, one, **options), work, self._on)
        return high_s / outcome.iteration_s - 1


def _planned(job: Decided) -> tuple[Plan | None, Peaks]:
    try:
        found = decide(job)
    except ImpossibleError as error:
        if error.nearest is None:
            raise
        return None, error.nearest
    return found.chosen.plan(found.search.workload, **found.folders), found.search.score(found.chosen)
