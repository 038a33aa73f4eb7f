"""Training under a plan with checkpoints, in processes that the study of checkpoint intervals forks and kills."""

import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import ebbtide.simulator
from ebbtide.simulator import CheckpointPlan, Machine, Plan

ENDLESS = 10**9


@dataclass(frozen=True)
class IntervalTraining:
    """The model that the study of checkpoint intervals trains: a key of `studies.bench.byte_gpt.SIZES`."""

    model: str = "40m"
    sequence: int = 32
    subgroup_size: int = 5_000_000

    def engine(self, plan: Plan) -> Any:
        """Return a DeepSpeed engine that trains this model with ebbtide's runtime, under the given plan."""
        import ebbtide.runtime

        return ebbtide.runtime.initialize(**self._parts(), plan=plan)[0]

    def stock_engine(self) -> Any:
        from studies.bench.byte_gpt import stock_engine

        return stock_engine(**self._parts())

    def _parts(self) -> dict[str, Any]:
        import torch

        from studies.bench.byte_gpt import SIZES, ByteGPT, ds_config

        torch.set_num_threads(1)
        model = ByteGPT(SIZES[self.model].with_sequence(self.sequence))
        return {"model": model, "config": ds_config(1, self.subgroup_size)}

    def step(self, engine: Any, number: int) -> None:
        from studies.bench.byte_gpt import Batches, train_step

        train_step(engine, Batches(1, self.sequence).at(number, engine.device))


def warm_up() -> None:
    """Import all modules that training processes need, before the study forks these processes.

    No thread may be started, because a thread does not survive a fork.
    """
    from studies.bench.byte_gpt import python_sources
    from studies.checkpoints.run import warm_up as warm

    warm()
    from ebbtide.runtime.kernels import host

    host.load()
    python_sources()


def profile(training: IntervalTraining, folder: Path, seconds: float) -> None:
    """Measure rates of this machine, such as memory and disk bandwidth, and profile the training with stock DeepSpeed.

    The results are written to machine.json and workload.json in ``folder``.
    """
    from ebbtide.profiler import measure_machine, profile_engine

    from studies.checkpoints.writers import TimedJob, raw_write_bytes_per_s

    machine = measure_machine(folder, seconds=seconds, fresh=True, elements=8_000_000)
    # A disk with a cache writes a small file faster than a whole checkpoint, so the file is as large as a checkpoint.
    size = TimedJob(training.model, training.sequence, 0)
    rate = median(raw_write_bytes_per_s(folder, size) for _ in range(3))
    machine.with_rates(storage_write_bytes_per_s=rate).save(folder / "machine.json")
    engine = training.stock_engine()
    steps = iter(range(ENDLESS))
    work = profile_engine(engine, lambda e: training.step(e, next(steps)), 5)
    work.save(folder / "workload.json")


def read_profile(folder: Path) -> tuple[Machine, ebbtide.simulator.Workload]:
    return Machine.load(folder / "machine.json"), ebbtide.simulator.Workload.load(folder / "workload.json")


def under(plan: Plan, steps: int, folder: Path) -> Plan:
    """Return the plan with a checkpoint into ``folder`` every ``steps`` steps. If ``steps`` is 0, none is saved."""
    saving = plan.checkpoint.model_copy(update={"interval_steps": steps, "dir": str(folder), "keep": 2})
    return plan.model_copy(update={"checkpoint": CheckpointPlan.model_validate(saving.model_dump())})


def train(training: IntervalTraining, plan: Plan, notes: Path, last: int = ENDLESS) -> None:
    """Train under a plan up to step ``last``, from the newest checkpoint if there is one.

    Each step and its time are written to the file ``notes``.
    """
    begin = time.monotonic()
    folder = Path(plan.checkpoint.dir or "")
    engine = training.engine(plan)
    if folder.is_dir():
        engine.load_checkpoint(str(folder))
    with notes.open("a", buffering=1) as out:
        out.write(f"start {engine.global_steps} {time.monotonic() - begin}\n")
        while engine.global_steps < last:
            step_begin = time.monotonic()
            training.step(engine, engine.global_steps)
            out.write(f"step {engine.global_steps} {time.monotonic() - step_begin}\n")
    report = getattr(engine.checkpoint_engine, "wait", lambda: None)()
    if report is not None:
        with notes.open("a") as out:
            out.write(f"report {report.stall_s} {report.update_wait_s} {report.persist_s} {report.copied_bytes}\n")
    engine.destroy()


def read_notes(notes: Path, kind: str) -> list[tuple[float, ...]]:
    """Return the numbers in those lines of a training run's notes file that begin with a given word."""
    # A last line that was cut short by a kill is left out.
    lines = notes.read_text().split("\n")[:-1] if notes.exists() else []
    return [tuple(float(x) for x in line.split()[1:]) for line in lines if line.startswith(kind)]
