"""The cost of a checkpoint for training: DeepSpeed's writers, torch DCP and ebbtide on one machine.

With each writer, a separate process trains the same model under stock ZeRO-3 with offloading. The
process first saves a checkpoint after every step, then after every tenth step.

    python -m studies.checkpoint_stall --json studies/results/checkpoint/stall.json
"""

import argparse
import json
import os
import shutil
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from studies.bench.console import publish, study_parser
from studies.bench.forked import Child
from studies.checkpoints.interval_run import warm_up
from studies.checkpoints.writers import WRITERS, TimedJob, raw_write_bytes_per_s, run_writer

LIMIT_S = 900
RATES = ("checkpoint_rate", "checkpoint_rate_over_cached")  # figures of ebbtide's writers
ASYNCHRONOUS = ("fastpersist decoupled", "dcp async")


def measure(name: str, workload: TimedJob, folder: Path) -> dict[str, Any]:
    """Measure one checkpoint writer, such as ebbtide's, in a forked process. Return a dict of results, such as the time
    that training waits per checkpoint, and the bytes per second that the writer reaches.

    If the measurement fails, the dict has only the reason, under the key ``failed``. The parent process must have
    called `warm_up`, which imports DeepSpeed.
    """
    figures = folder.with_suffix(".figures.json")
    figures.parent.mkdir(parents=True, exist_ok=True)
    child = Child(lambda: _train(name, workload, folder, figures), folder.with_suffix(".log"))
    try:
        child.wait(LIMIT_S)
    except RuntimeError as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        return {"failed": lines[-1][:300]}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    result: dict[str, Any] = json.loads(figures.read_text())
    return result


def _train(name: str, workload: TimedJob, folder: Path, figures: Path) -> None:
    import torch

    # The prepared parent process uses one thread. Use the number that torch would have started with.
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0))))
    figures.write_text(json.dumps(run_writer(name, workload, folder)))


def compare(writers: dict[str, dict[str, Any]], raw_bytes_per_s: float) -> dict[str, Any]:
    """Return a dict that compares the stall and slowdown of ebbtide's checkpoints with those of other writers.

    Args:
        writers: Measurements by name of the checkpoint writer. Each writer's slowdown is written into its measurements.
        raw_bytes_per_s: Speed of plain writes to the same disk.
    """
    ran = {name: results for name, results in writers.items() if "failed" not in results}
    if "ebbtide" not in ran:
        return {}
    ours = ran["ebbtide"]["every_1"]["stall_s"]
    peers = [ran[n]["every_1"]["stall_s"] for n in ASYNCHRONOUS if n in ran]
    result = {
        "ebbtide_stall_s": ours,
        **{key: ran["ebbtide"]["in_turn"][key] for key in RATES},
        "ebbtide_write_share_of_raw": ran["ebbtide"]["write_bytes_per_s"] / raw_bytes_per_s,
    }
    if "torch" in ran:
        result["stall_below_synchronous"] = ran["torch"]["every_1"]["stall_s"] / ours
    if peers:
        result["stall_below_best_asynchronous"] = min(peers) / ours
    if "none" in ran:
        for results in ran.values():
            for key in ("every_1", "every_10"):
                results[key]["slowdown"] = results[key]["iteration_s"] / ran["none"][key]["iteration_s"] - 1
            results["extra_host_peak_bytes"] = results["host_peak_bytes"] - (ran["none"]["host_peak_bytes"])
        result["ebbtide_slowdown_every_10"] = ran["ebbtide"]["every_10"]["slowdown"]
    return result


def main(arguments: list[str] | None = None) -> int:
    parser = study_parser("checkpoint_stall", __doc__, required=False)
    parser.add_argument("--model", default="40m")
    parser.add_argument("--sequence", type=int, default=64)
    parser.add_argument(
        "--steps", type=int, default=12, help="number of timed steps. A checkpoint is saved after each step"
    )
    parser.add_argument("--writers", nargs="*", default=list(WRITERS), choices=list(WRITERS))
    parser.add_argument("--quick", action="store_true", help="train a tiny model, only to test this command")
    parser.add_argument(
        "--folder", type=Path, help="where a temporary folder for checkpoints is made (default: TMPDIR)"
    )
    options = parser.parse_args(arguments)
    if options.quick:
        options.model, options.steps = "tiny", 3
    return _study(options)


def _study(options: argparse.Namespace) -> int:
    workload = TimedJob(options.model, options.sequence, options.steps)
    scratch = Path(tempfile.mkdtemp(prefix="ebbtide-stall-", dir=options.folder))
    warm_up()
    try:
        raw = median(raw_write_bytes_per_s(scratch, workload) for _ in range(3))
        writers = {n: measure(n, workload, scratch / n.replace(" ", "-")) for n in options.writers}
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    result = {"workload": workload.__dict__, **compare(writers, raw), "raw_write_bytes_per_s": raw, "writers": writers}
    publish("checkpoint_stall", options.json, result)
    return 0 if all("failed" not in f for n, f in writers.items() if n in ("none", "ebbtide")) else 1


if __name__ == "__main__":
    raise SystemExit(main())
