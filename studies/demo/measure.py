"""The demo's measuring phases: the machine, the workload, and the plan made of both."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from simulator import Machine, Workload
from studies.bench.deepspeed_ops import build_host_ops
from studies.bench.rank import become_only_rank
from studies.byte_gpt import train_step
from studies.demo.train import DemoModel
from studies.trials.phase_process import report

PROFILED_STEPS = 7


def compile_kernels() -> None:
    """DeepSpeed's host ops and ebbtide's host kernel, so that nobody waits for them later."""
    from runtime.kernels import host

    report(0, 2, "compiling DeepSpeed's CPU Adam (about a minute, once)")
    build_host_ops()
    report(1, 2, "compiling ebbtide's host kernel")
    host.load()
    report(2, 2)


def measure(folder: Path, seconds: float) -> None:
    """Compiles what is missing, then measures; writes ``machine.json``."""
    from profiler import measure_machine

    compile_kernels()
    machine = measure_machine(storage_dir=folder, seconds=seconds, progress=report)
    machine.save(folder / "machine.json")


def profile(folder: Path, model: DemoModel) -> None:
    """Profiles stock DeepSpeed on the model, then plans: ``workload.json``, ``plan.json``."""
    from profiler import profile_engine

    report(0, 1, "starting DeepSpeed")
    become_only_rank()
    engine = model.engine(plan=None)
    batches = iter(range(10**9))

    def next_step(live: object) -> torch.Tensor:
        return train_step(live, model.batches().at(next(batches), engine.device))

    workload = profile_engine(engine, next_step, iterations=PROFILED_STEPS)
    workload.save(folder / "workload.json")
    engine.destroy()
    torch.distributed.destroy_process_group()
    report(0, 1, "searching the plan")
    make_plan(folder)


def make_plan(folder: Path) -> None:
    """Searches and writes ``plan.json``."""
    from tuner import plan

    workload = Workload.load(folder / "workload.json")
    machine = Machine.load(folder / "machine.json")
    plan(workload, machine).save(folder / "plan.json")


def main(argv: list[str] | None = None) -> None:
    """Runs one measuring phase."""
    parser = argparse.ArgumentParser(prog="python -m studies.demo.measure", description=__doc__)
    parser.add_argument("phase", choices=["machine", "workload"])
    parser.add_argument("--folder", type=Path, required=True, help="the demo's folder")
    parser.add_argument("--model", default="{}", help="DemoModel's fields as JSON")
    parser.add_argument("--seconds", type=float, default=12.0, help="for measuring the machine")
    args = parser.parse_args(argv)
    if args.phase == "machine":
        measure(args.folder, args.seconds)
    else:
        profile(args.folder, DemoModel(**json.loads(args.model)))


if __name__ == "__main__":
    main()
