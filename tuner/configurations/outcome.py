"""What the simulator says of one configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from simulator import Machine, Workload, build_strategy, workload_from_model
from simulator.engines.compiled import simulate_fast
from simulator.estimates.architecture import Architecture, ModelError
from simulator.plan import Plan
from tuner.configurations.space import Configuration
from tuner.memory import GIB, Limits
from tuner.quick import quick_plan


@dataclass(frozen=True)
class Outcome:
    """Prediction of a configuration.

    Attributes:
        why_not: empty if it fits; else what is missing, or why it cannot be simulated.
        plan: where state is offloaded.
    """

    configuration: Configuration
    iteration_s: float = 0.0
    tokens_per_s: float = 0.0
    device_peak_bytes: int = 0
    host_peak_bytes: int = 0
    why_not: str = ""
    plan: Plan | None = field(default=None, repr=False)

    @property
    def fits(self) -> bool:
        return not self.why_not


@dataclass(frozen=True)
class Question:
    """What is trained on what; answers for any configuration.

    Attributes:
        ds_config: DeepSpeed's, for what no knob decides: precision, clipping, buckets.
        device_memory_bytes, host_memory_bytes: of one rank; None: the machine's.
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

    def workload(self, c: Configuration) -> Workload:
        """One rank's iteration.

        Raises:
            ModelError: it cannot be estimated.
        """
        zero = {**self.ds_config.get("zero_optimization", {})}
        zero.pop("offload_optimizer", None)
        zero |= c.deepspeed()["zero_optimization"]
        config = {k: v for k, v in self.ds_config.items() if k not in _BATCHES}
        return workload_from_model(
            self.model, self.machine, {**config, "zero_optimization": zero},
            sequence=self.sequence, micro_batch=c.micro_batch,
            gradient_accumulation_steps=c.accumulation, data_parallel=c.gpus,
            activation_checkpointing="full" if c.recompute else "none",
        )  # fmt: skip

    def answer(self, c: Configuration) -> Outcome:
        """Simulates one configuration; what cannot be simulated says why and does not fit."""
        try:
            work = self.workload(c)
        except ModelError as error:
            return Outcome(c, why_not=str(error))
        limits = Limits.of(
            work, self.machine, self.device_memory_bytes, self.host_memory_bytes, self.margin
        )
        plan = None if c.offload == "none" else self._plan(work, limits)
        name, options = ("no_offload", {}) if plan is None else ("ebbtide", {"plan": plan})
        result = simulate_fast(build_strategy(name, work, **options), self.machine)
        return Outcome(
            c, result.iteration_s, (work.tokens_per_iteration or 0) / result.iteration_s,
            result.device_peak_bytes, result.host_peak_bytes,
            _missing(result.device_peak_bytes, result.host_peak_bytes, limits), plan,
        )  # fmt: skip

    def _plan(self, work: Workload, limits: Limits) -> Plan:
        """Of a short search; all on the host where nothing else fits."""
        start = Plan(
            subgroup_size=work.subgroup_size or max(work.subgroups), subgroups=work.subgroups,
            placement=Plan.runs(["host"] * len(work.subgroups)),
        )  # fmt: skip
        return quick_plan(
            work, self.machine, start, device_bytes=limits.device_bytes,
            host_bytes=limits.host_bytes, evaluations=60, seed=self.seed,
        ).plan  # fmt: skip


_BATCHES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def _missing(device_bytes: int, host_bytes: int, limits: Limits) -> str:
    parts = [
        f"{(peak - limit) / GIB:.1f} GiB of {name} memory are missing"
        for name, peak, limit in (
            ("device", device_bytes, limits.device_bytes),
            ("host", host_bytes, limits.host_bytes),
        )
        if peak > limit
    ]
    return " and ".join(parts)
