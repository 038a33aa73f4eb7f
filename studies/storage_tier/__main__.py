"""Training with optimizer state on a disk: DeepSpeed's NVMe offload and ebbtide in turn.

    python -m studies.storage_tier --json storage_tier.json --folder /local/disk

Real training runs on the CPU, with a process for each variant. Both systems use O_DIRECT, so that the page cache does
not count as speed of the disk. Stock DeepSpeed runs with its defaults, and with ``pipeline_read``, ``pipeline_write``
and enough buffers. ebbtide runs with all state on the disk, with a part of it in host memory, and under the tuner's
plan for the host memory that stock DeepSpeed takes with both pipelines.

A disk's speed changes by the minute. So compared variants run more than once, in another order. Each of ebbtide's
runs is also compared with a lower bound, computed from the disk's speeds right before and after the run. The lower
bound is the longest of four times: reading alone, writing alone, both at once, and the updates alone.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ebbtide.runtime
import torch
from ebbtide.profiler.rates.storage import measure_drive
from ebbtide.simulator.machine import StorageRates
from ebbtide.simulator.plan import Plan, Way

from studies.bench.bits import digest, state_of
from studies.bench.byte_gpt import SIZES, Batches, ByteGPT, ds_config, stock_engine, train_step
from studies.bench.console import publish, study_parser
from studies.bench.host_peak import host_peak_bytes, reset_host_peak
from studies.bench.rank import become_only_rank
from studies.storage_tier import durability
from studies.storage_tier.disk_bound import disk_figures, pooled

# Fields of the row for a plan that stores all state.
DURABLE = (
    "checkpoint_every_step_slowdown_pct",
    "extra_state_bytes_per_checkpoint",
    "checkpoint_file_bytes",
    "resume_read_bytes",
    "resume_identical",
    "host_bytes_per_param",
    "host_bytes_predicted_over_measured",
)
SEQUENCE = 32  # short, so that updates take longer than forward and backward
WARMUP = 2
DISK_BYTES = 4 * 2**30  # larger than a burst, and than the cache of an emulated disk's host
PIPELINED, LIMITED = "stock NVMe, pipelined", "ebbtide, within stock's memory"
STOCK: dict[str, dict[str, Any]] = {
    "stock in memory": {"device": "cpu"},
    "stock NVMe": {"device": "nvme"},
    PIPELINED: {"device": "nvme", "pipeline_read": True, "pipeline_write": True, "buffer_count": 12},
}
PREDICTION, ALL_STORED = "prediction", "ebbtide"
# Memory that DeepSpeed uses but the plan may not: the memory of two runs in one process differs by less.
LEFT_FREE = 64 * 2**20
SHARES = {ALL_STORED: 0.0, "ebbtide, half in memory": 0.5, "ebbtide, 0.9 in memory": 0.9}


def main() -> None:
    parser = study_parser("storage_tier", __doc__)
    parser.add_argument(
        "--folder",
        type=Path,
        help="folder for optimizer state, on the disk that is measured (default: the folder of the --json file)",
    )
    parser.add_argument("--size", default="200m", choices=sorted(SIZES), help="size of the model")
    parser.add_argument("--steps", type=int, default=8, help="number of timed steps of each training run")
    parser.add_argument("--variant", help=argparse.SUPPRESS)
    parser.add_argument("--given", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.variant:
        given = json.loads(args.given.read_text())
        what = predict if args.variant == PREDICTION else run
        found = what(args.variant, args.size, args.steps, args.folder, **given)
        args.json.write_text(json.dumps(found))
        sys.stdout.flush()
        os._exit(0)  # sometimes threads of DeepSpeed's op for drives abort an orderly exit
    figures = measure(args.size, args.steps, args.folder or args.json.parent)
    publish("storage_tier", args.json, figures)


class _VariantRuns:
    """The training runs of all variants so far, each in its own process.

    Attributes:
        beside: Rates of the disk that were measured right before and after a run, by name of the variant.
    """

    def __init__(self, size: str, steps: int, folder: Path) -> None:
        self._size, self._steps, self._folder = size, steps, folder
        self.found: dict[str, list[dict[str, Any]]] = {}
        self.beside: dict[str, list[StorageRates]] = {ALL_STORED: [], LIMITED: []}

    def once(self, name: str, **given: Any) -> dict[str, Any]:
        return _in_a_process(name, self._size, self._steps, self._folder, given)

    def train(self, *names: str, **given: Any) -> None:
        for name in names:
            self.found.setdefault(name, []).append(self.once(name, **given))

    def train_beside_the_disk(self, *names: str, **given: Any) -> None:
        # The disk's rates are measured before and after each training, because they change by the minute.
        before = _drive(self._folder)
        for name in names:
            self.train(name, **given)
            after = _drive(self._folder)
            self.beside[name].append(pooled([before, after]))
            before = after


def measure(size: str, steps: int, folder: Path) -> dict[str, Any]:
    """Train each variant in its own process and its own folder on the disk, and return the results as a dict.

    A variant is a way to train. Two variants are stock DeepSpeed's NVMe offload: with default settings, and with
    ``pipeline_read`` and ``pipeline_write``. Two other variants are ebbtide under a plan: with all optimizer state on
    the disk, and with as much host memory as stock DeepSpeed takes with both pipelines.

    Returns:
        The dict has, among others:

        - the speed-up of each of these two variants of ebbtide over each of those of stock DeepSpeed (four numbers)
        - ``update_over_floor``: time of the updates divided by its lower bound
        - ``bit_identical``: True if ebbtide's trained state equals that of stock DeepSpeed with all state in memory
        - ``predicted_over_measured``: predicted iteration time divided by the measured one
        - the cost of a checkpoint after every step, the bytes that a resume reads, and ebbtide's host memory per
          parameter
    """
    runs = _VariantRuns(size, steps, folder)
    found, beside = runs.found, runs.beside
    runs.train(*STOCK)
    runs.train_beside_the_disk(ALL_STORED)
    runs.train(*(name for name in SHARES if name != ALL_STORED))
    limit = found[PIPELINED][0]["host_peak_bytes"]
    spare = max(0, limit - found[ALL_STORED][0]["host_peak_bytes"] - LEFT_FREE)
    plan = runs.once(PREDICTION, drives=_json(beside[ALL_STORED]), spare_bytes=spare)["plan"]
    runs.train_beside_the_disk(LIMITED, LIMITED, plan=plan)
    runs.train_beside_the_disk(ALL_STORED, ALL_STORED)
    runs.train(PIPELINED, "stock NVMe")
    every = _json([*beside[ALL_STORED], *beside[LIMITED]])
    predicted = runs.once(PREDICTION, drives=every, spare_bytes=spare, plan=plan)
    rows = {name: _together(some) for name, some in found.items()}
    return {
        "size": size,
        "steps_of_each": steps,
        "rounds": len(found[PIPELINED]),
        **disk_figures(beside[ALL_STORED], rows[ALL_STORED], predicted["passes_s"]),
        **_compared(rows, predicted),
        "rows": [{"name": name, **row} for name, row in rows.items()],
    }


def _json(disks: Sequence[StorageRates]) -> list[dict[str, Any]]:
    return [disk.model_dump(mode="json") for disk in disks]


def _compared(rows: Mapping[str, dict[str, Any]], predicted: Mapping[str, Any]) -> dict[str, Any]:
    # Each run of ebbtide is predicted from the read and write speeds of the disk that were measured right before and
    # after this run.
    ours, limited, expected = rows[ALL_STORED], rows[LIMITED], rows["stock in memory"]
    limit = rows[PIPELINED]["host_peak_bytes"]
    runs = len(ours["iterations_s"])

    def over_measured(told_s: Sequence[float], measured_s: Sequence[float]) -> float:
        pairs = zip(told_s, measured_s, strict=True)
        return statistics.median(told / measured for told, measured in pairs)

    return {
        "params": ours["params"],
        **_speedups("", rows, limited),
        **_speedups("all_stored_", rows, ours),
        "host_limit_bytes": limit,
        "host_peak_bytes": limited["host_peak_bytes"],
        "share_within_limit": predicted["share_in_memory"],
        "plan_within_limit": predicted["plan"],
        "within_host_limit": limited["host_peak_bytes"] <= limit,
        "predicted_s": predicted["iterations_s"][:runs],
        "predicted_over_measured": over_measured(predicted["iterations_s"][:runs], ours["iterations_s"]),
        "within_limit_predicted_over_measured": over_measured(
            predicted["within_limit_s"][runs:], limited["iterations_s"]
        ),
        "share_in_dram": list(SHARES.values()),
        **{key: ours[key] for key in DURABLE},
        "bit_identical": all(rows[name]["state"] == expected["state"] for name in (*SHARES, LIMITED)),
        "stock_nvme_identical": all(rows[n]["losses"] == expected["losses"] for n in STOCK),
    }


def _together(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    first = runs[0]
    for key in ("losses", "state"):
        if any(run[key] != first[key] for run in runs):
            raise RuntimeError(
                f"all runs of one variant (way to store optimizer state) must have the same {key}, but two runs differ"
            )
    measured = {key: _one_of([run[key] for run in runs]) for key in first}
    peak = max(run["host_peak_bytes"] for run in runs)
    return {
        **measured,
        "host_peak_bytes": peak,
        "iterations_s": [run["iteration_s"] for run in runs],
        "updates_of_runs_s": [run["update_s"] for run in runs if "update_s" in run],
    }


def _speedups(kind: str, rows: Mapping[str, dict[str, Any]], ours: dict[str, Any]) -> dict[str, float]:
    over = {"default": "stock NVMe", "pipelined": PIPELINED}
    return {
        f"{kind}speedup_over_stock_{key}": rows[name]["iteration_s"] / ours["iteration_s"] for key, name in over.items()
    }


def _one_of(values: Sequence[Any]) -> Any:
    if isinstance(values[0], bool):
        return all(values)
    return statistics.median(values) if isinstance(values[0], float) else values[0]


def _in_a_process(name: str, size: str, steps: int, folder: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=folder) as own:
        result, asked = Path(own) / "found.json", Path(own) / "given.json"
        asked.write_text(json.dumps(given))
        subprocess.run(
            [
                sys.executable,
                "-m",
                "studies.storage_tier",
                "--json",
                str(result),
                "--folder",
                own,
                "--size",
                size,
                "--steps",
                str(steps),
                "--variant",
                name,
                "--given",
                str(asked),
            ],
            check=True,
        )
        found: dict[str, Any] = json.loads(result.read_text())
        return found


def run(name: str, size: str, steps: int, folder: Path, plan: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Train one variant with optimizer state on the disk. Return a dict of times, losses and a hash of the final state.

    A variant is a way to train, such as stock DeepSpeed or ebbtide under a plan. The time of an iteration
    is the mean over all steps. It includes the updates of the last step.

    Args:
        plan: Plan of ebbtide. If None, the variant's name selects a plan, or stock DeepSpeed.
    """
    become_only_rank(quiet=True)
    engine = _engine(name, size, folder, plan)
    batches, losses = Batches(1, SEQUENCE), []
    losses += [train_step(engine, batches.at(step)).item() for step in range(WARMUP)]
    _settle(engine)
    reset_host_peak()
    before, begin = _moved(), time.perf_counter()
    numbers = range(WARMUP, WARMUP + steps)
    losses += [train_step(engine, batches.at(step)).item() for step in numbers]
    _settle(engine)
    seconds = (time.perf_counter() - begin) / steps
    moved = {key: (after - before[key]) / steps for key, after in _moved().items()}
    ours = _of_updates(engine) if _is_ours(name) else {}
    stored = STOCK.get(name, {}).get("device") == "nvme"
    found = {
        "iteration_s": seconds,
        "host_peak_bytes": host_peak_bytes(),
        **moved,
        **ours,
        "losses": losses,
        "params": sum(p.ds_numel for p in engine.module.parameters()),
        "state": None if stored else _digest(engine),
    }
    if not _is_ours(name):
        return found
    return {**found, **_durable(engine, name, size, steps, seconds, folder, plan)}


def _is_ours(name: str) -> bool:
    return name not in STOCK


def _durable(
    engine: Any, name: str, size: str, steps: int, plain_s: float, folder: Path, plan: Mapping[str, Any] | None
) -> dict[str, Any]:
    batches, numbers = Batches(1, SEQUENCE), itertools.count(WARMUP + steps)
    found: dict[str, Any] = {**durability.host_bytes(engine)}
    found |= durability.saved_each_step(
        engine, lambda e: train_step(e, batches.at(next(numbers))), steps, plain_s, folder
    )
    expected = _digest(engine)
    engine.destroy()
    again = _engine(name, size, folder, plan)
    found["resume_read_bytes"] = durability.resumed(again, folder, lambda: _moved()["read_bytes"])
    found["resume_identical"] = _digest(again) == expected
    again.destroy()
    return found


def predict(
    _: str,
    size: str,
    steps: int,
    folder: Path,
    drives: Sequence[Any],
    spare_bytes: float,
    plan: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Simulate training iterations under two plans, once for each measurement of the disk's rates.

    The first plan has all optimizer state on the disk. The second plan is the argument ``plan``. If that is None, the
    tuner makes the second plan, which may then use ``spare_bytes`` more host memory than the first plan. This function
    trains under neither plan. It trains stock DeepSpeed for a few steps, to profile the model.

    Returns:
        A dict with the simulated iteration times under both plans, and with the second plan (`durability.predicted`).
    """
    del steps
    become_only_rank(quiet=True)
    engine = _engine("stock in memory", size, folder)
    batches, stored = Batches(1, SEQUENCE), _plan(engine, 0.0, folder)
    train = lambda e, number: train_step(e, batches.at(number)).item()
    rates = [StorageRates.model_validate(drive) for drive in drives]
    made = None if plan is None else Plan.model_validate(plan)
    return durability.predicted(engine, train, stored, folder, rates, spare_bytes, made)


def _drive(folder: Path) -> StorageRates:
    return measure_drive(folder, DISK_BYTES, 20.0)


def _engine(name: str, size: str, folder: Path, plan: Mapping[str, Any] | None = None) -> Any:
    torch.manual_seed(0)
    model = ByteGPT(SIZES[size].with_sequence(SEQUENCE))
    subgroup = max(20_000, model.config.params // 12)
    offload = {**STOCK.get(name, {"device": "cpu"})}
    if offload["device"] == "nvme":
        offload["nvme_path"] = str(folder)
    config = ds_config(subgroup_size=subgroup, offload_optimizer=offload)
    engine = stock_engine(model, config)
    if plan is not None:
        ebbtide.runtime.attach(engine, Plan.model_validate({**plan, "storage_dir": str(folder)}))
    elif name in SHARES:
        ebbtide.runtime.attach(engine, _plan(engine, SHARES[name], folder))
    return engine


def _plan(engine: Any, share: float, folder: Path) -> Plan:
    from ebbtide.runtime.zero.flat_partitions import subgroups_of

    subgroup = int(engine.optimizer.sub_group_size)
    count = len(subgroups_of(engine.optimizer, subgroup))
    hosted = {int(k / share) for k in range(round(share * count))} if share else set()
    placements = ["host" if i in hosted else "stored" for i in range(count)]
    return Plan(
        subgroup_size=subgroup,
        ways=Way.each(placements),  # type: ignore[arg-type]
        staging_slots=0,
        storage_dir=str(folder),
    )


def _settle(engine: Any) -> None:
    wait = getattr(engine.optimizer, "wait", None)
    if wait is not None:
        wait()


def _moved() -> dict[str, int]:
    lines = (line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    counted = {key: int(value) for key, value in lines}
    return {key: counted[key] for key in ("read_bytes", "write_bytes")}


def _of_updates(engine: Any) -> dict[str, float]:
    # ``update_s`` is the time in which the engine reads, updates or writes optimizer state. Concurrent operations count
    # once, and reads for the next step are included.
    from ebbtide.simulator import OpKind

    kinds = (OpKind.STATE_READ, OpKind.UPDATE_HOST, OpKind.STATE_WRITE)
    spans = sorted((s for s in engine.optimizer.timeline().spans if s.kind in kinds), key=lambda s: s.start_s)
    steps = len({span.iteration for span in spans})
    busy, until = 0.0, 0.0
    for span in spans:
        busy += max(0.0, span.end_s - max(until, span.start_s))
        until = max(until, span.end_s)
    updates = sum(s.end_s - s.start_s for s in spans if s.kind is OpKind.UPDATE_HOST)
    return {"update_s": busy / steps, "updates_s": updates / steps}


def _digest(engine: Any) -> str:
    return digest(tensor for _, tensor in sorted(state_of(engine).items()))


if __name__ == "__main__":
    main()
