"""A test that the simulator explains the iterations that were measured on a GPU (docs/gpu.md), from the times of their
own parts: those of them in which PyTorch's backward thread was not slow.
"""

import json
from dataclasses import dataclass
from statistics import median

import pytest
from ebbtide.simulator import Machine, Plan, Workload, build_schedule, simulate
from ebbtide.tuner.placements.decision import QUICK, PlanQuestion, decide

from tests.machines import GIB
from tests.test_pages import ROOT

RECORD = ROOT / "studies/results/h200"
SLOW_S = 0.25  # of a backward: fast ones took 0.18 to 0.19 s, slow ones 0.31 to 0.33 s


@dataclass(frozen=True)
class Run:
    """The measured run, with the times of its own parts in place of those that the plan was made from."""

    plan: Plan
    work: Workload
    machine: Machine
    fast_s: tuple[float, ...]


@pytest.fixture(scope="module")
def run():
    spans = [e for e in json.loads((RECORD / "measured_trace.json").read_text())["traceEvents"] if e["ph"] == "X"]
    passes = {name: [e for e in spans if e["name"].startswith(name)] for name in ("forward", "backward", "step")}
    seconds = {name: [e["dur"] / 1e6 for e in found] for name, found in passes.items()}
    fast = [n for n, backward_s in enumerate(seconds["backward"]) if backward_s < SLOW_S]
    iterations = [
        (step["ts"] + step["dur"] - forward["ts"]) / 1e6
        for forward, step in zip(passes["forward"], passes["step"], strict=True)
    ]
    update_s = median(e["dur"] / 1e6 for e in spans if e["name"].startswith("update host"))
    rows = {row["name"]: row for row in json.loads((RECORD / "baseline.json").read_text())["rows"]}

    plan, work = Plan.load(RECORD / "plan.json"), Workload.load(RECORD / "workload.json")
    machine = Machine.load(RECORD / "machine_profile.json")
    forward_s, backward_s = rows["stock"]["forward_s"], median(seconds["backward"][n] for n in fast)
    layers = tuple(
        layer.model_copy(
            update={
                "forward_s": layer.forward_s * forward_s / work.forward_s,
                "backward_s": layer.backward_s * backward_s / work.backward_s,
            }
        )
        for layer in work.layers
    )
    issue = {"step_issue_s": median(seconds["step"]), "module_issue_s": 0.0}
    work = work.model_copy(update={"layers": layers, **issue})
    rate = machine.host_adam_params_per_s
    ran = rate.scaled(sorted(work.subgroups)[1] / update_s / rate.median, "measured in the run")
    machine = machine.model_copy(update={"host_adam_params_per_s": ran, "host_adam_by_threads": {}})
    return Run(plan, work, machine, tuple(iterations[n] for n in fast))


def test_iterations_on_the_h200_follow_from_their_parts(run):
    # No early update ran: the first steps of the new model clipped.
    plan = run.plan.model_copy(update={"ways": tuple(way._replace(early=False) for way in run.plan.ways)})
    predicted_s = simulate(build_schedule(run.work, plan), run.machine).iteration_s
    assert predicted_s == pytest.approx(median(run.fast_s), rel=0.05)


def test_a_plan_from_the_times_of_the_run_would_be_faster(run):
    memory = {"device_memory_bytes": 12 * GIB, "host_memory_bytes": 110 * GIB}
    made = decide(PlanQuestion.of(run.work, run.machine, **memory, subgroup_sizes=(), effort=QUICK))
    assert made.iteration_s == pytest.approx(0.333, rel=0.02)  # docs/gpu.md
    assert any(made.chosen.plan(run.work).updated_early)
