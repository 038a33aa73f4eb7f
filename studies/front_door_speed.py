"""Speed of training under the command `tune run`, compared with direct calls of ebbtide's library.

    python -m studies.front_door_speed --json front_door_speed.json

Two processes train the same model under the same plan. One calls `ebbtide.initialize`. The other is started by `tune
run` and calls `deepspeed.initialize` with the key ``"ebbtide"`` in its config. Only one of them works at a time: it
trains one step, or saves a checkpoint and trains one step, and then the other process does the same. A process can be
a few percent faster or slower for its whole life, because of its place in memory. So several pairs of processes are
compared.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, TextIO

from studies.bench.console import publish, study_parser

WARMUP = 2
DOORS = ("library", "tune run")
FIGURES = ("forward_s", "backward_s", "step_s", "iteration_s", "stall_s", "iteration_with_save_s")


# -- in the two processes: one line in, one line out


def train(door: str, size: str, overlap: bool, folder: Path, orders: Iterable[str], answers: TextIO) -> None:
    """Train in one of the study's two processes, as the orders of the parent process say.

    One process was started by `tune run`, and the other one calls ebbtide's library. Each line of ``orders`` is one
    order. ``step`` trains one step. ``save`` saves a checkpoint and then trains one step. ``state`` asks for a hash of
    the training state. The answers are written to ``answers``.
    """
    from studies.bench.bits import digest, state_of
    from studies.bench.byte_gpt import Batches

    engine, number = engine_through(door, size, overlap), 0
    batches = Batches(1, 1)
    for order in orders:
        answer: dict[str, Any] = {}
        if order.strip() == "state":
            answer = {"state": digest(state_of(engine).values())}
        else:
            batch = batches.at(number, engine.device)
            answer = timed(engine, batch, folder if order.strip() == "save" else None)
            number += 1
        answers.write(f"answer {json.dumps(answer)}\n")
        answers.flush()
    engine.destroy()


def engine_through(door: str, size: str, overlap: bool) -> Any:
    """Build and return the DeepSpeed engine for one of the two ways to use ebbtide that the study compares.

    The study compares their speed under the same plan. The plan updates all optimizer state on the host and keeps one
    checkpoint.

    Args:
        door: The way: "library" for a process that calls ebbtide's library, "tune run" for a process that `tune run`
            started.
        size: Name of the model's size.
        overlap: True if updates may overlap the next forward.
    """
    from ebbtide.simulator import CheckpointPlan, Plan, Way
    from ebbtide.simulator.update.subgroups import cut

    from studies.bench.byte_gpt import SIZES, ByteGPT, ds_config, stock_engine

    model = ByteGPT(SIZES[size].with_sequence(1))
    parameters = [p.numel() for p in model.parameters()]
    subgroup = max(20_000, sum(parameters) // 10)
    config = ds_config(1, subgroup)
    plan = Plan(
        subgroup_size=subgroup,
        ways=Way.each(["host"] * len(cut(parameters, subgroup))),
        overlap_forward=overlap,
        checkpoint=CheckpointPlan(keep=1),
    )
    if door == "library":
        import ebbtide.runtime

        return ebbtide.runtime.initialize(model=model, config=config, plan=plan)[0]
    return stock_engine(model, {**config, "ebbtide": {"plan": plan.model_dump(mode="json")}})


def timed(engine: Any, batch: Any, folder: Path | None) -> dict[str, float]:
    """Return the seconds of each phase of one training step, or of a checkpoint followed by a step.

    If ``folder`` is given, a checkpoint is saved there before the step. After the measurement, updates
    and writes still running are waited for.
    """
    from studies.bench.phase_clock import PhaseClock, timed_step

    begin = time.perf_counter()
    if folder is not None:
        engine.save_checkpoint(str(folder))
    stall_s = time.perf_counter() - begin
    clock = PhaseClock(engine.device.type == "cuda")
    timed_step(engine, batch, clock)
    whole_s = time.perf_counter() - begin
    engine.optimizer.wait()
    engine.checkpoint_engine.wait()
    if folder is not None:
        return {"stall_s": stall_s, "iteration_with_save_s": whole_s}
    return {f"{phase}_s": seconds for phase, seconds in clock.iterations()[0].items()}


# -- the parent


class Door:
    """A handle of a training process, through which the study sends orders to the process.

    The process is started by `tune run`, or it calls ebbtide's library. The study compares the speed of one
    process of each kind.
    """

    def __init__(self, door: str, size: str, overlap: bool, folder: Path) -> None:
        command = [
            sys.executable,
            "-m",
            "studies.front_door_speed",
            "--train",
            door,
            "--size",
            size,
            "--folder",
            str(folder / door),
        ]
        if overlap:
            command.append("--overlap")
        if door == "tune run":
            command = [sys.executable, "-m", "ebbtide.tuner.cli", "run", "--", *command]
        self._log = folder / f"{door}.log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )

    def ask(self, order: str) -> dict[str, Any]:
        """Send an order, such as ``step``, to the training process and return the process's answer.

        Raises:
            RuntimeError: If the process has ended. The message has the end of its output.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(f"{order}\n")
            self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("answer "):
                answer: dict[str, Any] = json.loads(line.removeprefix("answer "))
                return answer
        raise RuntimeError(f"a training process ended: {self._log.read_text()[-2000:]}")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()


@contextlib.contextmanager
def both(size: str, overlap: bool, order: Sequence[str]) -> Iterator[dict[str, Door]]:
    """Yield two training processes as a dict by name, after starting them in the given order.

    One is started by `tune run`, the other calls ebbtide's library. The study compares their speed.
    """
    with tempfile.TemporaryDirectory(prefix="ebbtide-doors-") as folder:
        doors = {door: Door(door, size, overlap, Path(folder)) for door in order}
        try:
            yield doors
        finally:
            for door in doors.values():
                door.close()


def measure(doors: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Measure training steps and checkpoints in two processes: one started by `tune run`, and one that calls ebbtide's
    library.

    Args:
        doors: The two running processes by name, see `DOORS`.
        rounds: Timed steps and checkpoints of each process.

    Returns:
        A dict with the median times of each process, the ratios of the times, and whether parameters and optimizer
        state of both processes are bit-identical at the end.
    """
    rows: dict[str, list[dict[str, float]]] = {door: [] for door in doors}
    for number in range(WARMUP + rounds):
        # The order alternates, because the second run finds warmer caches, or a busier disk.
        for door in list(doors) if number % 2 else reversed(list(doors)):
            row = doors[door].ask("step") | doors[door].ask("save")
            if number >= WARMUP:
                rows[door].append(row)
    result: dict[str, Any] = {
        door: {name: median(row[name] for row in rows[door]) for name in FIGURES} for door in doors
    }
    library, front = (result[door] for door in DOORS)
    result["front_door_over_library"] = {name: front[name] / library[name] for name in FIGURES}
    result["bit_identical"] = len({doors[door].ask("state")["state"] for door in doors}) == 1
    return result


def over_pairs(pairs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the training times under `tune run` and with direct library calls, as medians over all pairs of processes.

    A pair is two processes that train the same model, one under `tune run` and one with direct calls of
    ebbtide's library. The times are those of forward, backward, step, iteration and saves. The ratio of the
    two processes' times is given as median, lowest and highest over the pairs.
    """
    ratios = {name: [pair["front_door_over_library"][name] for pair in pairs] for name in FIGURES}
    result: dict[str, Any] = {
        door: {name: median(pair[door][name] for pair in pairs) for name in FIGURES} for door in DOORS
    }
    result["front_door_over_library"] = {name: median(ratios[name]) for name in FIGURES}
    result["lowest_and_highest"] = {n: [min(r), max(r)] for n, r in ratios.items()}
    result["bit_identical"] = all(pair["bit_identical"] for pair in pairs)
    return result


def main(arguments: list[str] | None = None) -> int:
    parser = study_parser("front_door_speed", __doc__, required=False)
    parser.add_argument("--size", default="40m", help="size of the model, a key of studies.bench.byte_gpt.SIZES")
    parser.add_argument(
        "--rounds", type=int, default=15, help="timed rounds of one step and one checkpoint, after 2 rounds of warm-up"
    )
    parser.add_argument(
        "--pairs",
        type=int,
        default=4,
        help="number of pairs of processes. Each pair compares the speed of a process under tune run with the speed of "
        "a process that calls ebbtide.initialize",
    )
    parser.add_argument("--train", choices=DOORS, help=argparse.SUPPRESS)
    parser.add_argument("--overlap", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.train:
        from studies.bench.rank import become_only_rank

        become_only_rank()
        train(options.train, options.size, options.overlap, options.folder, sys.stdin, sys.stdout)
        return 0
    figures = {}
    for name, overlap in (("step_holds_the_update", False), ("update_overlaps_forward", True)):
        pairs = []
        for pair in range(options.pairs):
            order = DOORS if pair % 2 == 0 else DOORS[::-1]
            with both(options.size, overlap, order) as doors:
                pairs.append(measure(doors, options.rounds))
        figures[name] = over_pairs(pairs)
    result = {"size": options.size, "rounds": options.rounds, "pairs": options.pairs, **figures}
    publish("front_door_speed", options.json, result)
    return 0 if all(figure["bit_identical"] for figure in figures.values()) else 1


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # waiting threads must not occupy a core
    raise SystemExit(main())
