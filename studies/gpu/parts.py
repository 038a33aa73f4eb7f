"""The parts of the GPU suite: each returns the figures it writes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch

from simulator import Plan, Workload, build_schedule, simulate
from simulator.analysis.bound import bound
from studies.gpu.suite import Figures, OutOfTimeError, Suite
from studies.peers import compare

PART_LIMIT_S = 600.0


def kernel_bits(suite: Suite) -> Figures:
    """(a) Device kernel against host kernel over random values with special ones among them."""
    from runtime.kernels.adam import AdamStep, BiasCorrection
    from runtime.kernels.host import host_update

    chunk, total = (10_007, 10**5) if suite.emulated else (20_000_003, 10**9)
    bias, differing, seen = BiasCorrection(0.9, 0.95), 0, 0
    special = torch.tensor([0.0, -0.0, 1e-45, 3e38, float("inf"), float("nan")])
    generator = torch.Generator().manual_seed(0)
    for number in range(1, total // chunk + 2):
        try:
            suite.left_s()
        except OutOfTimeError:
            break  # `values` tells how far it came
        values = [torch.randn(chunk, generator=generator) for _ in range(3)]
        values[2] = values[2].square()
        grad = torch.randn(chunk, generator=generator) * 10.0 ** ((number % 30) - 24)
        grad[: len(special)] = special
        grad = grad.bfloat16()
        step = AdamStep(1e-3, 0.9, 0.95, 1e-8, 0.1, *bias.advance(number, 0.9, 0.95))
        theirs = [v.clone() for v in values]
        wires = [torch.zeros(chunk, dtype=torch.bfloat16) for _ in range(2)]
        tail = number % 16
        host_update(values, grad, wires[0], step, 0.37, threads=8, tail=tail)
        theirs, wires[1] = _on_device(theirs, grad, wires[1], step, tail)
        pairs = [*zip(values, theirs, strict=True), (wires[0].float(), wires[1].float())]
        differing += sum(_unequal(a, b) for a, b in pairs)
        seen += chunk
    return {"values": seen, "differing": differing, "correct": differing == 0 and seen > 0}


def _on_device(
    state: list[torch.Tensor], grad: torch.Tensor, wire: torch.Tensor, step: Any, tail: int
) -> tuple[list[torch.Tensor], torch.Tensor]:
    if not torch.cuda.is_available():
        from runtime.devices.emulated import EmulatedDevice

        EmulatedDevice().update(state, grad, wire, step, 0.37, tail, None)
        return state, wire
    from runtime.kernels.device import device_update

    there, out = [t.cuda() for t in state], wire.cuda()
    device_update(there, grad.cuda(), out, step, 0.37, tail)
    return [t.cpu() for t in there], out.cpu()


def _unequal(a: torch.Tensor, b: torch.Tensor) -> int:
    same = (a == b) | (torch.isnan(a) & torch.isnan(b))
    return int((~same).sum())


def contract(suite: Suite) -> Figures:
    """(b) The runtime's contract suite: on CUDA where there is one."""
    chosen = [
        "tests/runtime/contract",
        "tests/runtime/test_kernels.py",
        "tests/runtime/test_live.py",
    ]
    if suite.emulated:
        chosen = ["tests/runtime/contract/test_bits.py", "-k", "all_on_the_host"]
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-p", "no:cacheprovider", *chosen]
    found = _tested(suite, command)
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer and not suite.emulated:
        few = ["-k", "all_on_the_host or any_placement", "tests/runtime/contract/test_bits.py"]
        races = [sanitizer, "--tool", "racecheck", "--error-exitcode", "9", *command[:6], *few]
        found["racecheck"] = _tested(suite, races)
        found["correct"] = bool(found["correct"] and found["racecheck"]["correct"])
    return found


def _tested(suite: Suite, command: list[str]) -> Figures:
    try:
        limit_s = suite.left_s(PART_LIMIT_S)
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=limit_s)
    except (OutOfTimeError, subprocess.TimeoutExpired) as error:
        return {"summary": f"stopped: {error}"[:300], "failed": [], "correct": None}
    lines = done.stdout.strip().splitlines()
    return {
        "summary": lines[-1] if lines else done.stderr.strip()[-300:],
        "failed": [line for line in lines if line.startswith("FAILED")],
        "correct": done.returncode == 0,
    }


def machine_profile(suite: Suite) -> Figures:
    """(c) What the machine can do."""
    machine = suite.measure_machine()
    machine.save(suite.out / "machine_profile.json")
    return {"measured": machine.model_dump(mode="json")}


def peers(suite: Suite) -> Figures:
    """(d) Everybody in turn: same model, same cap, same seeds."""
    return compare(suite)


def fidelity(suite: Suite) -> Figures:
    """(e) Predicted against measured over plans of many kinds."""
    workload, machine = suite.workload(), suite.machine()
    rows = []
    for name, plan in _varied(suite, workload):
        path = suite.out / "trials" / f"plan_{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        plan.save(path)
        row = suite.trial(f"fidelity_{name}", "--variant", "ebbtide", "--plan", str(path))
        predicted = simulate(build_schedule(workload, plan), machine).iteration_s
        row |= {"predicted_s": predicted}
        if "failed" not in row:
            row["error_pct"] = 100 * abs(predicted / row["iteration_s"] - 1)
        rows.append(row)
    errors = sorted(row["error_pct"] for row in rows if "error_pct" in row)
    median = errors[len(errors) // 2] if errors else None
    return {"rows": rows, "median_abs_pct_error": median}


def _varied(suite: Suite, workload: Workload) -> list[tuple[str, Plan]]:
    from simulator.schedules.strategies import shared_plan

    base = suite.plan().model_copy(update={"staging_slots": 3, "prefetch": 0})
    shares = (0.0, 0.5) if suite.emulated else (0.0, 0.2, 0.35, 0.5)
    found = []
    for share in shares:
        for overlap in (True, False):
            start = base.model_copy(update={"overlap_forward": overlap})
            found.append((f"device{share:g}_{'overlap' if overlap else 'wait'}",
                          shared_plan(workload, share, 0.0, start)))  # fmt: skip
    return found


def efficiency(suite: Suite) -> Figures:
    """(f) The chosen plan against its floor."""
    plan, workload, machine = suite.plan(), suite.workload(), suite.machine()
    trace = suite.out / "measured_trace.json"
    row = suite.trial(
        "efficiency", "--variant", "ebbtide", "--plan", str(suite.out / "plan.json"),
        "--timeline", str(trace),
    )  # fmt: skip
    limit = machine.device_memory_bytes if suite.emulated else suite.cap_gib * 2**30
    floor_s = bound(workload, machine, limit).iteration_s
    assert plan.prediction is not None
    figures: Figures = {"floor_s": floor_s, "predicted_s": plan.prediction.iteration_s, "row": row}
    if "failed" not in row:
        figures["efficiency"] = floor_s / row["iteration_s"]
    return figures


def checkpoint_stall(suite: Suite) -> Figures:
    """(g) What a checkpoint costs: `studies.checkpoint_stall` in a process of its own."""
    path = suite.out / "checkpoint_stall_full.json"
    command = [sys.executable, "-m", "studies.checkpoint_stall", "--json", str(path)]
    if suite.emulated:
        command += ["--model", "tiny", "--steps", "2"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=suite.left_s(PART_LIMIT_S)
    )
    if done.returncode:
        return {"failed": done.stderr.strip().splitlines()[-1:]}
    return {"measured": json.loads(path.read_text())}


def ablation(suite: Suite) -> Figures:
    """(h) The chosen plan without one feature at a time."""
    plan, rows = suite.plan(), []
    changes: dict[str, dict[str, Any]] = {
        "whole": {}, "no_overlap": {"overlap_forward": False}, "no_prefetch": {"prefetch": 0},
        "all_host": {"placement": Plan.runs(["host"] * plan.subgroup_count), "prefetch": 0},
    }  # fmt: skip
    for name, change in changes.items():
        path = suite.out / "trials" / f"ablation_{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        plan.model_copy(update=change).save(path)
        rows.append(suite.trial(f"run_{name}", "--variant", "ebbtide", "--plan", str(path)))
    return {"rows": rows}


PARTS: dict[str, Callable[[Suite], Figures]] = {
    "kernel_bits": kernel_bits,
    "contract": contract,
    "machine": machine_profile,
    "peers": peers,
    "efficiency": efficiency,
    "fidelity": fidelity,
    "ablation": ablation,
    "checkpoint_stall": checkpoint_stall,
}
