"""The GPU suite's measurements: rates of the machine, stock DeepSpeed, a plan, and the gain of each feature."""

import json
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import Any

from ebbtide.simulator import Placement, Plan, Way, Workload, build_schedule, simulate
from ebbtide.simulator.analysis.bounds import lower_bound
from ebbtide.simulator.limits import Limits
from ebbtide.tuner.answer.verdict import SETTING, role_of

from studies.gpu.suite import Figures, OutOfTimeError, Suite


def machine_profile(suite: Suite) -> Figures:
    """Measure the rates of the machine that the GPU suite runs on, such as bandwidths, and save them as a machine
    profile.
    """
    machine = suite.measure_machine()
    machine.save(suite.out / "machine_profile.json")
    return {"measured": machine.model_dump(mode="json")}


def baseline(suite: Suite) -> Figures:
    """Time two training runs of stock DeepSpeed, and one of ebbtide under the tuner's plan.

    Stock DeepSpeed uses pinned memory and the cores near the GPU. Its second run is a control. If the optimizer state
    of the two stock runs differs, a difference between ebbtide and stock DeepSpeed proves nothing. The difference
    between the iteration times of the stock runs shows the noise of the measurement.

    If time is left, stock DeepSpeed is also timed with ``offload_param``, with which it is predicted to be faster.
    """
    plan = suite.plan()
    stocks = {name: ["--variant", "stock"] for name in ("stock", "stock_again")}
    rows = suite.trials({**stocks, "ebbtide": _ebbtide(suite)})
    stock, control, ours = rows.values()
    figures: Figures = {"rows": [stock, control, ours]}
    figures |= against_control(stock, control, ours)
    figures |= against_prediction(plan, stock, ours)
    with suppress(OutOfTimeError):
        away = suite.trial("stock_offload_param", "--variant", "stock", "--offload-param")
        figures["rows"].append(away)
        figures |= _against_offload_param(plan, away, ours)
    return figures


def _against_offload_param(plan: Plan, away: Figures, ours: Figures) -> Figures:
    predicted = [row.iteration_s for row in plan.alternatives if row.strategy == f"{SETTING}offload_param cpu"]
    figures: Figures = {"stock_offload_param_predicted_s": predicted[0] if predicted else None}
    if "failed" in away:
        return figures
    if predicted:
        figures["stock_offload_param_predicted_over_measured"] = predicted[0] / away["iteration_s"]
    if "failed" not in ours:
        figures["speedup_over_offload_param"] = away["iteration_s"] / ours["iteration_s"]
    return figures


def against_prediction(plan: Plan, stock: Figures, ours: Figures) -> Figures:
    """Compare the iteration times in a plan file with the measured ones.

    Returns:
        ``predicted_s`` and ``stock_predicted_s``: predicted iteration times under the plan and with stock DeepSpeed.
        ``predicted_over_measured`` and ``stock_predicted_over_measured``: these times divided by the measured ones.
    """
    predicted = [row.iteration_s for row in plan.alternatives if role_of(row.strategy) == "stock"]
    figures: Figures = {"stock_predicted_s": predicted[0] if predicted else None}
    figures["predicted_s"] = None if plan.prediction is None else plan.prediction.iteration_s
    for name, row in (("", ours), ("stock_", stock)):
        seconds = figures[f"{name}predicted_s"]
        if seconds is not None and "failed" not in row:
            figures[f"{name}predicted_over_measured"] = seconds / row["iteration_s"]
    return figures


def parameter_offload(suite: Suite) -> Figures:
    """Time training with 16-bit parameters in host memory: two runs of stock DeepSpeed, and two of ebbtide.

    ebbtide's first run keeps all optimizer state and parameters in host memory. Its second run keeps half
    of the parameters on the GPU.
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
    """Compare a run of ebbtide with two runs of stock DeepSpeed. The second stock run is a control.

    Returns:
        ``correct``: True if the optimizer state of ebbtide and stock DeepSpeed is bit-identical, None if that cannot
        be judged. ``control_identical``: True if the optimizer state of the two stock runs is bit-identical.
        ``noise``: iteration time of the second stock run divided by that of the first. ``speedup``: iteration time of
        stock DeepSpeed divided by that of ebbtide.
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
    """Measure an iteration under the tuner's plan on the GPU, and return the lower bound divided by this time.

    The lower bound is a time of an iteration that no plan can beat.
    """
    plan, workload, machine = suite.plan(), suite.workload(), suite.machine()
    row = suite.trial("ebbtide", *_ebbtide(suite))  # the baseline's run, if it exists
    limit = machine.device_memory_bytes if suite.emulated else suite.cap_gib * 2**30
    room = replace(Limits.of(workload, machine, margin=0.0), device_bytes=int(limit))
    floor_s = lower_bound(workload, machine, room).iteration_s
    assert plan.prediction is not None
    figures: Figures = {"floor_s": floor_s, "predicted_s": plan.prediction.iteration_s, "row": row}
    if "failed" not in row:
        figures["efficiency"] = floor_s / row["iteration_s"]
    return figures


def ablation(suite: Suite) -> Figures:
    """Measure the tuner's plan, and variants of it that each lack one feature, on the same engine.

    The variants have no overlap with forward, no prefetch, or all updates on the host.
    """
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
    """Compare predicted and measured iteration times of many different plans, all on one engine on the GPU."""
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
    base = suite.plan().model_copy(update={"staging_slots": 3, "prefetch": 0})
    plans, count = {}, len(workload.subgroups)
    for share in (0.0, 0.5) if suite.emulated else (0.0, 0.2, 0.35, 0.5):
        staged = [i * round(share * count) // count for i in range(count + 1)]  # before each subgroup, evenly spread
        placements: list[Placement] = ["device" if more > n else "host" for n, more in pairwise(staged)]
        for overlap in (True, False):
            start = base.model_copy(update={"overlap_forward": overlap})
            name = f"device{share:g}_{'overlap' if overlap else 'wait'}"
            plans[name] = start.placed(placements)
    return plans


def checkpoint_stall(suite: Suite) -> Figures:
    """Measure how a checkpoint slows down training, with `studies.checkpoint_stall` in its own process."""
    path = suite.out / "checkpoint_stall_full.json"
    command = ["studies.checkpoint_stall", "--json", str(path)]
    if suite.emulated:
        command += ["--quick", "--writers", "none", "ebbtide"]
    failed = suite.run("checkpoint_stall_full", command, suite.left_s(600.0))
    return {"failed": failed} if failed else {"measured": json.loads(path.read_text())}
