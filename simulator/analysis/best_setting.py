"""A strategy at the setting that serves best within the memory that there is."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from simulator.analysis.guessed import expected, guesses_worth
from simulator.analysis.memory_kinds import peaks_by_kind
from simulator.engines.compiled import CompiledSchedule, SimResult, compile_schedule, simulate_fast
from simulator.limits import Limits
from simulator.machine import Machine
from simulator.plan import Plan
from simulator.schedules.settings import settings
from simulator.schedules.strategies import build_strategy, shared_plan
from simulator.update.footprint import ByKind, Holding, footprint
from simulator.update.recipes import can_be_summed
from simulator.workload import Workload

SLOTS = 2  # of an evenly spread plan
Compile = Callable[[str, Workload, Mapping[str, Any]], CompiledSchedule]


@dataclass(frozen=True)
class Simulated:
    """One strategy at one setting.

    Attributes:
        setting: options of `build_strategy`.
        compiled: what was simulated.
        lacks: what memory is missing, for people; empty: it fits.
    """

    strategy: str
    setting: Mapping[str, Any]
    compiled: CompiledSchedule = field(repr=False, compare=False)
    result: SimResult
    lacks: str

    @property
    def fits(self) -> bool:
        return not self.lacks

    @cached_property
    def memory(self) -> ByKind:
        """What is in use of each memory at its peak, by kind."""
        return peaks_by_kind(self.compiled, self.result)

    def told(self, between: str = " ") -> str:
        """The setting for people: ``ratio 0.3``."""
        return ", ".join(
            f"{key}{between}{value:g}"
            if isinstance(value, int | float) and not isinstance(value, bool)
            else f"{key}{between}{value}"
            for key, value in self.setting.items()
        )


def compiled(name: str, workload: Workload, options: Mapping[str, Any]) -> CompiledSchedule:
    """A strategy's schedule, built anew."""
    return compile_schedule(build_strategy(name, workload, **options))


def simulated(
    name: str,
    workload: Workload,
    machine: Machine,
    limits: Limits,
    setting: Mapping[str, Any],
    compile_: Compile = compiled,
) -> Simulated:
    """One iteration, and whether it fits."""
    options = dict(setting)
    spread = name == "ebbtide" and set(options) == {"resident_share", "device_share"}
    if spread:
        plan = _spread(workload, **options)
        options = {"plan": plan if machine.unified_memory else _summing(plan, workload, limits)}
    schedule = compile_(name, workload, options)
    result = simulate_fast(schedule, machine)
    found = Simulated(name, setting, schedule, result, limits.shortfall(result))
    if spread and workload.clip_rate is not None and not machine.unified_memory:
        return _guessing(found, options["plan"], workload, machine, limits, compile_)
    return found


def _guessing(
    plain: Simulated, plan: Plan, workload: Workload, machine: Machine, limits: Limits,
    compile_: Compile,
) -> Simulated:  # fmt: skip
    """With as many updates before the norm as there is memory and time for, if that is faster where
    some steps clip.
    """
    left = limits.host_bytes - plain.result.host_peak_bytes
    every = plan.model_copy(update={"speculate": plan.subgroup_count}).guessed
    sizes = [n for n, able in zip(workload.subgroups, every, strict=True) if able][::-1]
    count = guesses_worth(workload, machine, sizes, left)
    guesses = plan.model_copy(update={"speculate": count})
    if workload.zero_stage < 3 or not any(guesses.guessed):
        return plain
    made = compile_("ebbtide", workload, {"plan": guesses})
    right = simulate_fast(made, machine)
    mean = expected(workload, machine, guesses, lambda p: right if p.speculate else plain.result)
    if mean.iteration_s >= plain.result.iteration_s:
        return plain
    return Simulated(plain.strategy, plain.setting, made, mean, limits.shortfall(mean))


def _spread(workload: Workload, device_share: float, resident_share: float) -> Plan:
    """With as many slots and visits before the norm as `SLOTS` allows."""
    plan = shared_plan(workload, device_share, resident_share)
    slots = min(SLOTS, plan.count("device"))
    return plan.model_copy(update={"staging_slots": slots, "prefetch": slots})


def _summing(plan: Plan, workload: Workload, limits: Limits) -> Plan:
    """With as many sums of micro-batches on the device as it has memory left for."""
    held = Holding.of_workload(workload)
    if not held.sums:
        return plan
    pairs = zip(workload.subgroups, plan.placements, strict=True)
    sizes = [size for size, placement in pairs if can_be_summed(placement)]
    taken = footprint(workload, plan)["device"]
    taken += workload.activation_bytes
    count = held.most_sums(sizes, limits.device_bytes - taken)
    return plan.model_copy(update={"device_sums": count})


def best_setting(
    name: str,
    workload: Workload,
    machine: Machine,
    limits: Limits,
    setting: Mapping[str, Any] | None = None,
    compile_: Compile = compiled,
) -> Simulated:
    """At the setting given, or the fastest that fits; where none does, the one that lacks least.

    Args:
        compile_: what makes a schedule of the strategy's name, the workload and the setting.
    """
    options = [setting] if setting else settings(name, len(workload.subgroups))
    tried = [simulated(name, workload, machine, limits, one, compile_) for one in options]

    def rank(one: Simulated) -> tuple[bool, float]:
        lacking = limits.missing_bytes(one.result)
        return lacking > 0, lacking or one.result.iteration_s

    return min(tried, key=rank)
