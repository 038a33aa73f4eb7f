"""One training run of the demo: stock DeepSpeed or under a plan, from the start or resumed.

Runs in a process of its own and writes what the demo compares: phase times and losses as JSON,
every parameter and moment as a torch file.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from simulator import Machine, Plan, Timeline, Workload, build_schedule, simulate
from studies.bench.bits import state_of
from studies.bench.phase_clock import PhaseClock, timed_step
from studies.bench.rank import become_only_rank
from studies.byte_gpt import SIZES, Batches, ByteGPT, ds_config
from studies.trials.phase_process import report

TRACED_ITERATIONS = 8
WARMUP_STEPS = 3  # the first steps allocate, compile and fault pages in


@dataclass(frozen=True)
class DemoModel:
    """What is trained; the same in all runs that are compared.

    Attributes:
        size: a name of `studies.byte_gpt.SIZES`.
        steps: optimizer steps of a whole run.
    """

    size: str = "57m"
    sequence: int = 128
    batch: int = 1
    subgroup_size: int = 8_000_000
    steps: int = 16

    def engine(self, plan: Path | None) -> Any:
        """A DeepSpeed engine: stock, or ebbtide's under ``plan``."""
        model = ByteGPT(SIZES[self.size].with_sequence(self.sequence))
        config = ds_config(self.batch, self.subgroup_size)
        if plan is None:
            import deepspeed

            return deepspeed.initialize(model=model, config=config)[0]
        import runtime

        return runtime.initialize(model=model, config=config, plan=str(plan))[0]

    def batches(self) -> Batches:
        return Batches(self.batch, self.sequence)


def train(
    engine: Any, model: DemoModel, first: int, last: int
) -> tuple[list[dict[str, float]], list[float]]:
    """Steps ``first`` to ``last - 1``; returns phase times and losses of each."""
    clock = PhaseClock(engine.device.type == "cuda")
    losses: list[torch.Tensor] = []
    for step in range(first, last):
        losses.append(timed_step(engine, model.batches().at(step, engine.device), clock))
        # No loss in the report: reading it would wait for the device, and end what overlaps.
        report(step + 1, last, f"step {step + 1} of {last}")
    return clock.iterations(), [loss.item() for loss in losses]


def _resume(engine: Any, folder: Path) -> int:
    """Loads the newest committed checkpoint; returns the step to go on with."""
    path, _ = engine.load_checkpoint(str(folder))
    if path is None:
        raise FileNotFoundError(
            f"a committed checkpoint is needed to resume, but {folder} has none"
        )
    steps: int = engine.global_steps
    return steps


def _write_timelines(engine: Any, folder: Path, plan: Path) -> None:
    """Predicted and measured, as one trace with two processes and as one picture."""
    from studies.demo.pictures import draw_timelines, last_iterations, machine_label

    workload, machine = (
        Workload.load(folder / "workload.json"),
        Machine.load(folder / "machine.json"),
    )
    predicted = simulate(build_schedule(workload, Plan.load(plan)), machine)
    measured: Timeline = engine.optimizer.timeline()
    last_iterations(predicted, 3).to_perfetto(
        folder / "trace.json", last_iterations(measured, TRACED_ITERATIONS)
    )
    draw_timelines(predicted, measured, folder / "timeline.png", machine_label(machine))


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m studies.demo.train", description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="the demo's folder")
    parser.add_argument("--name", required=True, help="names the results: runs/NAME.json, .pt")
    parser.add_argument("--model", default="{}", help="DemoModel's fields as JSON")
    parser.add_argument("--plan", type=Path, help="train under this plan; without it: stock")
    parser.add_argument("--resume", type=Path, help="a checkpoint folder to go on from")
    parser.add_argument("--timeline", action="store_true", help="write the timelines too")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Trains one run and writes its results."""
    args = _arguments(argv)
    model = DemoModel(**json.loads(args.model))
    report(0, model.steps, "starting DeepSpeed")
    become_only_rank()
    engine = model.engine(args.plan)
    first = _resume(engine, args.resume) if args.resume else 0
    rows, losses = train(engine, model, first, model.steps)
    report(model.steps, model.steps, "collecting parameters and moments")
    results = args.folder / "runs"
    results.mkdir(exist_ok=True)
    state = state_of(engine)
    torch.save(state, results / f"{args.name}.pt")
    facts = {"first_step": first, "losses": losses, "phases": rows, "tensors": len(state)}
    (results / f"{args.name}.json").write_text(json.dumps(facts, indent=1) + "\n")
    if args.timeline:
        _write_timelines(engine, args.folder, args.plan)
    engine.destroy()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
