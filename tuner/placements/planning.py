"""The search for the plan with the shortest predicted iteration, or with the best goodput under failures.

Only plans that fit into memory are considered.
Short searches make a small fraction of the simulations: for interactive use, and for use while training runs
(``plan="auto"`` and later changes of its plan). They need neither pandas nor matplotlib.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np
from ebbtide.simulator.analysis.best_setting import compiled
from ebbtide.simulator.analysis.bounds import Bound, lower_bound
from ebbtide.simulator.analysis.goodput import CheckpointPrice
from ebbtide.simulator.analysis.many_plans import PlanSweep, expected, step_times
from ebbtide.simulator.engines.compiled import simulate_fast
from ebbtide.simulator.limits import GIB, Limits
from ebbtide.simulator.machine import Machine
from ebbtide.simulator.page import versions
from ebbtide.simulator.plan import Plan, Prediction
from ebbtide.simulator.rules import checked, worded
from ebbtide.simulator.schedules.ebbtide import check_plan
from ebbtide.simulator.schedules.footprint import footprint
from ebbtide.simulator.update.way import SUMMED
from ebbtide.simulator.workload import Workload
from ebbtide.tuner.answer.rows import alternatives, compare, stock_beside
from ebbtide.tuner.answer.verdict import LITTLE, about, above_bound
from ebbtide.tuner.calibrate.interval import plan_interval_s
from ebbtide.tuner.garbage import without_garbage_collection
from ebbtide.tuner.placements.candidate import Candidate, turned
from ebbtide.tuner.placements.checkpointing import check_failures, with_checkpoints, without_writers
from ebbtide.tuner.placements.decision import (
    FULL,
    LARGE,
    QUICK,
    SIZES,
    TOLD,
    Decision,
    PlanQuestion,
    decide,
    most_micro_batches,
)
from ebbtide.tuner.placements.division import ImpossibleError
from ebbtide.tuner.placements.parameters_and_early import about_early_updates, about_pinned, begun, brought
from ebbtide.tuner.placements.search import Search
from ebbtide.tuner.placements.storage import about_storage
from ebbtide.tuner.progress import ShowProgress, silently
from ebbtide.tuner.quantities import least_text, seconds_text
from pydantic import BeforeValidator


def about_subgroups(search: Search, question: PlanQuestion) -> list[str]:
    """Return advice to use a smaller subgroup size, if the plan's subgroups are large.

    A quick plan search finds the smaller size.

    Args:
        question: Input of the search that found the plan.

    Returns:
        A list with one sentence, or an empty list if a smaller size would gain little, or if the search tried several
        sizes itself.
    """
    work, machine = search.workload, search.machine
    if question.subgroup_sizes or not work.parameters or work.subgroup_size <= LARGE or machine.unified_memory:
        return []
    found = decide(replace(question, workload=work, subgroup_sizes=SIZES, effort=QUICK))
    other, seconds = found.search.workload, found.iteration_s
    if other is work or seconds > TOLD * search.best_s:
        return []
    return [
        f"smaller subgroups than {work.subgroup_size:.0e} elements are faster: with "
        f"{other.subgroup_size:.0e} elements an iteration takes {seconds * 1e3:.0f} ms"
    ]


def about_pieces(work: Workload) -> list[str]:
    """Return a list with one sentence on how a plan divides DeepSpeed's subgroups. The list is empty if the plan does
    not divide them.
    """
    if not work.deepspeed_subgroup_size:
        return []
    return [
        f"DeepSpeed keeps sub_group_size {work.deepspeed_subgroup_size} and therefore its exact results. The "
        f"plan's {len(work.subgroups)} subgroups are parts of DeepSpeed's own"
    ]


FINALISTS = 8
# Numbers of elements, such as a list or a numpy array.
Sizes = Annotated[
    Sequence[int], BeforeValidator(lambda given: given.tolist() if isinstance(given, np.ndarray) else given)
]
# A number of bytes, which may have a fraction, such as 23.6 * 2**30.
Bytes = Annotated[
    int, BeforeValidator(lambda given: int(given) if isinstance(given, float) and math.isfinite(given) else given)
]


@checked
@without_garbage_collection()
def plan(
    workload: Workload,
    machine: Machine,
    *,
    device_memory_bytes: Bytes | None = None,
    host_memory_bytes: Bytes | None = None,
    seed: int = 0,
    robust: bool = False,
    mtbf_s: float | None = None,
    restart_s: float = 60.0,
    checkpoint_dir: str | None = None,
    subgroup_sizes: Sizes | None = None,
    pieces: bool = False,
    memory_margin: float | None = None,
    offload_parameters: bool = True,
    storage: Mapping[str, Bytes] | None = None,
    endurance_bytes: float | None = None,
    effort: float | None = None,
    progress: ShowProgress = silently,
) -> Plan:
    """Return the best plan for a training workload on a machine. The result is deterministic for a given seed.

    The decision is made by `ebbtide.tuner.placements.decision`, as for all planning commands.

    Args:
        device_memory_bytes: GPU memory of one rank in bytes. If None, the machine's.
        host_memory_bytes: Host memory of a node in bytes, which its ranks share. If None, the machine's.
        robust: True to minimize the upper end of the interval around the predicted iteration time, instead of the
            predicted time. The interval follows from the spread of the machine's speeds, such as those of copies.
        mtbf_s: Mean time between failures of the whole job, in seconds. Three checkpoint settings are then chosen for
            the best expected goodput (useful training per time): the interval, the limit for the bytes written per
            second, and the host memory for copies of state. If None, the plan has no checkpoint interval.
        restart_s: Seconds from a failure until training runs again.
        subgroup_sizes: Subgroup sizes to try, in elements, in addition to the workload's own. If None, the sizes in
            `ebbtide.tuner.placements.decision`. If empty, only the workload's own size is used.
        pieces: True if the plan may divide DeepSpeed's subgroups into smaller ones (`Workload.in_pieces`). DeepSpeed
            itself keeps the subgroup size that the workload names. This has an effect only under ZeRO-3, and cannot be
            combined with ``storage``.
        offload_parameters: True to let 16-bit parameters live in host memory between their uses if that is faster. If
            no plan fits otherwise, they live there in any case. Training results stay bit-identical to DeepSpeed's.
        storage: Directories for state that memory cannot hold, with the bytes that all ranks of a node together may use
            in each.
        endurance_bytes: Bytes that may be written to all these drives together during their life.
        memory_margin: Fraction of GPU and host memory to leave free. If None, the fraction follows from the spread of
            the memory peaks in the workload's profile.
        effort: Fraction of a full search's evaluations, above 0 and at most 1. None means 1. With `QUICK` the plan is
            found sooner and may be a few percent slower.
        progress: Called with the finished fraction and the name of the current phase.

    Raises:
        ImpossibleError: No plan fits into memory. The message says how much is missing, and which change helps most.
    """
    if mtbf_s is not None:
        check_failures(workload, machine, mtbf_s, restart_s)
    question = PlanQuestion.of(
        workload,
        machine,
        device_memory_bytes=device_memory_bytes,
        host_memory_bytes=host_memory_bytes,
        memory_margin=memory_margin,
        storage=storage,
        subgroup_sizes=SIZES if subgroup_sizes is None else subgroup_sizes,
        offload_parameters=offload_parameters,
        seed=seed,
        effort=FULL if effort is None else effort,
        pieces=pieces,
    )
    whole = question.limits
    if mtbf_s is not None:
        question = replace(question, limits=without_writers(whole))
    found = decide(question, lambda share, what: progress(0.9 * share, what))
    if robust:
        found = replace(found, chosen=_robust_choice(found.search, found.chosen))
    progress(0.9, "comparing with other strategies")
    search, chosen = found.search, found.chosen
    made = plan_of(
        found,
        machine_fingerprint=search.machine.fingerprint,
        versions=versions("ebbtide", "torch", "deepspeed"),
        about=about(search.workload, search.machine),
    )
    why = about_early_updates(search, made) + about_sums(search, chosen)
    why += (
        about_storage(search, chosen, endurance_bytes)
        + about_subgroups(search, question)
        + about_pieces(search.workload)
    )
    result = _explained(made, search, why, workload)
    limits = replace(search.limits, host_bytes=whole.host_bytes)
    return with_checkpoints(result, search.workload, search.machine, limits, mtbf_s, restart_s, checkpoint_dir)


def _robust_choice(search: Search, fastest: Candidate) -> Candidate:
    fitting = [c for c, score in search.scores.items() if math.isfinite(score.iteration_s)]
    finalists = sorted(fitting, key=lambda c: search.scores[c].iteration_s)[:FINALISTS]

    def high_s(c: Candidate) -> float:
        made = c.plan(search.workload)
        return predict(search.workload, search.machine, made, search.limits, sweep=search.sweep).iteration_high_s

    return min([fastest, *finalists], key=high_s)


def plan_of(found: Decision, **fields: Any) -> Plan:
    """Convert the decision for a training job into a plan, with its predicted iteration."""
    search = found.search
    made = found.chosen.plan(search.workload, **found.folders, **fields)
    prediction = predict(
        search.workload, search.machine, made, search.limits, search.bound.iteration_s, sweep=search.sweep
    )
    return made.model_copy(update={"prediction": prediction})


def predict(
    workload: Workload,
    machine: Machine,
    made: Plan,
    limits: Limits,
    lower_bound_s: float = 0.0,
    *,
    sweep: PlanSweep | None = None,
) -> Prediction:
    """Return the simulated iteration under a plan as a prediction, with an interval that follows from the spread of the
    machine's rates. If the plan has a checkpoint interval, the prediction has the stall of training for a checkpoint.

    Args:
        lower_bound_s: Lower bound of the iteration time in seconds, or 0 if it is unknown.
        sweep: Predictor for the job with the plan's subgroups. If None, a new one is made.

    Raises:
        PlanError: The workload has another number of subgroups than the plan.
    """
    sweep = sweep or PlanSweep(workload.cut_as(made), machine)
    check_plan(made, sweep.workload)
    result = sweep.result(made)
    times = step_times(sweep.workload, machine, made, sweep.result, result)
    rate = workload.expected_clip_rate
    mean_s = times.mean_s(rate) if times else result.iteration_s
    low, high = plan_interval_s(sweep, made)
    saving, stall_s = made.checkpoint, 0.0
    if saving.interval_steps:
        stall_s = CheckpointPrice(sweep.workload, made, machine).cost(saving).stall_s
    early: dict[str, float] = {}
    if times:
        early = {
            "clip_rate": rate,
            "unclipped_s": times.right_s,
            "waiting_s": times.plain_s,
            "clipped_s": times.wrong_s,
        }
    return Prediction(
        iteration_s=mean_s,
        iteration_low_s=low * mean_s / result.iteration_s,
        iteration_high_s=high * mean_s / result.iteration_s,
        stall_s=stall_s,
        **early,
        tokens_per_s=(workload.tokens_per_iteration or 0) / mean_s,
        **result.phases,
        device_peak_bytes=result.device_peak_bytes,
        host_peak_bytes=result.host_peak_bytes,
        storage_bytes=result.storage_bytes,
        memory=sweep.memory(made),
        limits=limits.by_memory,
        lower_bound_s=min(lower_bound_s, mean_s),
    )


def predicted_anew(made: Plan, workload: Workload, machine: Machine) -> Plan:
    """Return a copy of a plan with a new prediction, made for another profile of the workload or of the machine."""
    search = Search(workload.cut_as(made), machine, Limits.of(workload, machine), seed=0)
    prediction = predict(workload, machine, made, search.limits, search.bound.iteration_s, sweep=search.sweep)
    return _explained(made.model_copy(update={"prediction": prediction}), search, stock=workload)


def _explained(made: Plan, search: Search, more: Sequence[str] = (), stock: Workload | None = None) -> Plan:
    stock = stock or search.workload
    rows = compare(stock, search.machine, search.limits, made, sweep=search.sweep)
    why = reasons(search.sweep, made, search.bound, stock)
    why += [*brought(search, made), *about_pinned(search, made), *search.limits.explained[:2], *more, *stock.notes]
    return made.model_copy(update={"alternatives": alternatives(rows), "reasons": tuple(map(worded, why))})


def about_sums(search: Search, chosen: Candidate) -> list[str]:
    """Return a list with one sentence about the seconds that a plan saves by on-device gradient accumulation.

    The list is empty if the plan does not use on-device gradient accumulation.
    """
    sums = [subgroup for subgroup, code in enumerate(chosen.ways) if code & SUMMED]
    if not sums:
        return []
    crossing_s = search.seconds_anyhow(turned(chosen, sums, SUMMED))
    saved_s = crossing_s - search.score(chosen).iteration_s
    return [
        f"{len(sums)} of {len(chosen.ways)} subgroups accumulate gradients "
        f"on the GPU until the last micro-batch, which saves {seconds_text(saved_s)}"
    ]


SHOWN_GAP = 5e-4  # relative difference that does not show in numbers with one decimal


def reasons(sweep: PlanSweep, plan: Plan, floor: Bound, stock: Workload) -> list[str]:
    """Return sentences, with figures, on why a training plan is fast: what limits the iteration time, and how many
    seconds each technique of the plan saves.

    Args:
        sweep: Predictor for the training job of one rank, with its optimizer state cut into the plan's subgroups.
        stock: Training job of one rank, with the subgroups that DeepSpeed makes without a plan.
    """
    assert plan.prediction is not None
    chosen_s, machine = plan.prediction.iteration_s, sweep.machine
    unfused = PlanSweep(sweep.workload, machine, fused=False)
    without = {
        "the fused host kernel": (unfused, plan),
        "overlapping the update with forward": (sweep, plan.model_copy(update={"overlap_forward": False})),
        "prefetching in backward": (sweep, plan.model_copy(update={"prefetch": 0})),
    }
    lines = [_limited_by(floor, chosen_s)]
    for name, (some, less) in without.items():
        fused = some is not unfused
        without_s = expected(sweep.workload, machine, less, some.result, fused=fused).iteration_s
        saved_s = without_s - chosen_s
        if saved_s > 1e-3 * chosen_s:
            lines.append(f"{name} saves {seconds_text(saved_s)} ({saved_s / without_s:.0%})")
    lines += _what_threads_cost(stock, machine, plan)
    if machine.unified_memory:
        lines.append("GPU and host share one memory, so moving state saves nothing")
    return lines


def _what_threads_cost(workload: Workload, machine: Machine, plan: Plan) -> list[str]:
    # The list is empty if DeepSpeed loses hardly any time.
    if workload.stock_threads is None:
        return []
    name, setting = stock_beside(workload, machine, plan.limits_on(workload, machine))

    def stock_s(threads: int) -> float:
        work = workload.model_copy(update={"stock_threads": threads})
        return simulate_fast(compiled(name, work, setting), machine).iteration_s

    count, share = workload.stock_threads, max(1, machine.cpu_cores // workload.ranks_per_node)
    few_s, all_s = stock_s(count), stock_s(share)
    if few_s <= (1 + SHOWN_GAP) * all_s:
        return []
    return [
        f"DeepSpeed alone updates with {count} thread{'s' * (count > 1)} per rank (OMP_NUM_THREADS, "
        f"which the launcher sets), which costs {seconds_text(few_s - all_s)} of its {seconds_text(few_s)}. With "
        f"OMP_NUM_THREADS={share} set before the launcher starts, it takes {seconds_text(all_s)}"
    ]


def _limited_by(floor: Bound, chosen_s: float) -> str:
    *some, last = dict.fromkeys(name.removesuffix(" (update)") for name in floor.binding or ("forward compute",))
    resources = " and ".join(filter(None, [", ".join(some), last]))
    gap = chosen_s / floor.iteration_s - 1
    least = least_text(floor.iteration_s)
    return (
        f"limited by {resources}: no plan within these memory limits can take less than {least}, "
        f"and this one is within {max(1, math.ceil(1000 * gap)) / 1000:.1%} of that"
    )


LINK_STEP = 10e9


def shadow_prices(workload: Workload, machine: Machine, plan: Plan) -> list[str]:
    """Return a list of sentences on the time that training would save with 1 GiB more GPU memory, or with a link
    between host and GPU that is faster by 10 GB/s in both directions.

    The estimate is how far the change lowers the lower bound of the iteration time, or how far it lowers the time under
    the same plan if that is more. A search for a new plan would not tell: searches make random changes, so their times
    differ by about a percent, and most effects are smaller.
    """
    assert plan.prediction is not None
    workload = workload.cut_as(plan)
    limits, base_s = plan.limits_on(workload, machine), plan.prediction.iteration_s
    bound_s = lower_bound(workload, machine, limits).iteration_s
    roomier = replace(limits, device_bytes=limits.device_bytes + GIB)
    faster = machine.with_rates(
        h2d_bytes_per_s=machine.h2d_bytes_per_s.median + LINK_STEP,
        d2h_bytes_per_s=machine.d2h_bytes_per_s.median + LINK_STEP,
    )
    by_memory_s = bound_s - lower_bound(workload, machine, roomier).iteration_s
    by_link_s = bound_s - lower_bound(workload, faster, limits).iteration_s
    same_plan_s = base_s - expected(workload, faster, plan, PlanSweep(workload, faster).result).iteration_s
    return [
        _line("one more GiB of GPU memory", by_memory_s, base_s),
        _line("10 GB/s more bandwidth between host and GPU in each direction", max(by_link_s, same_plan_s), base_s),
    ]


def _line(what: str, saved_s: float, base_s: float) -> str:
    saved_s = max(0.0, saved_s)
    return f"{what} would save about {seconds_text(saved_s)} ({saved_s / base_s:.1%})"


@dataclass(frozen=True)
class QuickPlan:
    """The result of a short plan search that runs during training.

    Attributes:
        plan: Best plan. It is the plan in force (``current``) if nothing is faster.
        iteration_s: Predicted mean iteration time under ``plan``, in seconds.
        current_s: Predicted mean iteration time under the plan in force, in seconds.
    """

    plan: Plan
    iteration_s: float
    current_s: float


def quicker_plan(
    workload: Workload,
    machine: Machine,
    current: Plan,
    *,
    device_bytes: int | None = None,
    host_bytes: int | None = None,
    effort: float = QUICK,
) -> QuickPlan:
    """Search for a better plan while training runs (`ebbtide.tuner.placements.decision`), and return the best plan
    found.

    The new plan keeps three settings of the plan in force: the subgroups, the number of CPU threads, and whether
    updates overlap with the next forward. `ebbtide.tuner.plan`, which plans before training, may choose these three
    settings. All other settings are chosen in the same way by both functions. The result is deterministic.

    Args:
        current: Plan in force. The new plan is no slower than ``current`` in simulation. The new plan keeps the state
            of a subgroup on drives only if ``current`` does so too, since the drives have no room for other subgroups.
        device_bytes: GPU memory in bytes that this rank's training may use. If None, the memory that ``current`` uses.
        host_bytes: Host memory of this rank in bytes. If None, its share of the machine's, or the memory that
            ``current`` uses if that is more.
        effort: Fraction of a full search's evaluations.
    """
    whole = _limits(workload, machine, current, device_bytes, host_bytes)
    # The new plan keeps the checkpoint settings, whose memory the search does not count.
    limits = replace(whole, host_bytes=max(0, whole.host_bytes - current.checkpoint.automatic_bytes))
    question = PlanQuestion(workload, machine, limits, effort=effort, running=current)
    try:
        # In a longer step, updates are too small a part to be worth a minute of search.
        found = decide(question) if workload.gradient_accumulation_steps <= most_micro_batches(workload) else None
    except ImpossibleError:  # the present plan takes more memory
        found = None
    search = Search(workload, machine, limits) if found is None else found.search
    current_s = search.seconds_anyhow(Candidate.of_plan(current))
    if found is None or not found.iteration_s < current_s:
        return QuickPlan(current, current_s, current_s)
    made = current.with_ways(**found.chosen.settings, prediction=None, alternatives=(), reasons=())
    # The runtime pauses early updates by the predicted times.
    prediction = predict(search.workload, machine, made, whole)
    return QuickPlan(made.model_copy(update={"prediction": prediction}), found.iteration_s, current_s)


def _limits(
    workload: Workload, machine: Machine, current: Plan, device_bytes: int | None, host_bytes: int | None
) -> Limits:
    held = footprint(workload, current)
    return Limits(
        held["device"] + workload.activation_bytes if device_bytes is None else device_bytes,
        max(machine.host_memory_bytes // workload.ranks_per_node, held["host"]) if host_bytes is None else host_bytes,
        storage_bytes=held["storage"] or None,
    )


def quick_plan(
    workload: Workload,
    machine: Machine,
    limits: Limits,
    *,
    subgroup_sizes: Sequence[int] = SIZES,
    offload_parameters: bool = True,
    folders: Mapping[str, Any] | None = None,
) -> Plan:
    """Return the plan of a short search. Its field ``reasons`` says if a full one may find a faster plan.

    Raises:
        ImpossibleError: No plan fits into memory.
    """
    question = PlanQuestion(
        workload, machine, limits, subgroup_sizes, offload_parameters, folders=folders or {}, effort=QUICK
    )
    return best_of(decide(question))


def quick_or_roomiest(workload: Workload, machine: Machine, limits: Limits, **freedom: Any) -> Plan:
    """Return the training plan that a short plan search finds. If no plan fits into memory, return a plan that lacks
    little memory.
    """
    try:
        return quick_plan(workload, machine, limits, **freedom)
    except ImpossibleError:
        search = begun(workload, machine, limits)
        return min(search.scores, key=lambda c: limits.missing_bytes(search.scores[c])).plan(workload)


def best_of(found: Decision) -> Plan:
    """Convert the decision of a short plan search into a plan, with its predicted iteration and the reasons for it."""
    made, search = plan_of(found), found.search
    assert made.prediction is not None
    near = above_bound(made.prediction) < LITTLE
    more = f"a full search can make it at most {LITTLE:.1%} faster" if near else "a full search may find a better one"
    facts = (*about_early_updates(search, made), *brought(search, made), *about_pinned(search, made))
    why = (f"a quick plan: {more}", *facts, *search.workload.notes)
    return made.model_copy(update={"reasons": tuple(map(worded, why))})
