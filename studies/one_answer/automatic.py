"""The prediction of ``"plan": "auto"`` for a job, compared with the simulation of its plan with full knowledge.

The watched steps are simulated, since no GPU is there: what training would measure is read off the simulated
iteration of the plan of the watched steps. The plan is then made by the runtime's own function, which knows one
layer per subgroup, two times and the free memory. What it expects is compared with the simulation of its plan for
the whole workload.
"""

from ebbtide.runtime.replan.auto import better_plan, host_plan
from ebbtide.runtime.zero.attach import LEAST_PIECE, PIECE, PIECES
from ebbtide.simulator import Machine, OpKind, Plan, Schedule, Workload, build_schedule
from ebbtide.simulator.analysis.expected import expected
from ebbtide.simulator.engines.compiled import SimResult, simulate_fast
from ebbtide.simulator.limits import Limits
from ebbtide.simulator.workload import Layer


def automatic(job: Workload, machine: Machine) -> tuple[float, float]:
    """Return the seconds of an iteration that ``"plan": "auto"`` expects, and those of its plan with full knowledge."""
    work = job.in_pieces(max(LEAST_PIECE, min(PIECE, job.params // PIECES))) if job.zero_stage == 3 else job
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
    """Return the workload that the runtime would see in the watched steps."""
    total = work.params
    forward_s, backward_s = (_pass_s(work, schedule, watched, kind) for kind in (OpKind.FORWARD, OpKind.BACKWARD))
    layers = [
        Layer(params=n, forward_s=forward_s * n / total, backward_s=backward_s * n / total) for n in work.subgroups
    ]
    base = {"device_base_bytes": total * work.wire_bytes, "layers": tuple(layers), "parameters": (), "memory_curve": ()}
    return Workload.model_validate({**work.model_dump(), **base})


def _pass_s(work: Workload, schedule: Schedule, watched: SimResult, kind: OpKind) -> float:
    """Return the seconds of the first micro-batch's pass in the last simulated iteration, as the runtime reads them."""
    last = max(op.iteration for op in schedule.ops if op.kind == kind)
    ops = [op.id for op in schedule.ops if op.kind == kind and op.iteration == last][: len(work.layers)]
    return float(watched.end_s[ops[-1]] - watched.start_s[ops[0]])
