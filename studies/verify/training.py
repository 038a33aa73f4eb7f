"""One rank of all runs of one ZeRO stage: right ones, and one with each defect.

In one process, since most of a run as `tune verify` makes it is the start of Python.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from runtime.frontdoor.recorded import perturb, record
from runtime.verify.lines import Lines
from runtime.zero.pieces import pieces
from studies.bench.byte_gpt import SIZES, Batches, ByteGPT, ds_config, train_step
from studies.verify.held_out import ALL

RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
STEPS, ACCUMULATION, SUBGROUP = 6, 2, 20_000
TIMED = 15  # steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stage", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--overhead", action="store_true", help="measure what recording costs")
    options = parser.parse_args()
    torch.set_num_threads(max(1, torch.get_num_threads() // RANKS))
    from studies.bench.many_engines import answer_once

    answer_once()
    expected: dict[str, Any] = {}
    if options.overhead:
        expected = {"overhead_pct": overhead_pct(options.stage)}
    else:
        all_runs(options.stage, options.out, expected)
    if RANK == 0:
        (options.out / "expected.json").write_text(json.dumps(expected))
    torch.distributed.destroy_process_group()


def all_runs(stage: int, out: Path, expected: dict[str, Any]) -> None:
    """Writes a folder per run; ``expected`` gets what each defect shows first."""
    train(out / "stock", stage)
    train(out / "again", stage)
    train(out / "plan", stage, attach=True)
    train(out / "no-offload", stage, offload=False)
    for dtype in ("bf16", "fp32"):
        for kind in ("torch", "torch again", "torch flipped"):
            train(out / f"{dtype} {kind}", stage, offload=False, torchs=True, dtype=dtype,
                  flipped=kind.endswith("flipped"))  # fmt: skip
    train(out / "fp32 stock", stage, dtype="fp32")
    for defect in ALL:
        with trained(out / defect.name, stage) as engine:
            defect.arm(engine)
            expected[defect.name] = {"step": defect.step, "names": list(defect.names(engine))}


def train(folder: Path, stage: int, **options: Any) -> None:
    with trained(folder, stage, **options):
        pass


@contextmanager
def trained(
    folder: Path, stage: int, *, attach: bool = False, flipped: bool = False, **options: Any
) -> Iterator[Any]:
    """An engine to put a defect into; then it is recorded and trained."""
    engine = started(stage, **options)
    if attach:
        _attach(engine, stage)
    if flipped:
        perturb(engine)
    yield engine
    folder.mkdir(exist_ok=True)
    dtype = options.get("dtype", "bf16")
    about = {
        "side": folder.name, "ranks": RANKS, "dtype": dtype, "stage": stage,
        "key": attach, "offload": options.get("offload", True), "versions": {}, "port": None,
    }  # fmt: skip
    record(engine, lines := Lines(folder, RANK, about), STEPS, lambda: None)
    batches = Batches(2, 32, rank=RANK)
    for number in range(STEPS * ACCUMULATION):
        train_step(engine, batches.at(number, engine.device))
    lines.close()
    engine.destroy()


def started(
    stage: int, *, offload: bool = True, torchs: bool = False, dtype: str = "bf16",
    size: str = "tiny", accumulation: int = ACCUMULATION,
) -> Any:  # fmt: skip
    """DeepSpeed's engine; ``torchs``: with torch's AdamW, which rounds otherwise."""
    import deepspeed

    torch.manual_seed(0)
    model = ByteGPT(SIZES[size])
    config = ds_config(
        2, SUBGROUP if size == "tiny" else 10_000_000, learning_rate=1e-3, clipping=0.5,
        accumulation=accumulation, precision=dtype, offload=offload, stage=stage,
        stage3_param_persistence_threshold=1000,
    )  # fmt: skip
    if torchs:
        config["optimizer"]["params"]["torch_adam"] = True
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return deepspeed.initialize(model=model, model_parameters=groups, config=config)[0]


def _attach(engine: Any, stage: int) -> None:
    import runtime
    from runtime.zero.cuts import subgroups_of
    from simulator.plan import Plan

    count = len(subgroups_of(engine.optimizer, SUBGROUP))
    plan = Plan(subgroup_size=SUBGROUP, placement=Plan.runs(["host"] * count),
                overlap_forward=stage == 3)  # fmt: skip
    runtime.attach(engine, plan)


def overhead_pct(stage: int) -> float:
    """What the digests of all tensors take, over what an optimizer step does: medians in turn."""
    engine = started(stage, size="4m", accumulation=1)
    batches = Batches(2, SIZES["4m"].sequence, rank=RANK)
    steps, digests = [], []
    with tempfile.TemporaryDirectory() as scratch:
        lines = Lines(Path(scratch), RANK, {})
        for number in range(2 + TIMED):
            batch = batches.at(number, engine.device)
            begin = time.perf_counter()
            train_step(engine, batch)
            middle = time.perf_counter()
            lines.step(pieces(engine, frozen=False))
            steps.append(middle - begin)
            digests.append(time.perf_counter() - middle)
        lines.close()
    engine.destroy()
    return 100 * statistics.median(digests[2:]) / statistics.median(steps[2:])


if __name__ == "__main__":
    main()
