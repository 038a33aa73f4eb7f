"""The demo's training runs: stock DeepSpeed and the plan, in turn, and the one that is killed.

Each runs in a process of its own and writes what the demo compares: phase times and losses as
JSON, every parameter and moment as a torch file.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from ebbtide.profiler import SampledProfile
from ebbtide.simulator import Machine, Plan, Timeline, Workload, build_schedule, simulate

from studies.bench.bits import state_of
from studies.bench.byte_gpt import SIZES, Batches, ByteGPT, ds_config, stock_engine, train_step
from studies.bench.phase_clock import PhaseClock, timed_step
from studies.bench.rank import become_only_rank
from studies.demo.measure import predict_anew
from studies.demo.pictures import draw_timelines, last_iterations, machine_label, typical
from studies.trials.phase_process import pause, report

WARMUP_STEPS = 4  # the first steps allocate, compile and fault pages in
FIRST_STEPS = 7  # of stock's those behind the warm-up are profiled: the plan is made of them
# Of a turn. The first step is not counted: caches are cold, threads asleep, and under a plan the
# last update has ended before the other side's turn, so that nothing is left to overlap. Few, and
# many turns: where a neighbour comes or goes, as many samples of each side lie before it.
TURN_STEPS = 3


@dataclass(frozen=True)
class DemoModel:
    """The trained model, the same in all runs that are compared.

    Attributes:
        size: a name of `studies.bench.byte_gpt.SIZES`.
        turns: turns of each side. A turn takes a second, so that a machine with drifting speed is the
            same for both.
    """

    size: str = "57m"
    sequence: int = 128
    batch: int = 1
    subgroup_size: int = 8_000_000
    turns: int = 8

    @property
    def steps(self) -> int:
        """Optimizer steps of a whole run."""
        return FIRST_STEPS + self.turns * TURN_STEPS

    def engine(self, plan: Path | None) -> Any:
        """Return a DeepSpeed engine: stock, or ebbtide's under ``plan``."""
        model = ByteGPT(SIZES[self.size].with_sequence(self.sequence))
        config = ds_config(self.batch, self.subgroup_size)
        if plan is None:
            return stock_engine(model, config)
        import ebbtide.runtime

        return ebbtide.runtime.initialize(model=model, config=config, plan=str(plan))[0]


class Training:
    """An engine in training: what it does at which step, and what is noted of it."""

    def __init__(self, model: DemoModel, plan: Path | None) -> None:
        report(0, model.steps, "starting DeepSpeed")
        become_only_rank()
        self.model = model
        self.engine = model.engine(plan)
        self.clock = PhaseClock(self.engine.device.type == "cuda")
        self.profile = None if plan else SampledProfile(self.engine)
        self.first = self.next = 0
        self._losses: list[torch.Tensor] = []

    def resume(self, folder: Path) -> None:
        """Load the newest committed checkpoint. The next step follows it."""
        path, _ = self.engine.load_checkpoint(str(folder))
        if path is None:
            raise FileNotFoundError(f"a committed checkpoint is needed to resume, but {folder} has none")
        self.first = self.next = self.engine.global_steps

    def train(self, steps: int, timed: Iterable[int] = (), profiled: Iterable[int] = ()) -> None:
        """The next steps; of them those with these numbers are timed, or profiled."""
        last = self.next + steps
        for number, step in enumerate(range(self.next, last)):
            batch = Batches(self.model.batch, self.model.sequence).at(step, self.engine.device)
            if number in timed:
                loss = timed_step(self.engine, batch, self.clock)
            elif number in profiled and self.profile:
                loss = self.profile.step(*batch).detach()
            else:
                loss = train_step(self.engine, batch)
            self._losses.append(loss)
            # No loss in the report: reading it would wait for the device, and end what overlaps.
            report(step + 1, self.model.steps, f"step {step + 1} of {self.model.steps}")
        self.next = last

    def save(self, folder: Path, name: str) -> None:
        """Write ``runs/NAME.json`` and ``runs/NAME.pt``."""
        report(self.next, self.model.steps, "collecting parameters and moments")
        state = state_of(self.engine)
        torch.save(state, folder / "runs" / f"{name}.pt")
        facts = {
            "first_step": self.first,
            "losses": [loss.item() for loss in self._losses],
            "phases": self.clock.iterations(),
            "tensors": len(state),
        }
        (folder / "runs" / f"{name}.json").write_text(json.dumps(facts, indent=1) + "\n")

    def end(self) -> None:
        self.engine.destroy()
        torch.distributed.destroy_process_group()


def stock(folder: Path, model: DemoModel) -> None:
    """Stock DeepSpeed: pauses once it is profiled, and after each turn.

    One step of a turn is timed and one is profiled. ``workload.json`` is written before the first
    turn, for the plan, and behind the last one, of the turns' profiled steps, together with what
    the simulator says on them of the plan.
    """
    run = Training(model, None)
    run.train(FIRST_STEPS, profiled=range(WARMUP_STEPS, FIRST_STEPS))
    assert run.profile is not None
    run.profile.workload().save(folder / "workload.json")
    run.profile = SampledProfile(run.engine)
    for _ in range(model.turns):
        pause()
        run.train(TURN_STEPS, timed=[1], profiled=[2])
    pause()
    run.profile.workload().save(folder / "workload.json")
    predict_anew(folder)
    run.save(folder, "stock")
    run.end()


def planned(folder: Path, model: DemoModel) -> None:
    """Train under the plan, with pauses around each turn. Every step of a turn except the first is timed."""
    plan = folder / "plan.json"
    run = Training(model, plan)
    optimizer = run.engine.optimizer
    run.train(FIRST_STEPS)
    optimizer.wait()  # its updates must not run into the other side's turn
    turns: list[Timeline] = []
    for _ in range(model.turns):
        pause()
        run.train(TURN_STEPS, timed=range(1, TURN_STEPS))
        optimizer.wait()
        turns.append(last_iterations(optimizer.timeline(), TURN_STEPS - 1))
    pause()
    run.save(folder, "plan")
    report(model.steps, model.steps, "drawing the timelines")
    _write_timelines(typical(turns), folder, plan)
    run.end()


def alone(folder: Path, model: DemoModel, name: str, plan: Path, resume: Path | None) -> None:
    """Train under a plan with checkpoints, from the start or resumed, to the last step without pauses."""
    run = Training(model, plan)
    if resume is not None:
        run.resume(resume)
    run.train(model.steps - run.next)
    run.save(folder, name)
    run.end()


def _write_timelines(measured: Timeline, folder: Path, plan: Path) -> None:
    """Predicted and measured, as one trace with two processes and as one picture."""
    workload, machine = (Workload.load(folder / "workload.json"), Machine.load(folder / "machine.json"))
    predicted = simulate(build_schedule(workload, Plan.load(plan)), machine)
    last_iterations(predicted, 3).to_perfetto(folder / "trace.json", measured)
    draw_timelines(predicted, measured, folder / "timeline.png", machine_label(machine))
