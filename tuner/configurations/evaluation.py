"""The prediction of one training configuration's iteration, by the planner and the simulator."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ebbtide.simulator import Machine, Workload, build_strategy
from ebbtide.simulator.analysis.many_plans import PlanSweep
from ebbtide.simulator.estimates.deepspeed_keys import BATCHES
from ebbtide.simulator.estimates.estimate import estimated
from ebbtide.simulator.estimates.job import Job
from ebbtide.simulator.estimates.models.architecture import architecture
from ebbtide.simulator.estimates.models.blocks import Architecture
from ebbtide.simulator.limits import Limits
from ebbtide.tuner.advice.tried import Changing, JobOutcome, Tried
from ebbtide.tuner.calibrate.interval import plan_interval_s, workload_interval_s
from ebbtide.tuner.configurations.space import Configuration
from ebbtide.tuner.placements.decision import QUICK
from ebbtide.tuner.placements.storage import with_storage


@dataclass(frozen=True, kw_only=True)
class ConfigurationOutcome(JobOutcome):
    """The predicted time and memory of a training configuration that was simulated.

    Attributes:
        tokens_per_s: 0 if the configuration was not timed.
        refused: True if the configuration cannot be simulated, however much memory there is.
        quick: True if the plan is that of a quick search. The one that `tune plan` finds may be faster.
        deepspeed: Complete DeepSpeed config for it.
    """

    configuration: Configuration
    tokens_per_s: float = 0.0
    refused: bool = False
    quick: bool = False
    deepspeed: Mapping[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class SearchQuestion:
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
        """Return the job before any configuration is applied. Without a DeepSpeed config, it trains in bf16."""
        given = {k: v for k, v in self.ds_config.items() if k not in BATCHES}
        config = given if self.ds_config else {"bf16": {"enabled": True}}
        return Job.of_deepspeed(architecture(self.model), config, sequence=self.sequence, **self.shape)

    def of(self, c: Configuration) -> Job:
        """Return the job of a configuration. Raise ModelError if the DeepSpeed config contradicts it."""
        return self.job.changed(**_changes(c))

    def workload(self, c: Configuration) -> Workload:
        """Return the workload of one rank under a training configuration.

        Raises:
            ModelError: The workload cannot be estimated.
        """
        shape = Configuration(**{**vars(c), "offload": "optimizer"})
        if shape not in self._known:
            self._known[shape] = estimated(self.of(c), self.machine)
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

    def tried(self, c: Configuration, sizes: Sequence[int] = ()) -> Tried | str:
        """Return the training job of a configuration, or the reason that it cannot be simulated.

        Args:
            sizes: Subgroup sizes that the plan search may choose instead of the configuration's own.
        """
        freedom = {"subgroup_sizes": tuple(sizes), "offload_parameters": c.offload == "parameters"}
        asked = {
            "device_memory_bytes": self.device_memory_bytes,
            "host_memory_bytes": self.host_memory_bytes,
            "margin": self.margin,
            "storage": dict(self.storage) or None,
        }
        return Changing(self.job, self.machine, asked, freedom).tried(_changes(c))

    def answer(
        self, c: Configuration, effort: float = QUICK, sizes: Sequence[int] = (), *, few: bool = True
    ) -> ConfigurationOutcome:
        """Simulate a configuration. If it cannot be simulated or does not fit, the result gives the reason.

        ``effort`` is a fraction of a full search's evaluations. The plan may have one of ``sizes`` instead of its own.
        """
        tried = self.tried(c, sizes)
        if isinstance(tried, str):
            return ConfigurationOutcome(configuration=c, why_not=tried, refused=True)
        return self.outcome(c, tried, effort, few=few)

    def outcome(
        self, c: Configuration, tried: Tried, effort: float = QUICK, *, few: bool = True
    ) -> ConfigurationOutcome:
        """Predict the time and memory of a configuration from its training job."""
        found = tried.outcome(effort, few=few)
        if found.plan is not None and tried.freedom["subgroup_sizes"]:
            c = c.changed(sub_group_size=found.plan.config_subgroup_size)
        known = {**vars(found), "tokens_per_s": found.tokens_per_s or 0.0, "quick": found.plan is not None and few}
        return ConfigurationOutcome(**known, configuration=c, deepspeed=self.of(c).deepspeed())

    def spread(self, outcome: ConfigurationOutcome) -> float:
        """Return the relative uncertainty of a configuration's predicted iteration time: nine runs in ten
        are expected within this fraction of the prediction.
        """
        tried, plan = self.tried(outcome.configuration), outcome.plan
        assert isinstance(tried, Tried)
        if plan is not None:
            _, high_s = plan_interval_s(PlanSweep(tried.workload.cut_as(plan), tried.machine), plan)
        else:
            name, options = tried.alone or ("no_offload", {})
            _, high_s = workload_interval_s(
                lambda one: build_strategy(name, one, **options), tried.workload, tried.machine
            )
        return high_s / outcome.iteration_s - 1


def _changes(c: Configuration) -> dict[str, Any]:
    return {"data_parallel" if name == "gpus" else name: value for name, value in vars(c).items()}
