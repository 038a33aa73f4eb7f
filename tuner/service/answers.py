"""The computations of the planning service's worker processes, with one function per kind of request.

Every result is JSON data or text.
"""

import csv
import io
import math
from dataclasses import asdict
from functools import partial
from typing import Any

from ebbtide.simulator.analysis.best_setting import simulated, under_plan
from ebbtide.simulator.analysis.bounds import lower_bound
from ebbtide.simulator.analysis.goodput import (
    CheckpointCost,
    Failures,
    best_interval_steps,
    daly_interval,
    expected_goodput,
    young_interval,
)
from ebbtide.simulator.analysis.many_plans import PlanSweep
from ebbtide.simulator.analysis.templates import Templates
from ebbtide.simulator.analysis.what_if import evaluate, grid, named, usual_strategies, with_shared_plans
from ebbtide.simulator.engines.reference import simulate as run_with_memory
from ebbtide.simulator.estimates.job import Job
from ebbtide.simulator.limits import Limits
from ebbtide.simulator.machine import Machine
from ebbtide.simulator.plan import Plan, Prediction
from ebbtide.simulator.rules import RuleError, worded
from ebbtide.simulator.schedules.strategies import build_strategy
from ebbtide.simulator.workload import Workload
from ebbtide.tuner.advice.failures import RESTART_S, checkpointed, goodput_of
from ebbtide.tuner.advice.ways_out import ANOTHER_WAY, another_gpu
from ebbtide.tuner.advice.ways_out import ways_out as nearest_changes
from ebbtide.tuner.answer.instructions import use, use_without_offload
from ebbtide.tuner.answer.rows import Row, alternatives, best_stock, compare, figures
from ebbtide.tuner.answer.timeline_view import view
from ebbtide.tuner.answer.verdict import BY_KIND, Role, about, verdict
from ebbtide.tuner.placements.checkpointing import check_failures, without_writers
from ebbtide.tuner.placements.division import ImpossibleError
from ebbtide.tuner.placements.planning import predict, quick_or_roomiest, quick_plan
from ebbtide.tuner.placements.storage import UNWORN, wear, with_storage
from ebbtide.tuner.progress import ShowProgress
from ebbtide.tuner.service.requests import (
    Answer,
    Goodput,
    PlanJob,
    Planning,
    Scenario,
    SearchJob,
    Simulate,
    WhatIf,
    WhatIfJob,
    check_plannable,
    fields_of,
    machine_of,
    model_of,
    notes_of,
    offload_of,
    resolve,
    shape_of,
    space_of,
    storage_of,
)
from ebbtide.tuner.service.responses import MachineFacts

# Fields of a workload that an answer contains unchanged.
WORKLOAD_FACTS = ("name", "params", "ranks_per_node", "nodes", "tokens_per_iteration", "provenance")
LIMITS = ("device_bytes", "host_bytes", "storage_bytes", "unified")
SAME = 1e-9  # relative difference of two simulations of the same iteration that counts as none
OTHERS = (
    "the plan file's own prediction is for another machine, training job or version of ebbtide: all figures here are "
    "new predictions"
)
# Fields of a job that a search of configurations sets by itself.
SEARCHED = (
    *("sequence", "micro_batch", "accumulation", "zero_stage", "recompute", "recompute_share", "data_parallel"),
    *("kernels", "fused_loss", "flash_attention"),
)
TEMPLATES = Templates(build_strategy)  # shared, because a worker answers one request at a time


def simulate(request: Simulate, progress: ShowProgress) -> dict[str, Any]:
    """Simulate one training iteration under the strategy or the plan of a request to the service. Return the
    iteration's times and memory as JSON data.
    """
    machine, workload = resolve(request)
    name, options = request.strategy, dict[str, Any](request.options)
    if request.plan is not None:
        name, options["plan"] = "ebbtide", request.plan
        workload = workload.cut_as(request.plan)
    elif name is None:
        name, moved = offload_of(request).strategy(workload.zero_stage)
        options = {**moved, **options}
    result = simulated(name, workload, machine, Limits.of(workload, machine), options, TEMPLATES.compiled).result
    limits, _ = allowed(request, workload, machine)
    lacks = limits.shortfall(result)
    numbers = figures(result, workload.tokens_per_iteration)
    answer = {"strategy": name, "fits": not lacks, "reason": lacks, **numbers, "limits": _limits(limits)}
    answer["notes"] = list(notes_of(request, workload))
    if request.timeline:
        timeline = run_with_memory(build_strategy(name, workload, **options), machine)
        answer["spans"] = [asdict(span) for span in timeline.spans]
        answer["memory"] = [asdict(sample) for sample in timeline.memory]
    return answer


def allowed(request: Simulate | Answer, workload: Workload, machine: Machine) -> tuple[Limits, Machine]:
    """Return the memory limits for a request, and the machine with the speeds of its storage."""
    storage = storage_of(request)
    limits, machine, _ = with_storage(workload, machine, storage)
    if request.plan is not None and not storage:
        limits = request.plan.limits_on(workload, machine)
    return limits, machine


def answer(request: Answer, progress: ShowProgress) -> dict[str, Any]:
    """Return the service's advice on offloading as JSON data: a verdict, and a table of ways to train with their times.

    The table has a plan, DeepSpeed without a plan, no offload and, on request, other systems.
    """
    check_plannable(request)
    machine, workload = resolve(request)
    if request.mtbf_s is not None:
        check_failures(workload, machine, request.mtbf_s, RESTART_S)
    limits, machine = allowed(request, workload, machine)
    progress(0.1, "a quick plan")
    problem, plan = "", None
    try:
        plan = _plan(request, machine, workload, limits, progress)
    except ImpossibleError as error:
        problem = error.fact  # without the advice, which `ways_out` gives
    choice = None
    if request.plan is not None:
        plan = _judged(request.plan, workload, machine, limits)
    if request.mtbf_s is not None and plan is not None and plan.prediction is not None:
        plan, choice = checkpointed(plan, workload.cut_as(plan), machine, limits, request.mtbf_s)
    rows = compare(workload, machine, limits, plan, others=request.peers, compile_=TEMPLATES.compiled)
    predictions = _predictions(rows, plan)
    decided = verdict(predictions, problem)
    if plan is not None:
        plan = plan.model_copy(update={"alternatives": alternatives(rows)})
    best = best_stock(rows)
    failing = request.mtbf_s and goodput_of(dict(predictions), workload, machine, choice, request.mtbf_s)
    return {
        "verdict": decided.choice,
        "sentence": decided.sentence,
        "goodput": failing,
        "effort": request.effort,
        "bound_s": (plan and plan.prediction and plan.prediction.lower_bound_s) or None,
        "rows": listed(rows, workload),
        "best_stock": best and {"name": best.name, "label": best.label, "iteration_s": best.result.iteration_s},
        "faster": _faster(request, machine_of(request), predictions),
        "memory": {row.role: row.simulated.memory for row in rows if row.role in BY_KIND},
        "timelines": _timelines(rows, machine, workload, plan, decided.choice) if request.timelines else None,
        "plan": None if plan is None else plan.model_dump(mode="json"),
        "use": _use(decided.choice, plan, workload, request.ds_config),
        "limits": _limits(limits),
        "about": about(workload, machine),
        "notes": list(notes_of(request, workload)),
        "machine": _about_machine(machine),
        "workload": _about_workload(workload, request),
    }


def _use(choice: str, plan: Plan | None, workload: Workload, config: dict[str, Any] | None) -> dict[str, Any] | None:
    if choice == "no offload":
        return use_without_offload(workload, config)
    return use(plan, workload, config) if plan is not None else None


def _limits(limits: Limits) -> dict[str, Any]:
    return {**{name: getattr(limits, name) for name in LIMITS}, "notes": list(limits.explained)}


def ways_out(request: Scenario, progress: ShowProgress) -> dict[str, Any]:
    """Return, as JSON data, a list of the smallest changes with which the training job of a request fits
    into memory (``ways``), and further advice in words (``another_way``).

    The list is empty for a measured workload, which cannot be changed.
    """
    if request.workload is not None:
        return {"ways": [], "another_way": worded(ANOTHER_WAY)}
    check_plannable(request)
    job, machine, storage = _own_job(request), machine_of(request), storage_of(request) or None
    found = nearest_changes(job, machine, freedom(request), storage=storage)
    ways = [
        {
            "label": way.label,
            "changes": fields_of(way.changes, job, request.ds_config),
            "iteration_s": way.iteration_s,
            "tokens_per_s": way.tokens_per_s,
        }
        for way in found
    ]
    elsewhere = "" if ways else another_gpu(job, machine, freedom(request), storage=storage)
    return {"ways": ways, "another_way": worded(". ".join(filter(None, [elsewhere, ANOTHER_WAY])))}


def _own_job(request: Scenario) -> Job:
    job = request.job
    return job if request.subgroup_size is None else job.changed(sub_group_size=request.subgroup_size)


def _faster(
    request: Answer, machine: Machine, predictions: list[tuple[Role, Prediction]]
) -> list[dict[str, Any]] | None:
    wanted = request.faster or request.effort == "full"
    fitting = [one.iteration_s for role, one in predictions if role in ("plan", "no offload") and one.fits]
    if not wanted or request.workload is not None or not fitting:
        return [] if wanted else None
    from ebbtide.tuner.advice.tried import faster

    job, asked = _own_job(request), {"storage": storage_of(request) or None}
    return [
        {
            "label": one.label,
            "options": one.options(job),
            "changes": fields_of(one.changes, job, request.ds_config),
            "iteration_s": one.outcome.iteration_s,
            "tokens_per_s": one.outcome.tokens_per_s,
            "factor": one.factor,
            "device_peak_bytes": one.outcome.device_peak_bytes,
            "host_peak_bytes": one.outcome.host_peak_bytes,
            "offloads": one.outcome.plan is not None,
            "deepspeed": one.deepspeed(request.ds_config),
        }
        for one in faster(job, machine, min(fitting), freedom=freedom(request), asked=asked)
    ]


def _plan(request: Answer, machine: Machine, workload: Workload, limits: Limits, progress: ShowProgress) -> Plan:
    if request.plan is not None:
        return request.plan
    if request.effort == "full":
        progress(0.2, "searching the best plan")
        return _searched(request, machine, workload)
    within = limits if request.mtbf_s is None else without_writers(limits)
    quick = quick_plan(workload, machine, within, **freedom(request))
    if quick.prediction is None or not (quick.stores or request.endurance_bytes):
        return quick
    reason = UNWORN
    if quick.stores:
        reason = wear(workload.cut_as(quick), quick, quick.prediction.iteration_s, request.endurance_bytes)
    return quick.model_copy(update={"reasons": (*quick.reasons, reason)})


def _judged(plan: Plan, workload: Workload, machine: Machine, limits: Limits) -> Plan:
    known, simulated_here = plan.prediction, under_plan(plan, PlanSweep(workload.cut_as(plan), machine), limits)
    same_s = known is not None and math.isclose(known.iteration_s, simulated_here.result.iteration_s, rel_tol=SAME)
    if known is not None and same_s and known.limits == limits.by_memory:
        return plan
    prediction = None
    if simulated_here.fits:
        bound = lower_bound(workload.cut_as(plan), machine, limits)
        prediction = predict(workload, machine, plan, limits, bound.iteration_s)
    return plan.model_copy(update={"prediction": prediction, "reasons": plan.reasons if known is None else (OTHERS,)})


def _searched(request: Planning, machine: Machine, workload: Workload, **more: Any) -> Plan:
    from ebbtide.tuner.placements.planning import plan

    return plan(
        workload,
        machine,
        mtbf_s=request.mtbf_s,
        **freedom(request),
        storage=storage_of(request),
        endurance_bytes=request.endurance_bytes,
        **more,
    )


def freedom(request: Scenario) -> dict[str, Any]:
    """Return the arguments of `quick_plan` that say what a search may vary."""
    sizes: dict[str, Any] = {} if request.subgroup_size is None else {"subgroup_sizes": ()}
    return {"offload_parameters": not offload_of(request).keeps_parameters, **sizes}


def _predictions(rows: list[Row], plan: Plan | None) -> list[tuple[Role, Prediction]]:
    known = plan and plan.prediction
    return [
        (row.role, known if known and row.role == "plan" and row.simulated.fits else row.prediction) for row in rows
    ]


def listed(rows: list[Row], workload: Workload) -> list[dict[str, Any]]:
    """Return the rows of an answer as JSON data, the fastest that fits first."""
    stock, best = next(row for row in rows if row.role == "stock"), best_stock(rows)
    stock_s = stock.result.iteration_s if stock.simulated.fits else None
    best_s = None if best is None else best.result.iteration_s
    fields = [row.fields(stock_s, best_s, workload.tokens_per_iteration) for row in rows]
    return sorted(fields, key=lambda row: (not row["fits"], row["iteration_s"]))


def _timelines(rows: list[Row], machine: Machine, workload: Workload, plan: Plan | None, choice: str) -> dict[str, Any]:
    by_role = {row.role: row for row in rows if row.workload is not None}
    stock, plain = by_role["stock"], by_role.get("no offload") if choice == "no offload" else None
    schedules = {
        "stock": stock.schedule,
        "plan": plan and build_strategy("ebbtide", workload, plan=plan),
        "no offload": plain and plain.schedule,
    }
    return {role: built and view(run_with_memory(built, machine), built) for role, built in schedules.items()}


def _about_machine(machine: Machine) -> dict[str, Any]:
    link, shown = machine.h2d_bytes_per_s, (*MachineFacts.model_fields, "measured_with")
    return {
        **{name: getattr(machine, name) for name in shown},
        "link_bytes_per_s": link.median,
        "link_source": link.source,
    }


def _about_workload(workload: Workload, request: Scenario) -> dict[str, Any]:
    arch = request.job.architecture if request.workload is None else None
    return {
        **{name: getattr(workload, name) for name in WORKLOAD_FACTS},
        "model_params": arch and sum(block.elements for block in arch.blocks()),
        "layers": arch.layers if arch else len(workload.layers),
        "subgroups": len(workload.subgroups),
    }


def what_if(request: WhatIf | WhatIfJob, progress: ShowProgress) -> dict[str, Any] | str:
    """Return the simulations of a what-if request: a table with one row for each strategy at each
    combination of values, as JSON data or as CSV text.

    Args:
        progress: Called with the finished fraction and the name of the current phase.
    """
    machine, workload = resolve(request)
    changes = {name: [_whole(v) for v in values] for name, values in request.changes.items()}
    strategies = named(request.strategies, workload) if request.strategies else usual_strategies(workload)
    points = list(grid(machine, strategies, request.gpu_memory_bytes, changes))
    found, planner = [], partial(quick_or_roomiest, **freedom(request))
    for number, point in enumerate(points):
        progress(number / len(points), f"{number} of {len(points)} points")
        try:
            found.append(evaluate(workload, machine, point, planner))
        except RuleError as error:
            inside = f"changes.{error.key}" if error.key in changes else error.key
            raise RuleError(str(error), inside) from None
    rows = with_shared_plans(workload, machine, points, found)
    rows = [{key: _finite(value) for key, value in row.items()} for row in rows]
    return _csv(rows) if request.format == "csv" else {"rows": rows}


def _whole(value: float) -> float:
    return int(value) if float(value).is_integer() else value


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _csv(rows: list[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def plan_job(request: PlanJob, progress: ShowProgress) -> dict[str, Any]:
    """Search for the best plan of a request's training job. Return, as JSON data, the plan and, for
    comparison, the iteration time under the plan of a quick search.
    """
    check_plannable(request)
    machine, workload = resolve(request)
    limits, drives, _ = with_storage(workload, machine, storage_of(request), margin=request.memory_margin)
    progress(0.05, "a quick plan first")
    quick = quick_plan(workload, drives, limits, **freedom(request))
    assert quick.prediction is not None
    quick_s = quick.prediction.iteration_s
    progress(0.2, f"quick plan: {quick_s:.4g} s per iteration; searching a better one")
    result = _searched(
        request,
        machine,
        workload,
        seed=request.seed,
        robust=request.robust,
        restart_s=request.restart_s,
        memory_margin=request.memory_margin,
        progress=lambda share, what: progress(0.2 + 0.8 * share, what),
    )
    return {
        "plan": result.model_dump(mode="json"),
        "quick_iteration_s": quick_s,
        "quick_high_s": quick.prediction.iteration_high_s,
        "robust": request.robust,
    }


def search_job(request: SearchJob, progress: ShowProgress) -> dict[str, Any]:
    """Search for the fastest training configuration. Return every simulated configuration as JSON data, in the form of
    ``tune search -o``.

    Raises:
        ValueError: A machine or model is unknown, no configuration fits into memory, or no possible configuration has
            the requested number of samples per optimizer step.
    """
    from ebbtide.simulator.estimates.deepspeed_keys import loaded
    from ebbtide.tuner.configurations.deciding import explore
    from ebbtide.tuner.configurations.evaluation import SearchQuestion
    from ebbtide.tuner.configurations.report import as_json

    machine = machine_of(request)
    question = SearchQuestion(
        model_of(request),
        machine,
        dict(loaded(request.ds_config)),
        request.sequence,
        margin=request.memory_margin,
        shape={name: value for name, value in shape_of(request).items() if name not in SEARCHED},
        storage=storage_of(request),
    )
    answer = explore(
        question,
        space_of(request, machine),
        trials=request.trials,
        progress=lambda done, all_: progress(done / all_, f"{done} of {all_} configurations"),
    )
    if not answer.fitting:
        raise RuleError(answer.remarks()[0], "device_memory_bytes")
    return as_json(answer)


def goodput(request: Goodput, progress: ShowProgress) -> dict[str, Any]:
    """Return, as JSON data, the expected goodput with the checkpoint interval of a request, and the best interval
    with its goodput.

    The result also has the intervals by the rules of thumb of Young and Daly. If the request has no
    interval, the best one is used.
    """
    cost = CheckpointCost(request.stall_s, request.interference_s, request.persist_s)
    failures = Failures(request.mtbf_s, request.restart_s)
    asked = (request.iteration_s, cost, failures)
    best = best_interval_steps(*asked)
    steps = request.interval_steps or best
    return {
        "interval_steps": steps,
        "goodput": expected_goodput(*asked, steps),
        "best_interval_steps": best,
        "best_goodput": expected_goodput(*asked, best),
        "young_interval_s": young_interval(cost.cost_s, request.mtbf_s),
        "daly_interval_s": daly_interval(cost.cost_s, request.mtbf_s),
    }
