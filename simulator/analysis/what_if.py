"""Simulations of every combination of given strategies, memory sizes and rates, to answer what-if questions."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ebbtide.simulator.analysis.best_setting import best_setting, fastest_plan, simulated
from ebbtide.simulator.analysis.bounds import lower_bound
from ebbtide.simulator.limits import Limits
from ebbtide.simulator.machine import CHANGEABLE, Machine
from ebbtide.simulator.plan import Plan
from ebbtide.simulator.rules import RuleError, suggestion
from ebbtide.simulator.schedules.strategies import STRATEGIES, stock_offload
from ebbtide.simulator.workload import Workload

if TYPE_CHECKING:
    import pandas as pd

POINTS_PER_TASK = 16

Strategy = str | tuple[str, Mapping[str, Any]]
Planner = Callable[[Workload, Machine, Limits], Plan]
WORKLOAD_FIELDS = ("ranks_per_node", "gradient_accumulation_steps", "clip", "clip_rate")
_LAID_OUT = (
    "the work of each rank in a workload depends on the number of ranks",
    "make a workload for each value with workload_from_model(data_parallel=...), or profile training on that many GPUs",
)
# Fields of the machine that a workload depends on, so that they cannot be varied: the reason, and what to do instead.
_IN_WORKLOAD = {
    "nodes": _LAID_OUT,
    "gpus_per_node": _LAID_OUT,
    "device_flops_per_s": (
        "the workload has fixed times for forward and backward",
        "make a workload for each value with workload_from_model(model, machine.with_rates(device_flops_per_s=...))",
    ),
    "device_memory_bytes": ("GPU memory has an argument of its own", "give gpu_memory_bytes=[...]"),
}


@dataclass(frozen=True)
class Point:
    """A case that `what_if` simulates.

    Attributes:
        changes: New values for fields of the machine or of the workload, by field name.
    """

    strategy: str
    options: Mapping[str, Any]
    gpu_memory_bytes: int
    changes: Mapping[str, float]


def what_if(
    workload: Workload,
    machine: Machine,
    strategies: Sequence[Strategy] | None = None,
    gpu_memory_bytes: Sequence[float] | None = None,
    *,
    planner: Planner,
    n_jobs: int | None = None,
    progress: bool | None = None,
    **changes: Sequence[float],
) -> pd.DataFrame:
    """Simulate training for every combination of given strategies, GPU memory sizes and values of other fields. Return
    a table of results.

    >>> table = ebbtide.what_if(workload, machine, ["zero3_offload", ("twin_flow", {"ratio": 0.5})],
    ...                         gpu_memory_bytes=[24e9, 80e9], h2d_bytes_per_s=[25e9, 50e9])
    >>> len(table)
    8

    The table has one row for each combination. A strategy with a setting, such as Twin-Flow's ratio, is simulated at
    its fastest setting that fits into memory, unless options are given. For the strategy "ebbtide" that is the plan
    which ``planner`` returns.

    Args:
        strategies: Names of strategies (`STRATEGIES`), or pairs of a name and options of `build_strategy`. "stock" is
            DeepSpeed's optimizer offload at the workload's ZeRO stage (`stock_offload`). None: "stock" and "ebbtide".
        gpu_memory_bytes: Sizes of GPU memory per rank to simulate. None: the machine's size. A margin of GPU and host
            memory stays free, as in a plan (`ebbtide.simulator.limits.Limits`).
        planner: Function that returns ebbtide's plan for a workload on a machine. `ebbtide.what_if` passes the short
            search of `ebbtide.tuner`.
        n_jobs: Number of worker processes, as in joblib. Within ``joblib.parallel_config("dask")`` (or ray) the
            simulations run on that cluster.
        progress: True to show a progress bar. None: only if there are 50 simulations or more.
        **changes: Values to try for a field of the machine (``h2d_bytes_per_s=[...]``) or of the workload:
            ``ranks_per_node``, ``clip``, ``clip_rate`` (fraction of steps that clip; plans may then update before the
            gradient norm is known) and ``gradient_accumulation_steps`` (number of micro-batches of the same size per
            step).

    Returns:
        A table with the columns ``strategy``, ``setting``, ``gpu_memory_bytes``, one column per change, ``fits``,
        ``reason`` (the memory that is missing, if it does not fit), ``iteration_s``, ``forward_s``, ``backward_s``,
        ``step_s``, ``update_s``, ``loop_s`` (time outside forward, backward and step), ``device_peak_bytes``,
        ``host_peak_bytes``, ``lower_bound_s`` (no plan that keeps all optimizer state in host and GPU memory can be
        faster within the memory limits) and ``tokens_per_s``. After Ctrl-C it has the rows that were finished, and
        ``.attrs["interrupted"]`` is True.

    A warning names each field in ``changes`` that made no difference to any simulated time or memory peak.

    Raises:
        ValueError: A strategy, an option or a field is unknown, a value is out of its range, or there is nothing to
            simulate. Or ``changes`` has a field that a what-if cannot change, such as ``device_flops_per_s``. The
            message then says what to do instead.
    """
    _check_kinds(workload, machine, gpu_memory_bytes)
    changes = {name: _listed(given) for name, given in changes.items()}
    _check_changes(changes, machine)
    strategies = usual_strategies(workload) if strategies is None else named(strategies, workload)
    points = list(grid(machine, strategies, gpu_memory_bytes, changes))
    for point in points:  # refuse bad input before a long sweep begins
        _changed(workload, machine, point)
    shown = len(points) >= 50 if progress is None else progress
    rows, interrupted = _run(workload, machine, points, n_jobs, shown, planner)
    return _table(rows, len(points), changes, interrupted)


def usual_strategies(workload: Workload) -> tuple[str, ...]:
    """Return the strategies that a what-if compares by default."""
    return stock_offload(workload.zero_stage), "ebbtide"


def named(strategies: Sequence[Strategy], workload: Workload) -> list[Strategy]:
    """Return strategies with "stock", as all tables call it, replaced by DeepSpeed's own optimizer offload."""
    given = [strategies] if isinstance(strategies, str) else strategies
    return [stock_offload(workload.zero_stage) if one == "stock" else one for one in given]


def _table(
    rows: list[dict[str, Any]], points: int, changes: Mapping[str, Sequence[float]], interrupted: bool
) -> pd.DataFrame:
    import pandas as pd

    table = pd.DataFrame(rows)
    table.attrs["interrupted"] = interrupted
    if interrupted:
        warnings.warn(
            f"the what-if was interrupted: {len(rows)} of {points} simulations are finished and in the table",
            stacklevel=3,
        )
    else:
        _tell_without_effect(table, changes)
    return table


def _check_kinds(workload: Workload, machine: Machine, gpu_memory_bytes: object) -> None:
    for argument, value, kind in (("workload", workload, Workload), ("machine", machine, Machine)):
        if not isinstance(value, kind):
            raise ValueError(  # noqa: TRY004 - like all bad input here
                f"{argument} must be a {kind.__name__}, but got {type(value).__name__}"
            )
    if gpu_memory_bytes is not None and machine.unified_memory:
        warnings.warn(
            "gpu_memory_bytes has no effect if GPU and host share one memory "
            "(machine.unified_memory): give host_memory_bytes",
            stacklevel=3,
        )


def _check_changes(changes: Mapping[str, Sequence[float]], machine: Machine) -> None:
    for name, values in changes.items():
        if name in _IN_WORKLOAD:
            why, instead = _IN_WORKLOAD[name]
            raise RuleError(
                f"{name} must not be among the fields that a what-if changes, because {why}, but got "
                f"{name}={values!r}. Instead, {instead}",
                key=f"changes.{name}",
            )
        if name not in (*CHANGEABLE, *WORKLOAD_FIELDS):
            known = [field for field in (*CHANGEABLE, *WORKLOAD_FIELDS) if field not in _IN_WORKLOAD]
            raise RuleError(
                f"a what-if can change {', '.join(known)}, but got {name!r}{suggestion(name, known)}. To change the "
                "model, its sequence length or micro-batch size, make a workload for each value with "
                "workload_from_model, and run the what-if for each workload",
                key=f"changes.{name}",
            )
        if not values:
            raise RuleError(f"{name} must have at least one value, but got {values!r}", key=f"changes.{name}")
    if "cpu_cores" in changes and not machine.device_shares_host_cores:
        raise RuleError(
            "if forward and backward run on a GPU, cpu_cores must not be among the fields that a what-if changes, "
            "because the machine's CPU rates were measured with all cores and would not change with cpu_cores, but got "
            f"{changes['cpu_cores']!r}. Change the rates instead (host_adam_params_per_s, "
            "stock_host_adam_params_per_s, dram_bytes_per_s)",
            key="changes.cpu_cores",
        )


def _tell_without_effect(table: pd.DataFrame, changes: Mapping[str, Sequence[float]]) -> None:
    results = ["fits", "iteration_s", "device_peak_bytes", "host_peak_bytes"]
    for name, values in changes.items():
        if len(set(values)) < 2:
            continue
        others = [other for other in changes if other != name]
        same = table.groupby(["strategy", "gpu_memory_bytes", *others])[results].nunique()
        if (same <= 1).to_numpy().all():
            named = ", ".join(table.strategy.unique())
            warnings.warn(
                f"changing {name} has no effect on {named} for this workload: step time and memory stay the same. "
                f"Leave {name} out of the what-if",
                stacklevel=4,
            )


def grid(
    machine: Machine,
    strategies: Sequence[Strategy],
    memories: Sequence[float] | None,
    changes: Mapping[str, Sequence[float]],
) -> Iterator[Point]:
    """Yield every combination of the given strategies, GPU memory sizes and other values, as a `Point`.

    Args:
        memories: Sizes of GPU memory in bytes. None: the machine's size.
        changes: Values to try for fields of the machine or of the workload, by field name.

    Raises:
        ValueError: No strategy or no memory size is given, or one of them is impossible.
    """
    if isinstance(strategies, str):
        strategies = [strategies]
    named = [s if isinstance(s, tuple) else (s, {}) for s in strategies]
    if not named:
        raise RuleError(f"strategies must name at least one strategy, but got {strategies!r}", key="strategies")
    for name, _ in named:
        if name not in STRATEGIES:
            raise RuleError(
                f"strategies must be among {', '.join(STRATEGIES)}, but got {name!r}{suggestion(name, STRATEGIES)}",
                key="strategies",
            )
    sizes = [machine.device_memory_bytes] if memories is None else _listed(memories)
    if not sizes:
        raise RuleError(f"gpu_memory_bytes must have at least one value, but got {memories!r}", key="gpu_memory_bytes")
    for size in sizes:
        if not (isinstance(size, int | float) and 0 < size < float("inf")):
            raise RuleError(f"gpu_memory_bytes must be finite and > 0, but got {size!r}", key="gpu_memory_bytes")
    values = [[(name, v) for v in given] for name, given in changes.items()]
    for combination in itertools.product(*values):
        for size in sizes:
            for name, options in named:
                yield Point(name, options, int(size), dict(combination))


def _listed(given: Any) -> list[Any]:
    return list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [given]


def _run(
    workload: Workload, machine: Machine, points: Sequence[Point], n_jobs: int | None, shown: bool, planner: Planner
) -> tuple[list[dict[str, Any]], bool]:
    # The points are simulated in several groups, so that finished rows remain if the user interrupts the simulations.
    from joblib import Parallel, delayed
    from rich.progress import Progress

    found: list[tuple[dict[str, Any], Plan | None]] = []
    with Parallel(n_jobs=n_jobs) as pool, Progress(disable=not shown) as bar:
        task = bar.add_task("simulating", total=len(points))
        size = POINTS_PER_TASK * max(1, int(pool._effective_n_jobs()))
        try:
            for first in range(0, len(points), size):
                part = points[first : first + size]
                found += pool(delayed(evaluate)(workload, machine, point, planner) for point in part)
                bar.advance(task, len(part))
            return with_shared_plans(workload, machine, points, found), False
        except KeyboardInterrupt:
            return [row for row, _ in found], True


def with_shared_plans(
    workload: Workload, machine: Machine, points: Sequence[Point], found: Sequence[tuple[dict[str, Any], Plan | None]]
) -> list[dict[str, Any]]:
    """Return the rows of several points, each with the fastest of the plans that a search has found at any point.

    A plan for a slower link or a smaller memory may be better than the plan of a short search for a faster or larger
    one. So with more of a resource, the table never shows a slower plan.
    """
    plans = list({(p.ways, p.order, p.staging_slots, p.prefetch, p.threads): p for _, p in found if p}.values())
    return [
        row if plan is None or len(plans) == 1 else _fastest(workload, machine, point, row, plans)
        for point, (row, plan) in zip(points, found, strict=False)
    ]


def _fastest(
    workload: Workload, machine: Machine, point: Point, own: dict[str, Any], plans: Sequence[Plan]
) -> dict[str, Any]:
    work, changed = _changed(workload, machine, point)
    limits = _limits(work, changed, point)
    found = fastest_plan(plans, work, changed, limits)
    if found is None or (own["fits"] and found[0] >= own["iteration_s"]):
        return own
    row = _row(work, changed, limits, point, found[1])
    return {**row, "lower_bound_s": min(own["lower_bound_s"], row["lower_bound_s"])}


def evaluate(
    workload: Workload, machine: Machine, point: Point, planner: Planner
) -> tuple[dict[str, Any], Plan | None]:
    """Return the row of a point in the table of `what_if`, and the plan that ``planner`` found, if it was asked."""
    work, changed = _changed(workload, machine, point)
    limits = _limits(work, changed, point)
    plan = planner(work, changed, limits) if point.strategy == "ebbtide" and not point.options else None
    return _row(work, changed, limits, point, plan), plan


def _row(work: Workload, changed: Machine, limits: Limits, point: Point, plan: Plan | None) -> dict[str, Any]:
    if plan is not None:
        best = simulated("ebbtide", work, changed, limits, {"plan": plan})
        best = replace(best, setting={"subgroups": plan.subgroup_count})
    else:
        best = best_setting(point.strategy, work, changed, limits, point.options)
    result = best.result
    tokens = work.tokens_per_iteration
    return {
        "strategy": point.strategy,
        "setting": best.setting_text("="),
        "gpu_memory_bytes": point.gpu_memory_bytes,
        **point.changes,
        "fits": best.fits,
        "reason": best.lacks,
        "iteration_s": result.iteration_s,
        **result.phases,
        "device_peak_bytes": result.device_peak_bytes,
        "host_peak_bytes": result.host_peak_bytes,
        "lower_bound_s": min(_bound_s(work, changed, limits), _predicted_bound_s(plan)),
        "tokens_per_s": tokens / result.iteration_s if tokens else float("nan"),
    }


def _changed(workload: Workload, machine: Machine, point: Point) -> tuple[Workload, Machine]:
    fields = {k: v for k, v in point.changes.items() if k in WORKLOAD_FIELDS}
    rates = {k: v for k, v in point.changes.items() if k not in WORKLOAD_FIELDS}
    work = _rebuilt(workload, fields) if fields else workload
    return work, machine.with_rates(**rates) if rates else machine


def _rebuilt(workload: Workload, fields: Mapping[str, Any]) -> Workload:
    changed = Workload.model_validate({**workload.model_dump(), **fields})
    more = changed.gradient_accumulation_steps / workload.gradient_accumulation_steps
    if more == 1:
        return changed
    amounts = {
        name: None if value is None else round(value * more)
        for name in ("tokens_per_iteration", "samples_per_iteration")
        for value in (getattr(workload, name),)
    }
    extra = workload.stock_backward_extra_s
    return changed.model_copy(update={**amounts, "stock_backward_extra_s": None if extra is None else extra * more})


def _limits(work: Workload, machine: Machine, point: Point) -> Limits:
    if point.gpu_memory_bytes != machine.device_memory_bytes:
        machine = machine.with_rates(device_memory_bytes=point.gpu_memory_bytes)
    return Limits.of(work, machine)


def _predicted_bound_s(plan: Plan | None) -> float:
    prediction = None if plan is None else plan.prediction
    return math.inf if prediction is None else prediction.lower_bound_s


def _bound_s(work: Workload, machine: Machine, limits: Limits) -> float:
    try:
        return lower_bound(work, machine, limits).iteration_s
    except ValueError:  # no plan fits
        return float("nan")
