"""The main job on this machine, start to end: measure, profile, plan, train, crash, resume.

    python -m studies.demo            # or: make demo
    python -m studies.demo --quick    # a tiny model, to see that everything works

Leaves runs/demo/: machine.json, workload.json, plan.json, trace.json (open it in
ui.perfetto.dev), summary.json and three pictures. Exit code 1 if a bit differs.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from simulator import Machine, Plan, Workload
from studies.bench.record import write_record
from studies.demo import tables as demo_tables
from studies.demo.crash import Crash, CrashError, checkpointed_plan, kill_in_the_middle
from studies.demo.pictures import draw_comparison, draw_memory, machine_label
from studies.demo.results import Run, pooled, predicted_phases, same_bits, same_losses
from studies.demo.train import DemoModel
from studies.trials.phase_process import PhaseError, PhaseProcess


@dataclass(frozen=True)
class DemoSize:
    """What is trained, how often, and how long the machine is measured."""

    model: DemoModel = field(default_factory=DemoModel)
    rounds: int = 2
    seconds: float = 12.0


QUICK = DemoSize(
    DemoModel(size="4m", sequence=64, batch=1, subgroup_size=500_000, steps=12), 1, 2.0
)


class Demo:
    """The six steps, in order; each leaves files that the next ones read."""

    def __init__(self, folder: Path, size: DemoSize, console: Console) -> None:
        self.folder = folder
        self.model = size.model
        self.rounds = size.rounds
        self.seconds = size.seconds
        self.console = console
        self.started = time.perf_counter()

    def prepare(self) -> None:
        """An empty folder: what an earlier demo left would be mistaken for this one's."""
        for name in ("checkpoints", "runs", "logs"):
            shutil.rmtree(self.folder / name, ignore_errors=True)
        for file in (*self.folder.glob("*.json"), *self.folder.glob("*.png")):
            file.unlink()
        (self.folder / "logs").mkdir(parents=True)

    def measure(self) -> None:
        self._headline(1, "the machine")
        self._phase("measuring", "measure", ["machine", "--seconds", str(self.seconds)])
        self.console.print(demo_tables.machine(self.machine))
        self._quiet(demo_tables.doubts(self.machine, self.folder / "machine.json"))

    def profile(self) -> None:
        self._headline(2, "the workload inside stock DeepSpeed ZeRO-3 with offload")
        self._phase("profiling", "measure", ["workload"])
        draw_memory(self.workload, self.machine, self.folder / "memory.png")
        self.console.print(demo_tables.workload(self.workload))

    def plan(self) -> None:
        self._headline(3, "the plan")
        self.console.print(demo_tables.plan(Plan.load(self.folder / "plan.json")))

    def train(self) -> bool:
        """Stock and plan in turn; True if all their bits are the same."""
        self._headline(4, "stock DeepSpeed and the plan: same steps, same seeds")
        same = True
        for number in range(self.rounds):
            for side in ("stock", "plan"):
                same &= self._round(side, number)
        self._show_times()
        first = Run.load(self.folder, "stock0")
        runs = (
            f"{2 * self.rounds} runs, {first.tensors} tensors each (parameters, masters, moments)"
        )
        self._verdict(same, f"{runs}, every loss of {self.model.steps} steps")
        return same

    def _round(self, side: str, number: int) -> bool:
        name = f"{side}{number}"
        extra = ["--plan", self._path("plan.json")] if side == "plan" else []
        if name == "plan0":
            extra.append("--timeline")
        self._train(name, extra)
        return name == "stock0" or self._compare("stock0", name, keep=name == "plan0")

    def crash(self) -> bool:
        """Kill, resume, compare with the run that was never killed; True if all bits agree."""
        self._headline(5, "checkpoints in the background, SIGKILL in the middle of one, resume")
        plan = self._crash_plan()
        plan.save(self.folder / "plan_checkpointed.json")
        crash = self._kill()
        self.console.print(demo_tables.crash(crash))
        arguments = ["--plan", self._path("plan_checkpointed.json")]
        self._train("resumed", [*arguments, "--resume", self._path("checkpoints")])
        same = self._compare("plan0", "resumed")  # plan0 was never killed
        resumed = Run.load(self.folder, "resumed")
        self._verdict(
            same,
            f"resumed at step {resumed.first_step}, ended after step {self.model.steps}, "
            "against the run that was never killed",
        )
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

    def _path(self, name: str) -> str:
        return str(self.folder / name)

    def _headline(self, number: int, text: str) -> None:
        self.console.print(f"\n[bold]{number}/6  {text}[/bold]")

    def _arguments(self) -> list[str]:
        return ["--folder", str(self.folder), "--model", json.dumps(asdict(self.model))]

    def _train(self, name: str, extra: Sequence[str]) -> None:
        self._phase(f"training: {name}", "train", ["--name", name, *extra])

    def _phase(self, title: str, module: str, arguments: Sequence[str]) -> None:
        """Runs a child and shows how far it is."""
        log = self.folder / "logs" / f"{module}-{title.split()[-1]}.log"
        command = [*arguments, *self._arguments()]
        with self._bar() as bar, PhaseProcess(f"studies.demo.{module}", command, log) as child:
            task = bar.add_task(title, total=None, note="")
            for step in child.progress():
                bar.update(task, completed=step.done, total=step.total, note=step.note)
            child.finish()

    def _bar(self) -> Progress:
        return Progress(
            SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=28),
            TimeElapsedColumn(), TextColumn("[dim]{task.fields[note]}"),
            console=self.console, transient=True,
        )  # fmt: skip

    def _compare(self, reference: str, name: str, keep: bool = False) -> bool:
        """Compares bits; the tensors of ``name`` (gigabytes of them) go unless kept."""
        wrong = same_bits(self.folder, reference, name)
        losses = same_losses(Run.load(self.folder, reference), Run.load(self.folder, name))
        if wrong or not losses:
            shown = ", ".join(wrong[:3]) + (" ..." if len(wrong) > 3 else "")
            self.console.print(
                f"[red]{reference} and {name} differ[/red]: {len(wrong)} tensors {shown}"
                f"{'' if losses else '; losses differ'}"
            )
        if not keep:
            (self.folder / "runs" / f"{name}.pt").unlink()
        return not wrong and losses

    def _times(self) -> dict[str, dict[str, float]]:
        """Median phases: measured from all rounds, predicted from the plan file."""
        plan = Plan.load(self.folder / "plan.json")
        times = {"stock": pooled(self.folder, "stock", self.rounds)}
        times |= predicted_phases(plan, "stock")
        times["plan"] = pooled(self.folder, "plan", self.rounds)
        return times | predicted_phases(plan, "plan")

    def _show_times(self) -> None:
        self.console.print(demo_tables.times(self._times(), machine_label(self.machine)))

    def _quiet(self, line: str) -> None:
        if line:
            self.console.print(f"[dim]{line}[/dim]")

    def _verdict(self, same: bool, what: str) -> None:
        word = "[green]bit-identical[/green]" if same else "[red]NOT bit-identical[/red]"
        self.console.print(f"{word} ({what})")

    def _crash_plan(self) -> Plan:
        iteration_s = pooled(self.folder, "plan", self.rounds)["iteration"]
        return checkpointed_plan(
            Plan.load(self.folder / "plan.json"), self.folder / "checkpoints",
            max(2, self.model.steps // 4), self.workload.checkpoint_bytes, iteration_s,
        )  # fmt: skip

    def _kill(self) -> Crash:
        folder = self.folder / "checkpoints"
        folder.mkdir()
        log = self.folder / "logs" / "train-killed.log"
        plan = ["--plan", self._path("plan_checkpointed.json")]
        command = ["--name", "killed", *plan, *self._arguments()]
        with self._bar() as bar, PhaseProcess("studies.demo.train", command, log) as child:
            bar.add_task("training: to be killed", total=None, note="waiting for a checkpoint")
            return kill_in_the_middle(child, folder)

    def _summary(self, same: bool) -> None:
        times = self._times()
        verdict = "every parameter, moment and loss bit-identical" if same else "BITS DIFFER"
        label = f"{self.workload.params / 1e6:.0f} M parameters, {machine_label(self.machine)}"
        draw_comparison(times, self.folder / "stock_vs_plan.png", label, verdict)
        facts = {
            "model": asdict(self.model),
            "params": self.workload.params,
            "times_s": times,
            "speedup": times["stock"]["iteration"] / times["plan"]["iteration"],
            "bit_identical": same,
            "wall_s": time.perf_counter() - self.started,
        }
        write_record(self.folder / "summary.json", "demo", facts)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the demo; 0 if all bits agree, 1 if not, 2 if a phase failed."""
    parser = argparse.ArgumentParser(
        prog="python -m studies.demo", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--folder", type=Path, default=Path("runs/demo"), help="where to write")
    parser.add_argument("--rounds", type=int, help="runs of each side, in turn (default: 2)")
    parser.add_argument("--quick", action="store_true", help="a 4 M model, one round")
    args = parser.parse_args(argv)
    size = QUICK if args.quick else DemoSize()
    if args.rounds is not None:
        if args.rounds < 1:
            parser.error(f"--rounds must be >= 1, but got {args.rounds}")
        size = replace(size, rounds=args.rounds)
    console = Console(highlight=False)
    demo = Demo(args.folder, size, console)
    try:
        demo.prepare()
        demo.measure()
        demo.profile()
        demo.plan()
        same = demo.train()
        same &= demo.crash()
        demo.leave(same)
    except (PhaseError, CrashError) as error:
        console.print(f"[red]the demo stopped:[/red] {error}", markup=True)
        return 2
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
