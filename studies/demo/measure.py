"""The demo's measuring phases: the machine, and the plan for this machine and the profiled workload."""

from pathlib import Path

from ebbtide.simulator import Machine, Plan, Workload

from studies.bench.deepspeed_ops import build_host_ops
from studies.trials.phase_process import report


def compile_kernels() -> None:
    """Compile DeepSpeed's host ops and ebbtide's host kernel, so that later phases need not wait."""
    from ebbtide.runtime.kernels import host

    report(0, 2, "compiling DeepSpeed's CPU Adam (about a minute, once)")
    build_host_ops()
    report(1, 2, "compiling ebbtide's host kernel")
    host.load()
    report(2, 2)


def measure(folder: Path, seconds: float, elements: int) -> None:
    """Compile missing kernels, measure the machine, and write ``machine.json``."""
    from ebbtide.profiler import measure_machine

    compile_kernels()
    machine = measure_machine(storage_dir=folder, seconds=seconds, elements=elements, progress=report)
    command = {"measured_with": "python -m studies.demo"}  # not this child's own arguments
    machine.model_copy(update=command).save(folder / "machine.json")


def make_plan(folder: Path) -> None:
    """Search for a plan for the measured machine and the profiled workload, and write ``plan.json``."""
    from ebbtide.tuner import plan

    report(0, 1, "searching")
    chosen = plan(*_profile(folder))
    chosen.save(folder / "plan.json")
    toggled(chosen).save(folder / "toggled.json")


def toggled(plan: Plan) -> Plan:
    """Return the plan to compare with: without its early updates, or, if it has none, with all that are possible."""
    early = not any(plan.updated_early)
    ways = tuple(way._replace(early=early).fitted() for way in plan.ways)
    return plan.model_copy(update={"ways": ways, "prediction": None, "alternatives": (), "reasons": ()})


def predict_anew(folder: Path) -> None:
    """Simulate both plans with the current profile, and write the new predictions to their files."""
    from ebbtide.tuner.placements.planning import predicted_anew

    for name in ("plan.json", "toggled.json"):
        path = folder / name
        predicted_anew(Plan.load(path), *_profile(folder)).save(path)


def _profile(folder: Path) -> tuple[Workload, Machine]:
    return Workload.load(folder / "workload.json"), Machine.load(folder / "machine.json")
