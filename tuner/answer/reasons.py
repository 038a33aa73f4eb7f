"""The reasons for a training plan in sentences: what limits an iteration's time, how much time each technique of the
plan saves, and how much more memory or a faster link would save (shadow prices).
"""

import math
from dataclasses import replace

from ebbtide.simulator.analysis.best_setting import compiled
from ebbtide.simulator.analysis.bounds import Bound, lower_bound
from ebbtide.simulator.analysis.early_updates import expected
from ebbtide.simulator.analysis.many_plans import PlanSweep
from ebbtide.simulator.engines.compiled import simulate_fast
from ebbtide.simulator.limits import GIB
from ebbtide.simulator.machine import Machine
from ebbtide.simulator.plan import Plan
from ebbtide.simulator.workload import Workload
from ebbtide.tuner.answer.rows import stock_beside
from ebbtide.tuner.quantities import least_text, seconds_text

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
