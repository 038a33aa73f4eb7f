"""The demo's steps that measure the machine and make a plan for the profiled training."""

from pathlib import Path

from ebbtide.simulator import Machine, Plan, Workload

from studies.bench.deepspeed_ops import build_host_ops
from studies.trials.phase_process import report


def compile_kernels() -> None:
    """Compile DeepSpeed's CPU ops and ebbtide's CPU kernel, so that later steps of the demo need not."""
    from ebbtide.runtime.kernels import host

    report(0, 2, "compiling DeepSpeed's CPU Adam (about a minute, once)")
    build_host_ops()
    report(1, 2, "compiling ebbtide's host kernel")
    host.load()
    report(2, 2)


def measure(folder: Path, seconds: float, elements: int) -> None:
    """Compile missing kernels, measure the machine's rates, and write them to ``machine.json``."""
    from ebbtide.profiler import measure_machine

    compile_kernels()
    machine = measure_machine(storage_dir=folder, seconds=seconds, elements=elements, progress=report)
    command = {"measured_with": "python -m studies.demo"}  # instead of this child process's own arguments
    machine.model_copy(update=command).save(folder / "machine.json")


def make_plan(folder: Path) -> None:
    """Make a plan for the measured machine and the profiled model, and write it to ``plan.json``.

    A second plan, which differs only in its early updates, is written to ``toggled.json``.
    """
    from ebbtide.tuner import plan

    report(0, 1, "searching")
    chosen = plan(*_profile(folder))
    chosen.save(folder / "plan.json")
    toggled(chosen).save(folder / "toggled.json")


def toggled(plan: Plan) -> Plan:
    """Return a copy of a plan that differs only in its early updates, to show what early updates gain."""
    early = not any(plan.updated_early)
    ways = tuple(way._replace(early=early).fitted() for way in plan.ways)
    return plan.model_copy(update={"ways": ways, "prediction": None, "alternatives": (), "reasons": ()})


def predict_anew(folder: Path) -> None:
    """Simulate both plans of the demo with the newest profile, and write the predictions to the plans' files.

    The second plan differs from the first one only in its early updates.
    """
    from ebbtide.tuner.placements.planning import predicted_anew

    for name in ("plan.json", "toggled.json"):
        path = folder / name
        predicted_anew(Plan.load(path), *_profile(folder)).save(path)


def _profile(folder: Path) -> tuple[Workload, Machine]:
    return Workload.load(folder / "workload.json"), Machine.load(folder / "machine.json")
