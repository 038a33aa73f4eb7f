"""Checkpoint throughput and slowdown of training, over model size and checkpoint frequency.

    python -m studies.checkpointing --json checkpointing.json

The quantities are those of "DataStates-LLM" (Maurya et al., arXiv 2406.10707). Throughput is the size of a checkpoint
over the time that training waits for it. Slowdown is the increase in training time. Both are measured on small models
with real writers (`studies.checkpoint_stall`). For larger models they are simulated on a preset node with four ranks
like the paper's. In the simulation, offloaded state is written directly from host memory.
"""

import shutil
import tempfile
from pathlib import Path
from typing import Any

from ebbtide.simulator import CheckpointPlan, preset, workload_from_model
from ebbtide.simulator.analysis.checkpoint_cost import CheckpointSimulation

from studies.bench.console import publish, study_parser
from studies.checkpoint_interval.kills import paid_at
from studies.checkpoint_stall import measure as measure_writer
from studies.checkpoints.interval_run import warm_up
from studies.checkpoints.writers import Workload

PAPER = {
    "aggregate_bytes_per_s": {"DataStates-LLM": 638e9, "TorchSnapshot": 117e9, "synchronous": 54e9},
    "of": "70 B parameters on 80 A100: what training waits for",
    "checkpoints_faster": "up to 48x",
    "end_to_end_faster": "up to 2.2x",
}
WRITERS = ("none", "torch", "dcp async", "ebbtide")
INTERVALS = (10, 20, 50, 100)
SIMULATED = {
    "3 B": {"layers": 30, "hidden": 2560, "heads": 32, "vocabulary": 50304},
    "7 B": {"layers": 32, "hidden": 4096, "heads": 32, "vocabulary": 50304},
    "13 B": {"layers": 40, "hidden": 5120, "heads": 40, "vocabulary": 50304},
    "20 B": {"layers": 44, "hidden": 6144, "heads": 48, "vocabulary": 50304},
}
RANKS = 4


def main() -> None:
    parser = study_parser("checkpointing", __doc__)
    parser.add_argument(
        "--models",
        nargs="*",
        default=["4m", "40m", "110m"],
        help="sizes of the models to train, such as 4m for 4 million parameters",
    )
    parser.add_argument(
        "--steps", type=int, default=8, help="number of timed steps. A checkpoint is saved after each step"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="train a tiny model, once without checkpoints and once with ebbtide's, for tests",
    )
    args = parser.parse_args()
    models, steps = args.models, args.steps
    writers: tuple[str, ...] = WRITERS
    if args.quick:
        models, steps, writers = ["tiny"], 3, ("none", "ebbtide")
    warm_up()  # each writer process is forked from this one
    figures: dict[str, Any] = {
        "paper": PAPER,
        "measured": [row for m in models for row in measured(m, steps, writers)],
        "simulated": simulated(("3 B",) if args.quick else tuple(SIMULATED)),
    }
    figures |= largest(figures["measured"])
    publish("checkpointing", args.json, figures)


def largest(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the checkpoint throughput by kind of writer, as measured with the largest model.

    Throughput is the bytes of a checkpoint divided by the seconds that training waits for it. Failed
    measurements are left out.
    """
    names = {"ebbtide": "ebbtide", "torch": "synchronous", "dcp async": "asynchronous"}
    return {f"{names[row['writer']]}_bytes_per_s": row["bytes_per_s"] for row in rows if "failed" not in row}


def measured(model: str, steps: int, writers: tuple[str, ...]) -> list[dict[str, Any]]:
    """Measure each checkpoint writer in training of one model. Return a list with a row per writer.

    A row has the throughput, which is the bytes of a checkpoint divided by the seconds that training waits for it. A
    row also has two slowdowns of training: with a checkpoint after every step, and with one after every tenth step.
    """
    workload = Workload(model, 32, steps)
    scratch = Path(tempfile.mkdtemp(prefix="ebbtide-checkpointing-"))
    try:
        result = {name: measure_writer(name, workload, scratch / name.replace(" ", "-")) for name in writers}
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    plain = result.pop("none")
    return [_row(model, workload.checkpoint_bytes, name, one, plain) for name, one in result.items()]


def _row(model: str, size_bytes: int, name: str, found: dict[str, Any], plain: dict[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = {"model": model, "writer": name, "checkpoint_bytes": size_bytes}
    if "failed" in found or "failed" in plain:
        return {**row, "failed": found.get("failed") or plain.get("failed")}
    stall_s = found["every_1"]["stall_s"]
    row |= {"stall_s": stall_s, "bytes_per_s": size_bytes / stall_s}
    for key in ("every_1", "every_10"):
        row[f"slowdown_{key}"] = found[key]["iteration_s"] / plain[key]["iteration_s"] - 1
    return row


def simulated(names: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return the simulated cost of ebbtide's checkpoints, as a list with a row per model and checkpoint interval.

    For comparison, each row also has the cost of checkpoints that block training while they are written.
    The simulated node has four ranks.
    """
    import ebbtide.tuner

    machine, rows = preset("a100-node"), []
    for name in names:
        work = workload_from_model(SIMULATED[name], machine, {"bf16": {"enabled": True}}, data_parallel=RANKS).recut(
            100_000_000
        )
        plan = ebbtide.tuner.plan(work, machine)
        simulation = CheckpointSimulation(work, plan, machine)
        # Writing takes longer than an iteration, so state that is updated meanwhile is copied first.
        lazy = simulation.cost(CheckpointPlan(interval_steps=1, copy_budget_bytes=work.checkpoint_bytes))
        blocking_s = work.checkpoint_bytes / simulation.storage
        for interval in INTERVALS:
            cost = paid_at(interval, simulation.iteration_s, lazy)
            training_s = interval * simulation.iteration_s
            rows.append(
                {
                    "model": name,
                    "interval": interval,
                    "iteration_s": simulation.iteration_s,
                    "checkpoint_bytes": RANKS * work.checkpoint_bytes,
                    "stall_s": cost.stall_s,
                    "persist_s": cost.persist_s,
                    "blocking_stall_s": blocking_s,
                    "bytes_per_s": RANKS * work.checkpoint_bytes / cost.stall_s,
                    "blocking_bytes_per_s": RANKS * work.checkpoint_bytes / blocking_s,
                    "slowdown": cost.cost_s / training_s,
                    "blocking_slowdown": blocking_s / training_s,
                }
            )
    return rows


if __name__ == "__main__":
    main()
