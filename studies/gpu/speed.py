"""Measurements at the size of one GPU: the machine, stock DeepSpeed, a plan and the plan's features."""

import json
from typing import Any

from ebbtide.simulator import Plan, Way, Workload, build_schedule, simulate
from ebbtide.simulator.analysis.bound import bound

from studies.gpu.suite import Figures, Suite


def machine_profile(suite: Suite) -> Figures:
    """Measure the machine's rates, and save its profile."""
    machine = suite.measure_machine()
    machine.save(suite.out / "machine_profile.json")
    return {"measured": machine.model_dump(mode="json")}


def baseline(suite: Suite) -> Figures:
    """Time stock DeepSpeed twice, and ebbtide once under the tuner's plan.

    Stock DeepSpeed uses pinned memory and cores near the GPU. Its second run is the control: if the
    two stock runs differ in a bit, nothing can be said about ebbtide's bits. A difference of their
    times is noise.
    """
    suite.plan()
    stocks = {name: ["--variant", "stock"] for name in ("stock", "stock_again")}
    rows = suite.trials({**stocks, "ebbtide": _ebbtide(suite)})
    stock, control, ours = rows.values()
    figures: Figures = {"rows": [stock, control, ours]}
    figures |= against_control(stock, control, ours)
    return figures


def parameter_offload(suite: Suite) -> Figures:
    """Time training with parameters in host memory: stock DeepSpeed twice and ebbtide twice.

    ebbtide trains once with all state and parameters in host memory, and once with half of the
    parameters on the GPU.
    """
    away = ["--offload-param"]
    rows = suite.trials(
        {
            "stock_offload_param": ["--variant", "stock", *away],
            "stock_offload_param_again": ["--variant", "stock", *away],
            "ebbtide_offload_param": ["--variant", "ebbtide", *away],
            "ebbtide_offload_param_half": ["--variant", "ebbtide", *away, "--keep", "0.5"],
        }
    )
    stock, control, ours, half = rows.values()
    figures: Figures = {"rows": list(rows.values()), **against_control(stock, control, ours)}
    if "failed" not in ours and "failed" not in half:
        figures["speedup_of_share"] = ours["iteration_s"] / half["iteration_s"]
        if half["hash"] != ours["hash"]:
            figures["correct"] = False
    return figures


def _ebbtide(suite: Suite) -> list[str]:
    return [
        "--variant",
        "ebbtide",
        "--plan",
        str(suite.plan_path),
        "--timeline",
        str(suite.out / "measured_trace.json"),
    ]


def against_control(stock: Figures, control: Figures, ours: Figures) -> Figures:
    """Compare ebbtide's run with two runs of stock DeepSpeed.

    Returns:
        ``correct``, ``control_identical``, ``noise`` (time of the second stock run over the first)
        and ``speedup``.
    """
    figures: Figures = {"correct": None, "control_identical": None, "speedup": None}
    if "failed" in stock:
        return figures
    if "failed" not in control:
        figures["control_identical"] = stock["hash"] == control["hash"]
        figures["noise"] = control["iteration_s"] / stock["iteration_s"]
    if "failed" not in ours:
        figures["speedup"] = stock["iteration_s"] / ours["iteration_s"]
        same = ours["hash"] == stock["hash"]
        figures["correct"] = same if figures["control_identical"] or same else None
    return figures


def efficiency(suite: Suite) -> Figures:
    """Measure the chosen plan and compare its time with the lower bound."""
    plan, workload, machine = suite.plan(), suite.workload(), suite.machine()
    row = suite.trial("ebbtide", *_ebbtide(suite))  # the baseline's, if that has been run
    limit = machine.device_memory_bytes if suite.emulated else suite.cap_gib * 2**30
    floor_s = bound(workload, machine, limit).iteration_s
    assert plan.prediction is not None
    figures: Figures = {"floor_s": floor_s, "predicted_s": plan.prediction.iteration_s, "row": row}
    if "failed" not in row:
        figures["efficiency"] = floor_s / row["iteration_s"]
    return figures


def ablation(suite: Suite) -> Figures:
    """Measure the chosen plan without one feature at a time, all on one engine."""
    plan = suite.plan()
    changes: dict[str, dict[str, Any]] = {
        "whole": {},
        "no_overlap": {"overlap_forward": False},
        "no_prefetch": {"prefetch": 0},
        "all_host": {"ways": (Way("host"),) * plan.subgroup_count, "prefetch": 0, "staging_slots": 0},
    }
    plans = {name: plan.model_copy(update=change) for name, change in changes.items()}
    return {"rows": suite.plans("ablation", plans)}


def fidelity(suite: Suite) -> Figures:
    """Compare predicted and measured times of many kinds of plans, all on one engine."""
    workload, machine = suite.workload(), suite.machine()
    plans = _varied(suite, workload)
    rows = suite.plans("fidelity", plans)
    for row in rows:
        plan = plans[row["name"]]
        row["predicted_s"] = simulate(build_schedule(workload, plan), machine).iteration_s
        if "failed" not in row:
            row["error_pct"] = 100 * abs(row["predicted_s"] / row["iteration_s"] - 1)
    errors = sorted(row["error_pct"] for row in rows if "error_pct" in row)
    median = errors[len(errors) // 2] if errors else None
    return {"rows": rows, "median_abs_pct_error": median}


def _varied(suite: Suite, workload: Workload) -> dict[str, Plan]:
    from ebbtide.simulator.schedules.strategies import shared_plan

    base = suite.plan().model_copy(update={"staging_slots": 3, "prefetch": 0})
    plans = {}
    for share in (0.0, 0.5) if suite.emulated else (0.0, 0.2, 0.35, 0.5):
        for overlap in (True, False):
            start = base.model_copy(update={"overlap_forward": overlap})
            name = f"device{share:g}_{'overlap' if overlap else 'wait'}"
            plans[name] = shared_plan(workload, share, 0.0, start)
    return plans


def checkpoint_stall(suite: Suite) -> Figures:
    """Measure the cost of a checkpoint, with `studies.checkpoint_stall` in its own process."""
    path = suite.out / "checkpoint_stall_full.json"
    command = ["studies.checkpoint_stall", "--json", str(path)]
    if suite.emulated:
        command += ["--quick", "--writers", "none", "ebbtide"]
    failed = suite.run("checkpoint_stall_full", command, suite.left_s(600.0))
    return {"failed": failed} if failed else {"measured": json.loads(path.read_text())}
