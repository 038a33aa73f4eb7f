"""What the simulator says of one configuration."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ebbtide.simulator import Machine, Workload, build_strategy
from ebbtide.simulator.engines.compiled import simulate_fast
from ebbtide.simulator.estimates.architecture import architecture
from ebbtide.simulator.estimates.blocks import Architecture, ModelError
from ebbtide.simulator.estimates.deepspeed_config import BATCHES
from ebbtide.simulator.estimates.job import Job, plan_refusal
from ebbtide.simulator.estimates.offloading import Offloading
from ebbtide.simulator.limits import Limits
from ebbtide.simulator.plan import Plan, Way
from ebbtide.simulator.update.footprint import footprint
from ebbtide.tuner.calibrate.interval import workload_interval_s
from ebbtide.tuner.configurations.space import Configuration
from ebbtide.tuner.placements.homes import begun
from ebbtide.tuner.placements.quick import quick_plan
from ebbtide.tuner.placements.search import evenly
from ebbtide.tuner.placements.storage import named, with_storage

PLANNED = ("optimizer", "parameters")  # offloads that train under a plan
_PLANNED_MICRO_BATCHES = 3  # the first, one like the others, the last
_VISITS = 4  # steps of the grid of visits where nothing may fit


@dataclass(frozen=True)
class Outcome:
    """Prediction of a configuration.

    Attributes:
        why_not: empty if it fits; else what is missing, or why it cannot be simulated.
        plan: where state is offloaded.
        missing_bytes: of both memories, at the least.
        refused: it cannot be simulated, whatever the memory.
        deepspeed: DeepSpeed's config, whole.
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
    """What is trained on what; answers for any configuration.

    Attributes:
        ds_config: DeepSpeed's, for what no knob decides: precision, clipping, buckets; empty: bf16.
        device_memory_bytes, host_memory_bytes: of one rank; None: the machine's.
        storage: directories for state that memory cannot hold, and bytes of a node.
        started: how the ranks are, where not by DeepSpeed's launcher: fields of a `Job`.
        margin: share of both memories that stays free; None: the tuner's own.
    """

    model: Architecture | Mapping[str, Any] | str | Path
    machine: Machine
    ds_config: Mapping[str, Any] = field(default_factory=dict)
    sequence: int = 2048
    device_memory_bytes: int | None = None
    host_memory_bytes: int | None = None
    margin: float | None = None
    seed: int = 0
    started: Mapping[str, Any] = field(default_factory=dict)
    storage: Mapping[str, int] = field(default_factory=dict)
    _workloads: dict[Configuration, Workload] = field(default_factory=dict, init=False, repr=False, compare=False)
    _plans: dict[Configuration, Plan] = field(default_factory=dict, init=False, repr=False, compare=False)
    _offloadings: dict[str, tuple[Offloading, bool]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @cached_property
    def architecture(self) -> Architecture:
        """The model's numbers, read once."""
        return architecture(self.model)

    @cached_property
    def job(self) -> Job:
        """What no configuration changes; where no config is given, bf16 as in all of `tune`."""
        given = {k: v for k, v in self.ds_config.items() if k not in BATCHES}
        config = given if self.ds_config else {"bf16": {"enabled": True}}
        return Job.of_deepspeed(self.architecture, config, sequence=self.sequence, **self.started)

    def of(self, c: Configuration) -> Job:
        """The job that a configuration makes of it.

        Raises:
            ModelError: they do not go together.
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
        """One rank's iteration.

        Raises:
            ModelError: it cannot be estimated.
        """
        shape = Configuration(**{**vars(c), "offload": "optimizer"})
        if shape not in self._workloads:
            self._workloads[shape] = self.of(c).workload(self.machine)
        return self._workloads[shape]

    def limits(self, work: Workload) -> Limits:
        """What the memories hold.

        Raises:
            ValueError: more is given than the machine has.
        """
        return with_storage(
            work,
            self.machine,
            self.storage,
            device_memory_bytes=self.device_memory_bytes,
            host_memory_bytes=self.host_memory_bytes,
            margin=self.margin,
        )[0]

    @cached_property
    def _on(self) -> Machine:
        """With the storage that is given."""
        return self.machine.storing_in(list(self.storage)) if self.storage else self.machine

    def strategy(self, c: Configuration) -> tuple[str, dict[str, Any]]:
        """What simulates it, but for the plan: ``ebbtide`` where state alone is offloaded, and
        the config does not ask for what goes with no plan.

        Raises:
            ModelError: the config offloads what cannot be simulated with this.
        """
        if c.offload not in self._offloadings:
            job = self.of(c)
            self._offloadings[c.offload] = (job.offload, bool(plan_refusal(job.deepspeed(), job.offload)))
        moved, unplanned = self._offloadings[c.offload]
        if moved.activations and not c.recompute:
            raise ModelError(
                "activation_checkpointing.cpu_checkpointing moves activations that are computed "
                "again (recompute), but got kept ones: remove it, or leave --keep-activations out"
            )
        stock = moved.strategy(c.zero_stage)
        if c.offload in PLANNED and not unplanned:
            return "ebbtide", {"parameters": moved.parameters}
        return stock

    def answer(self, c: Configuration) -> Outcome:
        """Simulates one configuration; what cannot be simulated says why and does not fit."""
        try:
            work, (name, options) = self.workload(c), self.strategy(c)
        except ModelError as error:
            return Outcome(c, why_not=str(error), refused=True)
        limits = self.limits(work)
        if name == "ebbtide":
            options = {"plan": self._plan(c, limits)}
        result = simulate_fast(build_strategy(name, work, **options), self._on)
        return Outcome(
            c,
            result.iteration_s,
            (work.tokens_per_iteration or 0) / result.iteration_s,
            result.device_peak_bytes,
            result.host_peak_bytes,
            limits.shortfall(result),
            options.get("plan"),
            limits.missing_bytes(result),
            deepspeed=self.of(c).deepspeed(),
        )

    def spread(self, outcome: Outcome) -> float:
        """Return the spread of an outcome's iteration, within which nine runs in ten are expected."""
        name, options = self.strategy(outcome.configuration)
        if outcome.plan is not None:
            options = {"plan": outcome.plan}
        work = self.workload(outcome.configuration)
        _, high_s = workload_interval_s(lambda one: build_strategy(name, one, **options), work, self._on)
        return high_s / outcome.iteration_s - 1

    def _plan(self, c: Configuration, limits: Limits) -> Plan:
        """Of a short search; where nothing fits, the one that lacks least.

        More micro-batches than a few change neither what fits nor what stands beside the update.
        """
        few = c.changed(accumulation=min(c.accumulation, _PLANNED_MICRO_BATCHES))
        if few not in self._plans:
            away = self.strategy(few)[1]["parameters"] == "cpu"
            self._plans[few] = self._planned(self.workload(few), limits, away=away)
        return self._plans[few]

    def _planned(self, work: Workload, limits: Limits, *, away: bool) -> Plan:
        """``away``: parameters may live on the host."""
        count = len(work.subgroups)
        start = Plan(
            subgroup_size=work.subgroup_size or max(work.subgroups),
            subgroups=work.subgroups,
            ways=(Way("host", "host" if away else "device"),) * count,
            overlap_forward=work.zero_stage == 3,
        )
        leanest = start if self.machine.unified_memory else _leanest(work, start, limits)
        if not limits.hold(*_peaks(work, leanest)):
            return self._storing(work, limits) or leanest
        return quick_plan(
            work,
            self.machine,
            leanest,
            device_bytes=limits.device_bytes,
            host_bytes=limits.host_bytes,
            evaluations=60,
            seed=self.seed,
            move_parameters=away,
        ).plan

    def _storing(self, work: Workload, limits: Limits) -> Plan | None:
        """With what memory cannot hold on storage; None: that does not fit either."""
        if limits.storage_bytes is None:
            return None
        search = begun(work, self._on, limits, self.seed)
        return search.best().plan(work, **named(self.machine, self.storage)) if search.fits else None


def _leanest(work: Workload, start: Plan, limits: Limits) -> Plan:
    """All on the host, or with as much of it on the device as it takes to fit, or to lack least."""
    count = len(work.subgroups)

    def lacks(plan: Plan) -> int:
        return sum(limits.missing(*_peaks(work, plan)).values())

    def placed(residents: int, visits: int) -> Plan:
        c = evenly({"resident": residents, "device": visits, "host": count - residents - visits})
        return start.placed(c.placements, staging_slots=min(1, visits), prefetch=0)

    best = start
    for visits in sorted({0, *(count * step // _VISITS for step in range(1, _VISITS + 1))}):
        for residents in range(count - visits + 1):
            if not lacks(best):
                return best
            best = min(best, placed(residents, visits), key=lacks)
    return best


def _peaks(work: Workload, plan: Plan) -> tuple[int, int]:
    """Device and host bytes: all activations are there at the end of forward."""
    held = footprint(work, plan)
    return held["device"] + work.activation_bytes, held["host"]
