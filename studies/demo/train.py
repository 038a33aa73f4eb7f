"""The demo's training runs: one with stock DeepSpeed, two under plans, and one that is killed.

The first three take turns of a few steps. Each run is a separate process. It writes its phase times and losses as JSON,
and its parameters and optimizer state as a torch file. The demo compares these files.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from ebbtide.profiler import SampledProfile
from ebbtide.profiler.engine import steps_needed
from ebbtide.simulator import Machine, Plan, Timeline, Workload, build_schedule, simulate

from studies.bench.bits import state_of
from studies.bench.byte_gpt import SIZES, Batches, ByteGPT, ds_config, stock_engine, train_step
from studies.bench.phase_clock import PhaseClock, timed_step
from studies.bench.rank import become_only_rank
from studies.demo.measure import predict_anew
from studies.demo.pictures import draw_timelines, last_iterations, machine_label, typical
from studies.trials.phase_process import pause, report

WARMUP_STEPS = 4  # the first steps allocate, compile and touch new pages
FIRST_STEPS = steps_needed(3)  # DeepSpeed's steps after the warm-up are profiled, and the plan is made from them
# Steps of a turn. The first step of a turn is not counted: caches are cold, threads sleep, and the updates of the
# previous turn have ended, so that nothing overlaps. Turns are short and many, so that a change in the load of the
# machine affects both sides equally.
# DeepSpeed's side is timed, profiled, and profiled without DeepSpeed's hooks on modules, as a plan runs. After the last
# kind, DeepSpeed records the order of modules anew, which lengthens its next step.
TURN_STEPS = 5
# The gradients of an untrained model are large. With a limit of 1.0, all of the demo's few steps would clip, as the
# first steps of a real run do.
CLIPPING = 20.0


@dataclass(frozen=True)
class DemoModel:
    """The model that all training runs of the demo train, and the length of a run.

    The runs of DeepSpeed and of each plan train in turn, so that a change of the machine's speed affects
    all of them equally. A turn is a few steps of one run, and takes about a second.

    Attributes:
        size: Key of `studies.bench.byte_gpt.SIZES`.
    """

    size: str = "57m"
    sequence: int = 128
    batch: int = 1
    subgroup_size: int = 8_000_000
    turns: int = 8

    @property
    def steps(self) -> int:
        """Return the number of optimizer steps of a complete training run of the demo."""
        return FIRST_STEPS + self.turns * TURN_STEPS

    def engine(self, plan: Path | None) -> Any:
        """Return a DeepSpeed engine that trains the demo's model, under ebbtide's plan if one is given."""
        model = ByteGPT(SIZES[self.size].with_sequence(self.sequence))
        config = ds_config(self.batch, self.subgroup_size, clipping=CLIPPING)
        if plan is None:
            return stock_engine(model, config)
        import ebbtide.runtime

        return ebbtide.runtime.initialize(model=model, config=config, plan=str(plan))[0]


class DemoTraining:
    """A training run of the demo: its engine, and the losses and times of its steps."""

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
        """Load the newest committed checkpoint in a folder, to continue training with the step after it."""
        path, _ = self.engine.load_checkpoint(str(folder))
        if path is None:
            raise FileNotFoundError(f"a committed checkpoint is needed to resume, but {folder} has none")
        self.first = self.next = self.engine.global_steps

    def train(
        self, steps: int, timed: Iterable[int] = (), profiled: Iterable[int] = (), bare: Iterable[int] = ()
    ) -> None:
        """Train ``steps`` more steps of this run of the demo.

        Args:
            timed: Numbers of the steps whose phases are timed, counted from 0 in this call.
            profiled: Numbers of the steps that are profiled, counted in the same way.
            bare: Numbers of those that are profiled without DeepSpeed's hooks on modules.
        """
        last = self.next + steps
        for number, step in enumerate(range(self.next, last)):
            batch = Batches(self.model.batch, self.model.sequence).at(step, self.engine.device)
            if number in timed:
                loss = timed_step(self.engine, batch, self.clock)
            elif self.profile and (number in profiled or number in bare):
                loss = self.profile.step(*batch, bare=number in bare).detach()
            else:
                loss = train_step(self.engine, batch)
            self._losses.append(loss)
            # No loss in the report, because reading it would wait for the device and end the overlap.
            report(step + 1, self.model.steps, f"step {step + 1} of {self.model.steps}")
        self.next = last

    def save(self, folder: Path, name: str) -> None:
        """Write the run's losses and times to ``runs/NAME.json``, and parameters and optimizer state to a ``.pt``."""
        report(self.next, self.model.steps, "collecting parameters and moments")
        state = state_of(self.engine)
        torch.save(state, folder / "runs" / f"{name}.pt")
        facts = {
            "first_step": self.first,
            "losses": [loss.item() for loss in self._losses],
            "phases": self.clock.iterations(),
            "tensors": len(state),
            "clipped": self.clipped(),
        }
        (folder / "runs" / f"{name}.json").write_text(json.dumps(facts, indent=1) + "\n")

    def clipped(self) -> int:
        """Return the number of steps of this demo run that clipped or overflowed."""
        # Only ebbtide counts such steps, so the result is 0 for a run with stock DeepSpeed.
        session = getattr(self.engine.optimizer, "_ebbtide", None)
        return session.pausing.clipped if session is not None else 0

    def end(self) -> None:
        self.engine.destroy()
        torch.distributed.destroy_process_group()


def stock(folder: Path, model: DemoModel) -> None:
    """Train with stock DeepSpeed for the demo, in several turns of a few steps each.

    The process first profiles some steps and writes ``workload.json``, from which the demo's plan is made. Then it
    pauses before each turn and before it writes the results, so that other processes can train in turn. In each turn,
    one step is timed and two are profiled. At the end, ``workload.json`` is written again, from the profiled steps of
    all turns. The final predictions for the demo's plans are computed from this file.
    """
    run = DemoTraining(model, None)
    run.train(FIRST_STEPS, profiled=range(WARMUP_STEPS, FIRST_STEPS - 4), bare=range(FIRST_STEPS - 3, FIRST_STEPS))
    assert run.profile is not None
    run.profile.workload().save(folder / "workload.json")
    run.profile = SampledProfile(run.engine)
    for _ in range(model.turns):
        pause()
        run.train(TURN_STEPS, timed=[2], profiled=[3], bare=[4])
    pause()
    run.profile.workload().save(folder / "workload.json")
    predict_anew(folder)
    run.save(folder, "stock")
    run.end()


def planned(folder: Path, model: DemoModel, name: str = "plan") -> None:
    """Train under a plan for the demo, in turns of a few steps.

    This run pauses before each turn and before it writes its results, so that the other runs can train in
    between. All steps of a turn except its first one are timed.
    """
    plan = folder / f"{name}.json"
    run = DemoTraining(model, plan)
    optimizer = run.engine.optimizer
    run.train(FIRST_STEPS)
    optimizer.wait()  # the updates must not run on into the other side's turn
    turns: list[Timeline] = []
    for _ in range(model.turns):
        pause()
        run.train(TURN_STEPS, timed=range(1, TURN_STEPS))
        optimizer.wait()
        turns.append(last_iterations(optimizer.timeline(), TURN_STEPS - 1))
    pause()
    run.save(folder, name)
    if name == "plan":
        report(model.steps, model.steps, "drawing the timelines")
        _write_timelines(typical(turns), folder, plan)
    run.end()


def alone(folder: Path, model: DemoModel, name: str, plan: Path, resume: Path | None) -> None:
    """Train for the demo under a plan with checkpoints, up to the last step.

    Other runs of the demo pause after every few steps, so that several processes can train in turn. This run never
    pauses.

    If ``resume`` is a folder, training starts from its newest checkpoint.
    """
    run = DemoTraining(model, plan)
    if resume is not None:
        run.resume(resume)
    run.train(model.steps - run.next)
    run.save(folder, name)
    run.end()


def _write_timelines(measured: Timeline, folder: Path, plan: Path) -> None:
    workload, machine = (Workload.load(folder / "workload.json"), Machine.load(folder / "machine.json"))
    predicted = simulate(build_schedule(workload, Plan.load(plan)), machine)
    last_iterations(predicted, 3).to_perfetto(folder / "trace.json", measured)
    draw_timelines(predicted, measured, folder / "timeline.png", machine_label(machine))
