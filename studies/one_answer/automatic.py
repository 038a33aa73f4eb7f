"""The prediction of ``"plan": "auto"``, compared with a simulation that knows the whole workload.

With ``auto``, ebbtide's runtime watches some steps of training and then makes a plan. Here the
watched steps are simulated, because there is no GPU. The runtime's own function makes the plan from
what it would have measured: the times of forward and backward, the free memory, and one layer per
subgroup. The time that it expects of this plan is compared with a simulation of the plan for the
whole workload.
"""

from ebbtide.runtime.replan.auto import better_plan, host_plan
from ebbtide.runtime.zero.attach import piece_elements
from ebbtide.simulator import Machine, OpKind, Plan, Schedule, Workload, build_schedule
from ebbtide.simulator.analysis.expected import expected
from ebbtide.simulator.engines.compiled import SimResult, simulate_fast
from ebbtide.simulator.limits import Limits
from ebbtide.simulator.workload import Layer


def automatic(job: Workload, machine: Machine) -> tuple[float, float]:
    """Predict the time of an iteration under the plan that ``"plan": "auto"`` makes for a job.

    Returns:
        The seconds that ebbtide's runtime expects from the steps that it watches, and the seconds that
        a simulation predicts for the whole workload.
    """
    work = job.in_pieces(piece_elements(job.params)) if job.zero_stage == 3 else job
    first = host_plan(work.subgroup_size or max(work.subgroups), len(work.subgroups))

    def run(plan: Plan) -> SimResult:
        return simulate_fast(build_schedule(work, plan), machine)

    schedule = build_schedule(work, first)
    watched = simulate_fast(schedule, machine)
    free = Limits.of(work, machine).device_bytes - watched.device_peak_bytes
    current = first.model_copy(update={"overlap_forward": work.zero_stage == 3})
    found = better_plan(_observed(work, schedule, watched), machine, current, max(0, free), 0)
    return found.iteration_s, expected(work, machine, found.plan, run).iteration_s


def _observed(work: Workload, schedule: Schedule, watched: SimResult) -> Workload:
    """Return the workload as ebbtide's runtime would see it in the steps that it watches."""
    total = work.params
    forward_s, backward_s = (_pass_s(work, schedule, watched, kind) for kind in (OpKind.FORWARD, OpKind.BACKWARD))
    layers = [
        Layer(params=n, forward_s=forward_s * n / total, backward_s=backward_s * n / total) for n in work.subgroups
    ]
    base = {"device_base_bytes": total * work.wire_bytes, "layers": tuple(layers), "parameters": (), "memory_curve": ()}
    return Workload.model_validate({**work.model_dump(), **base})


def _pass_s(work: Workload, schedule: Schedule, watched: SimResult, kind: OpKind) -> float:
    """Return the seconds of forward or backward of one micro-batch, as ebbtide's runtime measures them.

    They are those of the first micro-batch in the last simulated iteration. ``kind`` selects the pass.
    """
    last = max(op.iteration for op in schedule.ops if op.kind == kind)
    ops = [op.id for op in schedule.ops if op.kind == kind and op.iteration == last][: len(work.layers)]
    return float(watched.end_s[ops[-1]] - watched.start_s[ops[0]])
