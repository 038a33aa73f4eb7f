"""What the simulator says of one configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from simulator import Machine, Workload, build_strategy, workload_from_model
from simulator.engines.compiled import simulate_fast
from simulator.estimates.blocks import Architecture, ModelError
from simulator.estimates.offloading import offloading
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
        return workload_from_model(
            self.model, self.machine, self.deepspeed(c), sequence=self.sequence,
            gradient_accumulation_steps=c.accumulation, data_parallel=c.gpus,
            activation_checkpointing="full" if c.recompute else "none",
        )  # fmt: skip

    def deepspeed(self, c: Configuration) -> dict[str, Any]:
        """DeepSpeed's config: the one given, with what this configuration decides."""
        made = c.deepspeed()
        given = self.ds_config.get("zero_optimization") or {}
        zero = {k: v for k, v in given.items() if k not in _OFFLOADS}
        for key, value in made["zero_optimization"].items():
            kept = (given.get(key) or {}) if key in _OFFLOADS else {}
            zero[key] = {**kept, **value} if isinstance(value, dict) else value
        config = {k: v for k, v in self.ds_config.items() if k != "train_batch_size"}
        return {**config, **made, "zero_optimization": zero}

    def answer(self, c: Configuration) -> Outcome:
        """Simulates one configuration; what cannot be simulated says why and does not fit."""
        if c.zero_stage < 3 and c.offload in ("parameters", "nvme"):
            return Outcome(c, why_not=f"offload {c.offload} needs ZeRO-3")
        try:
            work = self.workload(c)
            name, options = offloading(self.deepspeed(c)).strategy(c.zero_stage)
        except ModelError as error:
            return Outcome(c, why_not=str(error))
        limits = Limits.of(
            work, self.machine, self.device_memory_bytes, self.host_memory_bytes, self.margin
        )
        plan = self._plan(work, limits) if c.offload == "optimizer" else None
        if plan is not None:
            name, options = "ebbtide", {"plan": plan}
        elif c.offload == "none":
            name, options = "no_offload", {}
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
            overlap_forward=work.zero_stage == 3,
        )  # fmt: skip
        return quick_plan(
            work, self.machine, start, device_bytes=limits.device_bytes,
            host_bytes=limits.host_bytes, evaluations=60, seed=self.seed,
        ).plan  # fmt: skip


_OFFLOADS = ("offload_optimizer", "offload_param")


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
