"""CPU time that a training step takes of the training thread, with DeepSpeed alone and under a plan.

    python -m studies.training_thread --json training_thread.json
    python -m studies.training_thread --ranks 2 --json training_thread_2_ranks.json

On a fast GPU, forward and backward take as long as the Python code that issues their kernels. The models have the
modules and parameters of large ones (26 layers with 317 parameters, 83 layers with 1,001), but are so narrow that
Python takes nearly all of the time. Each number is the `time.thread_time` of the thread that trains, with one thread
for arithmetic. Updates end before the next forward begins. Each run is a process of its own, runs are taken in turns,
and the result is the median of the turns. No number of this study is a GPU measurement: on the device of this study the
training thread issues copies of gradients as on CUDA, but no driver takes time.

`ebbtide_over_stock` is the time under a plan that keeps all optimizer state in host memory, divided by DeepSpeed's, for
the model with the higher ratio. `mixed` is the plan of the run on an H200, and `fetched` keeps all parameters in host
memory too. `phases_over_stock` has the ratios of forward, backward and `step()`, with which the simulator predicts
(`simulator/estimates/rank.py`). `bit_identical` compares fp32 masters, moments and losses after the last step.
"""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from ebbtide.runtime.hardware.launcher import free_port, remove_shared_buffers
from rich.progress import track

from studies.bench.console import publish, study_parser
from studies.training_thread.process import VARIANTS

LIMIT_S = 900.0
PHASES = ("forward_ms", "backward_ms", "step_ms", "total_ms")


def main() -> None:
    parser = study_parser("training_thread", __doc__)
    parser.add_argument("--ranks", type=int, default=1, help="number of processes that train together (default: 1)")
    parser.add_argument("--turns", type=int, default=3, help="number of runs of each variant (default: 3)")
    parser.add_argument("--iterations", type=int, default=20, help="timed steps of a run (default: 20)")
    parser.add_argument("--layers", type=int, nargs="+", default=[26, 83], help="layers of the models")
    parser.add_argument("--variants", nargs="+", default=VARIANTS, choices=VARIANTS, help="what to measure")
    args = parser.parse_args()
    variants = [v for v in args.variants if v != "torch" or args.ranks == 1]
    by_layers = {}
    for layers in args.layers:
        turns = [(v, layers) for _ in range(args.turns) for v in variants]
        runs = [(v, _run(v, layers, args.iterations, args.ranks)) for v, _ in track(turns, f"{layers} layers")]
        by_layers[layers] = {v: [run for name, run in runs if name == v] for v in variants}
    publish("training_thread", args.json, figures(by_layers, args.ranks, args.turns))


def figures(by_layers: dict[int, dict[str, list[dict[str, Any]]]], ranks: int, turns: int) -> dict[str, Any]:
    """Return the figures of the study from the runs of each model (by its number of layers) and variant."""
    models = {str(next(iter(runs.values()))[0]["parameters"]): _model(runs) for runs in by_layers.values()}
    first = next(iter(models.values()))
    ratios = [key for key in first if key.endswith("_over_stock") and key != "phases_over_stock"]
    return {
        "device_kind": "emulated",
        "ranks": ranks,
        "turns": turns,
        "stock_ms": first["variants"].get("stock", {}).get("total_ms"),
        "ebbtide_ms": first["variants"].get("ebbtide", {}).get("total_ms"),
        **{key: max(model[key] for model in models.values()) for key in ratios},
        "bit_identical": all(model["bit_identical"] for model in models.values()),
        "by_parameters": models,
    }


def _model(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    rows = {
        variant: {key: statistics.median(run[key] for run in some) for key in (*PHASES, "gathers")}
        for variant, some in runs.items()
    }
    found: dict[str, Any] = {}
    phases: dict[str, Any] = {}
    for variant, row in rows.items():
        stage = "-zero2" if variant.endswith("-zero2") else ""
        stock = rows.get(f"stock{stage}")
        if stock is None or variant == "torch" or stock is row:
            continue
        found[f"{'zero2_ebbtide' if stage else variant}_over_stock"] = row["total_ms"] / stock["total_ms"]
        phases[variant] = {key.removesuffix("_ms"): row[key] / stock[key] for key in PHASES[:3]}
    found["phases_over_stock"] = phases
    # ZeRO-2 rounds other sums than ZeRO-3 on several ranks, so each stage is compared with itself.
    stages = [[v for v in runs if v.endswith("-zero2")], [v for v in runs if not v.endswith("-zero2") and v != "torch"]]
    digests = [{run["digest"] for v in stage for run in runs[v]} for stage in stages]
    return {**found, "bit_identical": all(len(some) <= 1 for some in digests), "variants": rows}


def _run(variant: str, layers: int, iterations: int, ranks: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as files:
        out, port = Path(folder, "run.json"), free_port()
        command = [sys.executable, "-m", "studies.training_thread.process", variant, str(layers)]
        command += ["--iterations", str(iterations), "--out", str(out)]
        logs = [Path(folder, f"{rank}.log") for rank in range(ranks)]
        processes = [
            subprocess.Popen(
                command,
                env=_environment(rank, ranks, port),
                stdout=files.enter_context(log.open("w")),
                stderr=subprocess.STDOUT,
            )
            for rank, log in enumerate(logs)
        ]
        try:
            for process in processes:
                process.wait(LIMIT_S)
        finally:
            for process in processes:
                process.kill()
            remove_shared_buffers(port)
        if not out.exists():
            output = "".join(log.read_text()[-3000:] for log in logs)
            raise RuntimeError(
                f"a training process must end with a result, but {command} did not. Its output: {output}"
            )
        return json.loads(out.read_text())


def _environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    count = str(ranks)
    own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": count, "LOCAL_SIZE": count}
    return {**os.environ, **own, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}


if __name__ == "__main__":
    main()
