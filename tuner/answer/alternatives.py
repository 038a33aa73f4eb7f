"""The same prediction for what was not chosen."""

from __future__ import annotations

from simulator.engines.compiled import SimResult, simulate_fast
from simulator.machine import Machine
from simulator.plan import Plan, Prediction
from simulator.schedules.settings import settings
from simulator.schedules.strategies import build_strategy
from simulator.workload import Workload
from tuner.placements.memory import Limits


def alternatives(
    workload: Workload, machine: Machine, plan: Plan, limits: Limits
) -> list[Prediction]:
    """Stock as a user would run it today, peers at their best setting, ebbtide less a feature."""
    host = Plan(
        subgroup_size=plan.subgroup_size,
        placement=Plan.runs(["host"] * len(workload.subgroups)),
        staging_slots=0,
        threads=plan.threads,
        overlap_forward=workload.zero_stage == 3,
    )
    result = [
        *_stock(workload, machine, limits),
        _not_offloaded(workload, machine, limits),
        _prediction("ebbtide, all on the host", _run(workload, machine, "ebbtide", plan=host)),
    ]
    if workload.zero_stage == 3:
        waiting = _run(workload, machine, "ebbtide", plan=plan, overlap_forward=False)
        result.append(_prediction("ebbtide, no overlap with forward", waiting))
    return [p for p in result if p is not None]


def _stock(workload: Workload, machine: Machine, limits: Limits) -> list[Prediction | None]:
    """Stock and its peers at the workload's ZeRO stage."""
    if workload.zero_stage < 3:
        run = _run(workload, machine, "zero_offload")
        return [_prediction(f"stock ZeRO-{workload.zero_stage} offload", run)]
    return [
        _prediction("stock ZeRO-3 offload", _run(workload, machine, "zero3_offload")),
        _prediction("stock, pin_memory false", _run(workload, machine, "zero3_offload_unpinned")),
        _best("Twin-Flow", workload, machine, limits, "twin_flow"),
        _best("Deep Optimizer States", workload, machine, limits, "deep_optimizer_states"),
        _prediction("SuperOffload", _run(workload, machine, "superoffload")),
    ]


def _run(workload: Workload, machine: Machine, name: str, **options: object) -> SimResult:
    return simulate_fast(build_strategy(name, workload, **options), machine)


def _not_offloaded(workload: Workload, machine: Machine, limits: Limits) -> Prediction | None:
    """With a note of what is missing where it does not fit; None where there is no other memory."""
    if machine.unified_memory:
        return None
    result = _run(workload, machine, "no_offload")
    note = limits.shortfall(result.device_peak_bytes, result.host_peak_bytes)
    return _prediction("no offload", result).model_copy(update={"note": note})


def _fits(result: SimResult, limits: Limits) -> bool:
    return limits.hold(result.device_peak_bytes, 0)


def _best(
    label: str, workload: Workload, machine: Machine, limits: Limits, name: str
) -> Prediction | None:
    """A strategy at its best setting that fits into device memory."""
    tried = [
        (setting, _run(workload, machine, name, **setting))
        for setting in settings(name, len(workload.subgroups))
    ]
    fitting = [(setting, result) for setting, result in tried if _fits(result, limits)]
    if not fitting:
        return None
    setting, result = min(fitting, key=lambda pair: pair[1].iteration_s)
    (option, value), *_ = setting.items()
    return _prediction(f"{label}, {option} {value:g}", result)


def _prediction(name: str, result: SimResult) -> Prediction:
    return Prediction(
        strategy=name,
        iteration_s=result.iteration_s,
        iteration_low_s=result.iteration_s,
        iteration_high_s=result.iteration_s,
        **result.phases,
        device_peak_bytes=result.device_peak_bytes,
        host_peak_bytes=result.host_peak_bytes,
    )
