"""The shadow prices of a training job: estimates of the time that training would save with a little more GPU memory, or
with a faster link to the GPU.
"""

from dataclasses import replace

from ebbtide.simulator.analysis.bounds import lower_bound
from ebbtide.simulator.analysis.expected import expected
from ebbtide.simulator.analysis.many_plans import PlanSweep
from ebbtide.simulator.limits import GIB
from ebbtide.simulator.machine import Machine
from ebbtide.simulator.plan import Plan
from ebbtide.simulator.workload import Workload
from ebbtide.tuner.quantities import told_seconds

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
    return f"{what} would save about {told_seconds(saved_s)} ({saved_s / base_s:.1%})"
