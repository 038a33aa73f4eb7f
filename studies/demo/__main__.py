"""The demo of ebbtide on this machine: measure, profile, plan, train, crash and resume.

    python -m studies.demo            # or: make demo
    python -m studies.demo --quick    # a tiny model, to see that everything works

Writes these files to runs/demo/: machine.json, workload.json, plan.json, trace.json (open it in ui.perfetto.dev),
summary.json and three pictures. The exit code is 1 if training under the plan is not bit-identical to training with
stock DeepSpeed, or if a resumed run is not bit-identical to a run that was never killed.
"""

import argparse
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from ebbtide.simulator import Machine, Plan, Workload
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from studies.bench.record import write_record
from studies.demo import measure, train
from studies.demo import tables as demo_tables
from studies.demo.crash import Crash, CrashError, checkpointed_plan, kill_in_the_middle
from studies.demo.pictures import draw_comparison, draw_memory, machine_label
from studies.demo.results import DemoRun, predicted_phases, same_bits, same_losses
from studies.demo.train import DemoModel
from studies.trials.phase_process import PhaseError, PhaseProcess, warm_up

Times = dict[str, dict[str, float]]  # column -> phase -> seconds


@dataclass(frozen=True)
class DemoSize:
    """The size of the demo.

    Attributes:
        seconds: Total seconds for measuring the speeds of the machine.
        elements: Number of elements in the subgroup of optimizer state that is used to measure these speeds.
    """

    model: DemoModel = field(default_factory=DemoModel)
    seconds: float = 12.0
    elements: int = 32_000_000


QUICK = DemoSize(DemoModel(size="4m", sequence=64, subgroup_size=500_000, turns=2), 2.0, 4_000_000)


class Demo:
    """The demo of ebbtide in six steps. Each step writes files that the next steps read."""

    def __init__(self, folder: Path, size: DemoSize, console: Console) -> None:
        self.folder = folder
        self.model = size.model
        self.size = size
        self.console = console
        self.started = time.perf_counter()
        self.first_prediction: Times = {}

    def prepare(self) -> None:
        """Empty the demo's result folder, so that files of an earlier demo are not taken for new ones."""
        warm_up(["studies.demo.warm"])
        for name in ("checkpoints", "runs", "logs"):
            shutil.rmtree(self.folder / name, ignore_errors=True)
        for file in (*self.folder.glob("*.json"), *self.folder.glob("*.png")):
            file.unlink()
        for name in ("runs", "logs"):
            (self.folder / name).mkdir(parents=True)

    def measure(self) -> None:
        self._headline(1, "the machine")
        size = self.size
        self._phase("measuring", measure.measure, seconds=size.seconds, elements=size.elements)
        self.console.print(demo_tables.machine(self.machine))
        self._quiet(demo_tables.doubts(self.machine, self.folder / "machine.json"))

    def train(self) -> bool:
        """Run three trainings that take turns of a few steps: one with stock DeepSpeed, and two under plans.

        The first plan is made from a profile of the first steps with stock DeepSpeed. The second one differs only in
        its early updates.

        Returns:
            True if losses, parameters and optimizer state of all three trainings are bit-identical.
        """
        model = self.model
        self._headline(2, "the workload inside stock DeepSpeed ZeRO-3 with offload")
        with self._started("stock", train.stock, model=model) as stock:
            self._watch(stock, "profiling")
            draw_memory(self.workload, self.machine, self.folder / "memory.png")
            self.console.print(demo_tables.workload(self.workload))
            self._plan()
            self._headline(4, "stock DeepSpeed and the plan: same steps, same seeds, in turn")
            with (
                self._started("plan", train.planned, model=model) as planned,
                self._started("toggled", train.planned, model=model, name="toggled") as toggled,
            ):
                sides = {"stock": stock, "plan": planned, "toggled": toggled}
                for side in ("plan", "toggled"):
                    self._watch(sides[side], f"starting the run of {side}.json")
                for turn in range(model.turns):
                    for side, child in sides.items():
                        child.go_on()
                        self._watch(child, f"turn {turn + 1} of {model.turns}: {side}")
                for side, child in sides.items():
                    child.go_on()
                    self._watch(child, f"{side}'s results")
        same = self._compare("toggled", "plan")
        same &= self._same()
        self.console.print(demo_tables.early_updates(*self._early_and_not()))
        return same

    def _plan(self) -> None:
        self._headline(3, "the plan")
        self._phase("planning", measure.make_plan)
        plan = Plan.load(self.folder / "plan.json")
        self.first_prediction = predicted_phases(plan, "stock") | predicted_phases(plan, "plan")
        self.console.print(demo_tables.plan(plan))

    def _same(self) -> bool:
        same = self._compare("stock", "plan")
        times = self._times()
        self.console.print(demo_tables.times(times, machine_label(self.machine)))
        self._quiet(demo_tables.predictions(times, self.first_prediction))
        tensors = DemoRun.load(self.folder, "stock").tensors
        self._verdict(same, f"{tensors} parameters, masters and moments, {self.model.steps} losses")
        return same

    def crash(self) -> bool:
        """Kill a training run, resume it from its checkpoint, and compare it with a run that was never killed.

        Returns:
            True if both runs have the same bits.
        """
        self._headline(5, "checkpoints in the background, SIGKILL in the middle of one, resume")
        plan = self._crash_plan()
        path = self.folder / "plan_checkpointed.json"
        plan.save(path)
        self.console.print(demo_tables.crash(self._kill(path)))
        self._phase(
            "resuming", train.alone, model=self.model, name="resumed", plan=path, resume=self.folder / "checkpoints"
        )
        same = self._compare("plan", "resumed")  # the run "plan" was never killed
        resumed = DemoRun.load(self.folder, "resumed")
        self._verdict(same, f"resumed at step {resumed.first_step}, against the run that was never killed")
        return same

    def leave(self, same: bool) -> None:
        self._headline(6, f"what is left in {self.folder}")
        shutil.rmtree(self.folder / "checkpoints", ignore_errors=True)
        for state in (self.folder / "runs").glob("*.pt"):
            state.unlink()
        self._summary(same)
        self.console.print(demo_tables.files(self.folder))
        minutes, seconds = divmod(time.perf_counter() - self.started, 60)
        self.console.print(f"done in {minutes:.0f} min {seconds:.0f} s")
        self.console.print(demo_tables.what_next(self.folder))

    @property
    def machine(self) -> Machine:
        return Machine.load(self.folder / "machine.json")

    @property
    def workload(self) -> Workload:
        return Workload.load(self.folder / "workload.json")

    def _headline(self, number: int, text: str) -> None:
        self.console.print(f"\n[bold]{number}/6  {text}[/bold]")

    def _phase(self, title: str, work: Callable[..., object], /, **arguments: Any) -> None:
        with self._started(title, work, **arguments) as child:
            self._watch(child, title)

    @contextmanager
    def _started(self, title: str, work: Callable[..., object], /, **arguments: Any) -> Iterator[PhaseProcess]:
        log = self.folder / "logs" / f"{title}.log"
        with self._bar() as bar:  # the first child process waits until the server has imported all modules
            bar.add_task(title, total=None, note="loading torch and DeepSpeed")
            child = PhaseProcess(work, {"folder": self.folder, **arguments}, log)
        with child:
            yield child

    def _watch(self, child: PhaseProcess, title: str) -> None:
        with self._bar() as bar:
            task = bar.add_task(title, total=None, note="")
            tell = partial(bar.console.print, markup=False, soft_wrap=True)  # one line, so that commands can be copied
            for step in child.progress(tell):
                bar.update(task, completed=step.done, total=step.total, note=step.note)
        if not child.waits:
            child.finish()

    def _bar(self) -> Progress:
        return Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=28),
            TimeElapsedColumn(),
            TextColumn("[dim]{task.fields[note]}"),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )

    def _compare(self, reference: str, name: str) -> bool:
        wrong = same_bits(self.folder, reference, name)
        losses = same_losses(DemoRun.load(self.folder, reference), DemoRun.load(self.folder, name))
        if wrong or not losses:
            shown = ", ".join(wrong[:3]) + (" ..." if len(wrong) > 3 else "")
            self.console.print(
                f"[red]{reference} and {name} differ[/red]: {len(wrong)} tensors of the training state {shown}"
                f"{'' if losses else '; losses differ'}"
            )
        (self.folder / "runs" / f"{reference}.pt").unlink()
        return not wrong and losses

    def _times(self) -> Times:
        plan = Plan.load(self.folder / "plan.json")
        times = {"stock": DemoRun.load(self.folder, "stock").medians()}
        times |= predicted_phases(plan, "stock")
        times["plan"] = DemoRun.load(self.folder, "plan").medians()
        return times | predicted_phases(plan, "plan")

    def _early_and_not(self) -> tuple[Plan, dict[str, float], dict[str, float], DemoRun]:
        rows: dict[bool, tuple[Plan, dict[str, float], DemoRun]] = {}
        for name in ("plan", "toggled"):
            plan, run = Plan.load(self.folder / f"{name}.json"), DemoRun.load(self.folder, name)
            assert plan.prediction is not None
            times = {"measured": run.medians()["iteration"], "predicted": plan.prediction.iteration_s}
            rows[any(plan.updated_early)] = plan, times, run
        plan, times, run = rows.get(True, rows[False])
        return plan, times, rows[False][1], run

    def _early_updates(self) -> dict[str, Any]:
        plan, times, without, run = self._early_and_not()
        counts = {"early_subgroups": sum(plan.updated_early), "steps": self.model.steps, "clipped_steps": run.clipped}
        return counts | {"iteration_s": times, "iteration_without_s": without}

    def _quiet(self, line: str) -> None:
        if line:
            self.console.print(f"[dim]{line}[/dim]")

    def _verdict(self, same: bool, what: str) -> None:
        word = "[green]bit-identical[/green]" if same else "[red]NOT bit-identical[/red]"
        self.console.print(f"{word} ({what})")

    def _crash_plan(self) -> Plan:
        return checkpointed_plan(
            Plan.load(self.folder / "plan.json"),
            self.folder / "checkpoints",
            max(2, self.model.steps // 4),
            self.workload.checkpoint_bytes,
            self._times()["plan"]["iteration"],
        )

    def _kill(self, plan: Path) -> Crash:
        folder = self.folder / "checkpoints"
        folder.mkdir()
        arguments = {"model": self.model, "name": "killed", "plan": plan, "resume": None}
        with self._started("killed", train.alone, **arguments) as child, self._bar() as bar:
            bar.add_task("training: to be killed", total=None, note="waiting for a checkpoint")
            return kill_in_the_middle(child, folder)

    def _summary(self, same: bool) -> None:
        times = self._times()
        verdict = "every parameter, moment and loss bit-identical" if same else "BITS DIFFER"
        label = f"{self.workload.params / 1e6:.0f} M parameters, {machine_label(self.machine)}"
        draw_comparison(times, self.folder / "stock_vs_plan.png", label, verdict)
        facts = {
            "model": asdict(self.model) | {"steps": self.model.steps},
            "params": self.workload.params,
            "times_s": times,
            "predicted_before_s": self.first_prediction,
            "speedup": times["stock"]["iteration"] / times["plan"]["iteration"],
            "early_updates": self._early_updates(),
            "bit_identical": same,
            "wall_s": time.perf_counter() - self.started,
        }
        write_record(self.folder / "summary.json", "demo", facts)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo of ebbtide, and return its exit code.

    The code is 0 if all compared training runs have the same bits, 1 if not, and 2 if a phase failed.
    """
    parser = argparse.ArgumentParser(
        prog="python -m studies.demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path("runs/demo"), help="folder for the results")
    parser.add_argument(
        "--rounds",
        type=int,
        help="number of rounds of training (default: 8). In each round, DeepSpeed alone and each plan train for about "
        "a second, one after the other",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="shorten the demo: the model has only 4 million parameters, and training only 2 rounds (see --rounds)",
    )
    args = parser.parse_args(argv)
    size = QUICK if args.quick else DemoSize()
    if args.rounds is not None:
        if args.rounds < 1:
            parser.error(f"--rounds must be >= 1, but got {args.rounds}")
        size = replace(size, model=replace(size.model, turns=args.rounds))
    console = Console(highlight=False)
    demo = Demo(args.folder, size, console)
    try:
        demo.prepare()
        demo.measure()
        same = demo.train()
        same &= demo.crash()
        demo.leave(same)
    except (PhaseError, CrashError) as error:
        console.print(f"[red]the demo stopped:[/red] {error}", markup=True)
        return 2
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
