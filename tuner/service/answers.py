"""What a worker computes: one function per question, from a checked request to plain JSON."""

from __future__ import annotations

import csv
import io
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from simulator.analysis import goodput as rules
from simulator.analysis.templates import Templates
from simulator.analysis.what_if import Point, evaluate
from simulator.engines.compiled import SimResult, simulate_fast
from simulator.engines.reference import simulate as run_with_memory
from simulator.machine import Machine
from simulator.plan import Plan, Prediction
from simulator.schedules.settings import settings
from simulator.schedules.strategies import STRATEGIES, build_strategy, stock_offload
from simulator.update.order import FORWARD
from simulator.workload import Workload
from tuner.placements.memory import ImpossibleError, Limits
from tuner.placements.search import Candidate, Search, even
from tuner.service.failures import checkpointed, goodput_of
from tuner.service.requests import Answer, Goodput, PlanJob, Simulate, WhatIf, WhatIfJob
from tuner.service.scenario import resolve
from tuner.service.timeline_view import view

Progress = Callable[[float, str], None]
TEMPLATES = Templates(build_strategy)  # a worker answers one request after the other
WORTH = 1e-3  # relative difference below which two iterations count as equally long


def simulate(request: Simulate, progress: Progress) -> dict[str, Any]:  # noqa: ARG001
    """One iteration under a strategy, or a plan."""
    machine, workload = resolve(request)
    name = request.strategy if request.plan is None else "ebbtide"
    options: dict[str, Any] = dict(request.options)
    if request.plan is not None:
        options["plan"] = request.plan
    result = simulate_fast(TEMPLATES.compiled(name, workload, options), machine)
    answer = {"strategy": name, **figures(result, workload)}
    if request.timeline:
        timeline = run_with_memory(build_strategy(name, workload, **options), machine)
        answer["spans"] = [asdict(span) for span in timeline.spans]
        answer["memory"] = [asdict(sample) for sample in timeline.memory]
    return answer


def figures(result: SimResult, workload: Workload) -> dict[str, Any]:
    """The numbers of a prediction; times in seconds."""
    tokens = workload.tokens_per_iteration
    return {
        "iteration_s": result.iteration_s,
        **result.phases,
        "device_peak_bytes": result.device_peak_bytes,
        "host_peak_bytes": result.host_peak_bytes,
        "tokens_per_s": tokens / result.iteration_s if tokens else None,
    }


def answer(request: Answer, progress: Progress) -> dict[str, Any]:
    """Stock, not offloading, the plan, and other systems; what to do, in one sentence."""
    machine, workload = resolve(request)
    limits = Limits.of(workload, machine)
    progress(0.1, "a quick plan")
    problem = ""
    plan: Plan | None = None
    try:
        plan, bound_s = _plan(request, machine, workload, limits, progress)
    except ImpossibleError as error:
        problem, bound_s = str(error), math.nan
    rows, timelines = _rows(request, machine, workload, limits, plan)
    if plan is not None and plan.prediction is None:
        plan = _predicted(plan, rows, bound_s)
    choice = None
    if plan is not None and request.mtbf_s is not None:
        plan, choice = checkpointed(plan, workload, machine, limits, request.mtbf_s)
    return {
        **verdict(rows, bound_s, problem),
        "goodput": request.mtbf_s and goodput_of(rows, workload, machine, choice, request.mtbf_s),
        "effort": request.effort,
        "bound_s": None if math.isnan(bound_s) else bound_s,
        "rows": rows,
        "timelines": timelines,
        "plan": None if plan is None else plan.model_dump(mode="json"),
        "limits": {
            "device_bytes": limits.device_bytes,
            "host_bytes": limits.host_bytes,
            "notes": list(limits.explained),
        },
        "machine": _about_machine(machine),
        "workload": _about_workload(workload),
    }


def _plan(
    request: Answer, machine: Machine, workload: Workload, limits: Limits, progress: Progress
) -> tuple[Plan, float]:
    if request.effort == "full":
        from tuner.placements.planning import plan as search

        progress(0.2, "searching the best plan")
        full = search(workload, machine, mtbf_s=request.mtbf_s)
        assert full.prediction is not None
        return full, full.prediction.lower_bound_s
    return quick_plan(workload, machine, limits)


def quick_plan(workload: Workload, machine: Machine, limits: Limits) -> tuple[Plan, float]:
    """The best evenly spread plan, without the local search; with the lower bound.

    Raises:
        ImpossibleError: nothing fits.
    """
    search = Search(workload, machine, limits)
    search.score(even(len(workload.subgroups), 0, 0, 1))
    if not machine.unified_memory:
        search.constructive()
    if all(math.isinf(score.iteration_s) for score in search.scores.values()):
        raise ImpossibleError.explain(workload, limits, list(search.scores.values()))
    return _as_plan(workload, search.best()), search.bound.iteration_s


def _as_plan(workload: Workload, chosen: Candidate) -> Plan:
    visits = "device" in chosen.placements
    fields: dict[str, Any] = {
        "workload_fingerprint": workload.fingerprint,
        "subgroup_size": workload.subgroup_size or max(workload.subgroups),
        "subgroups": workload.subgroups,
        "placement": Plan.runs(chosen.placements),
        "order": chosen.order or FORWARD,
        "staging_slots": chosen.staging_slots if visits else 0,
        "prefetch": chosen.prefetch if visits else 0,
        "threads": chosen.threads,
        "overlap_forward": chosen.overlap_forward,
    }
    return Plan.model_validate(fields)


def _predicted(plan: Plan, rows: list[dict[str, Any]], bound_s: float) -> Plan:
    """The quick plan with what the table says of it and of the others."""
    made = {row["role"]: row for row in rows}
    others = tuple(_prediction(row, 0.0) for row in rows if row["role"] != "plan")
    why = "a quick plan, evenly spread: the search may find a better one"
    changes = {
        "prediction": _prediction(made["plan"], bound_s),
        "alternatives": others,
        "reasons": (why,),
    }
    return plan.model_copy(update=changes)


def _prediction(row: Mapping[str, Any], bound_s: float) -> Prediction:
    seconds = row["iteration_s"]
    name = f"{row['strategy']} {row['setting']}".strip()
    return Prediction(
        strategy=name,
        iteration_s=seconds,
        iteration_low_s=seconds,
        iteration_high_s=seconds,
        forward_s=row["forward_s"],
        backward_s=row["backward_s"],
        step_s=row["step_s"],
        update_s=row["update_s"],
        loop_s=row["loop_s"],
        device_peak_bytes=row["device_peak_bytes"],
        host_peak_bytes=row["host_peak_bytes"],
        lower_bound_s=min(bound_s, seconds),
        note=row["reason"],
    )


def _rows(
    request: Answer, machine: Machine, workload: Workload, limits: Limits, plan: Plan | None
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The table, and the timelines of stock and of the plan."""
    timelines: dict[str, Any] = {"stock": None, "plan": None}
    rows = []
    stock = stock_offload(workload.zero_stage)
    named: list[tuple[str, str, dict[str, Any]]] = [("stock", stock, {})]
    if not machine.unified_memory:  # else there is no other memory that state could stay in
        named.append(("no offload", "no_offload", {}))
    if plan is not None:
        named.insert(0, ("plan", "ebbtide", {"plan": plan}))
    for role, name, options in named:
        schedule = build_strategy(name, workload, **options)
        result = simulate_fast(schedule, machine)
        rows.append(_row(role, name, "", result, workload, machine, limits))
        if role in timelines:
            timelines[role] = view(run_with_memory(schedule, machine))
    if request.peers:
        rows += [_best_peer(*peer, workload, machine, limits) for peer in _peers(workload)]
    stock_s = next(row["iteration_s"] for row in rows if row["role"] == "stock")
    for row in rows:
        row["speedup"] = stock_s / row["iteration_s"]
    rows.sort(key=lambda row: (not row["fits"], row["iteration_s"]))
    return rows, timelines


def _peers(workload: Workload) -> Iterator[tuple[str, str, tuple[float, ...]]]:
    """Strategy, its option, the option's values."""
    if workload.zero_stage < 3:
        return  # they are all of ZeRO-3
    count = len(workload.subgroups)
    yield "zero3_offload_unpinned", "", ()
    for name, option in (("twin_flow", "ratio"), ("deep_optimizer_states", "stride")):
        yield name, option, tuple(setting[option] for setting in settings(name, count))
    yield "superoffload", "", ()


def _best_peer(
    name: str,
    option: str,
    values: tuple[float, ...],
    workload: Workload,
    machine: Machine,
    limits: Limits,
) -> dict[str, Any]:
    """At its fastest setting that fits; where none does, at the one that needs least."""
    settings: list[dict[str, Any]] = [{option: value} for value in values] or [{}]
    rows = []
    for setting in settings:
        result = simulate_fast(TEMPLATES.compiled(name, workload, setting), machine)
        text = ", ".join(f"{key} {value:g}" for key, value in setting.items())
        rows.append(_row("peer", name, text, result, workload, machine, limits))
    return min(rows, key=_preference)


def _preference(row: dict[str, Any]) -> tuple[bool, float]:
    need = row["device_peak_bytes"] + row["host_peak_bytes"]
    return not row["fits"], row["iteration_s"] if row["fits"] else need


def _row(
    role: str,
    name: str,
    setting: str,
    result: SimResult,
    workload: Workload,
    machine: Machine,
    limits: Limits,
) -> dict[str, Any]:
    peaks = (result.device_peak_bytes, result.host_peak_bytes)
    reason = limits.shortfall(*peaks, unified=machine.unified_memory)
    return {
        "role": role,
        "strategy": name,
        "setting": setting,
        "fits": not reason,
        "reason": reason,
        **figures(result, workload),
    }


def verdict(rows: list[dict[str, Any]], bound_s: float, problem: str) -> dict[str, Any]:
    """What to do, in one sentence.

    Args:
        bound_s: no plan's iteration can be shorter; NaN where nothing fits.
        problem: why no plan fits.
    """
    made = {row["role"]: row for row in rows}
    plain, plan = made.get("no offload"), made.get("plan")
    as_fast = plain and (plan is None or plain["iteration_s"] <= plan["iteration_s"] * (1 + WORTH))
    if plain and plain["fits"] and as_fast:
        gain = f"{plain['speedup']:.1f}x stock offloading"
        return {"verdict": "no offload", "sentence": f"Do not offload: it fits, and is {gain}."}
    if plan is None:
        return {"verdict": "impossible", "sentence": f"Nothing fits: {problem}."}
    text = f"Offload with this plan: {plan['speedup']:.1f}x stock, {distance(plan, bound_s)}"
    if plain and plain["iteration_s"] < plan["iteration_s"] * (1 - WORTH):
        text += f"; not offloading would be faster, but {plain['reason']}"
    return {"verdict": "offload", "sentence": text + "."}


def distance(plan: Mapping[str, Any], bound_s: float) -> str:
    """How far from what no plan can beat."""
    gap = plan["iteration_s"] / bound_s - 1 if bound_s else math.nan
    if math.isnan(gap):
        return "its optimum not known"
    return "at the optimum" if gap < 5e-3 else f"{gap:.0%} from the optimum"


def _about_machine(machine: Machine) -> dict[str, Any]:
    return {
        "name": machine.name,
        "device_name": machine.device_name,
        "device_kind": machine.device_kind,
        "measured_with": machine.measured_with,
        "gpus_per_node": machine.gpus_per_node,
        "device_memory_bytes": machine.device_memory_bytes,
        "host_memory_bytes": machine.host_memory_bytes,
        "link_bytes_per_s": machine.h2d_bytes_per_s.median,
        "link_source": machine.h2d_bytes_per_s.source,
        "unified_memory": machine.unified_memory,
    }


def _about_workload(workload: Workload) -> dict[str, Any]:
    return {
        "name": workload.name,
        "params": workload.params,
        "layers": len(workload.layers),
        "subgroups": len(workload.subgroups),
        "ranks_per_node": workload.ranks_per_node,
        "nodes": workload.nodes,
        "tokens_per_iteration": workload.tokens_per_iteration,
        "provenance": workload.provenance,
    }


def what_if(request: WhatIf | WhatIfJob, progress: Progress) -> dict[str, Any] | str:
    """A row per point, as `simulator.what_if` gives them; told how far it is."""
    machine, workload = resolve(request)
    unknown = [name for name in request.strategies if name not in STRATEGIES]
    if unknown:
        raise ValueError(f"strategies must be of {', '.join(STRATEGIES)}, but got {unknown[0]!r}")
    points = list(_points(request, machine))
    rows = []
    for number, point in enumerate(points):
        progress(number / len(points), f"{number} of {len(points)} points")
        row = evaluate(workload, machine, point)
        rows.append({key: _finite(value) for key, value in row.items()})
    return _csv(rows) if request.format == "csv" else {"rows": rows}


def _points(request: WhatIf, machine: Machine) -> Iterator[Point]:
    sizes = request.gpu_memory_bytes or [machine.device_memory_bytes]
    names = list(request.changes)
    for values in itertools.product(*request.changes.values()):
        for size in sizes:
            for strategy in request.strategies:
                changes = {name: _whole(value) for name, value in zip(names, values, strict=True)}
                yield Point(strategy, {}, int(size), changes)


def _whole(value: float) -> float:
    """JSON does not tell 2 from 2.0, but a count of nodes does."""
    return int(value) if float(value).is_integer() else value


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _csv(rows: list[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def plan_job(request: PlanJob, progress: Progress) -> dict[str, Any]:
    """What `tune plan` writes, with stock's time beside it."""
    from tuner.placements.planning import plan as search

    machine, workload = resolve(request)
    limits = Limits.of(workload, machine, margin=request.memory_margin)
    progress(0.05, "a quick plan first")
    quick, _ = quick_plan(workload, machine, limits)
    quick_s = simulate_fast(build_strategy("ebbtide", workload, plan=quick), machine).iteration_s
    progress(0.2, f"quick plan: {quick_s:.4g} s per iteration; searching a better one")
    result = search(
        workload,
        machine,
        seed=request.seed,
        robust=request.robust,
        mtbf_s=request.mtbf_s,
        restart_s=request.restart_s,
        memory_margin=request.memory_margin,
    )
    return {"plan": result.model_dump(mode="json"), "quick_iteration_s": quick_s}


def goodput(request: Goodput, progress: Progress) -> dict[str, Any]:  # noqa: ARG001
    """Expected goodput at the interval given, or at the best one; rules of thumb beside it."""
    cost_s = request.stall_s + request.interference_s
    times = (request.iteration_s, request.stall_s, request.interference_s)
    ends = (request.mtbf_s, request.restart_s, request.persist_s)
    best = rules.best_interval_steps(*times, *ends)
    steps = request.interval_steps or best
    return {
        "interval_steps": steps,
        "goodput": rules.expected_goodput(*times, steps, *ends),
        "best_interval_steps": best,
        "best_goodput": rules.expected_goodput(*times, best, *ends),
        "young_interval_s": rules.young_interval(cost_s, request.mtbf_s),
        "daly_interval_s": rules.daly_interval(cost_s, request.mtbf_s),
    }
