"""The training runs of one rank for the test of `tune verify`, all with the same ZeRO stage.

Some runs have no defect. One further run is made for each artificial defect. All runs share one process, because a
single run takes less time than the start of Python.
"""

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
from ebbtide.runtime.frontdoor.recorded import record
from ebbtide.runtime.verify.lines import Lines
from ebbtide.runtime.zero.pieces import pieces

from studies.bench.byte_gpt import SIZES, Batches, ByteGPT, ds_config, train_step
from studies.verify.defects import DEFECTS, Defect
from studies.verify.shapes import KINDS, SUBGROUP, TINY, VerifiedTraining, shapes_of

RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
STEPS = 6
TIMED = 15  # steps whose time is measured
# A warm-up as in most scripts: the learning rate differs in every step.
SCHEDULE = {
    "type": "WarmupLR",
    "params": {"warmup_min_lr": 2e-4, "warmup_max_lr": 1.2e-3, "warmup_num_steps": 10, "warmup_type": "linear"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stage", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--overhead", action="store_true", help="measure the time that `tune verify` takes to record each step"
    )
    options = parser.parse_args()
    torch.set_num_threads(max(1, torch.get_num_threads() // RANKS))
    expected: dict[str, Any] = {}
    if options.overhead:
        expected = {"overhead_pct": overhead_pct(options.stage)}
    else:
        from studies.bench.many_engines import answer_once

        answer_once()
        right_runs(options.stage, options.out)
        for defect in DEFECTS:
            expected[defect.name] = train_with(defect, options.stage, options.out)
    if RANK == 0:
        (options.out / "expected.json").write_text(json.dumps(expected))
    torch.distributed.destroy_process_group()


def right_runs(stage: int, out: Path) -> None:
    """Train and record all runs without a defect for the test of `tune verify`, each in its own folder.

    `tune verify` must accept these runs.
    """
    train(out / "stock", stage)
    train(out / "again", stage)
    train(out / "plan", stage, attach=True)
    for shape in shapes_of(stage):
        for kind in KINDS:
            train(out / f"{shape.name}, {kind}", stage, shape=shape, attach=kind == "plan")


def train_with(defect: Defect, stage: int, out: Path) -> dict[str, Any]:
    """Train and record a run with an artificial defect, to test whether `tune verify` finds the defect."""
    with trained(out / defect.name, stage) as engine:
        defect.arm(engine)
        return {"step": defect.step, "names": list(defect.names(engine))}


def train(folder: Path, stage: int, **options: Any) -> None:
    with trained(folder, stage, **options):
        pass


@contextmanager
def trained(folder: Path, stage: int, *, attach: bool = False, shape: VerifiedTraining = TINY) -> Iterator[Any]:
    """Yield an engine into which the caller can put a defect. Then train the engine and record the run.

    `tune verify` judges the recorded run later.
    """
    engine = started(shape.stage or stage, shape=shape)
    if attach:
        _attach(engine)
    yield engine
    folder.mkdir(exist_ok=True)
    about = {
        "side": folder.name,
        "ranks": RANKS,
        "dtype": shape.dtype,
        "stage": shape.stage or stage,
        "key": attach,
        "offload": True,
        "versions": {},
        "port": None,
    }
    record(engine, lines := Lines(folder, RANK, about), STEPS, lambda: None)
    batches = Batches(2, shape.model.sequence, rank=RANK)
    for number in range(STEPS * shape.accumulation):
        if shape.resumed and number == shape.resumed * shape.accumulation:
            engine.save_checkpoint(str(folder / "checkpoint"))
            engine.load_checkpoint(str(folder / "checkpoint"))
        train_step(engine, batches.at(number, engine.device))
    lines.close()
    engine.destroy()


def started(stage: int, *, shape: VerifiedTraining = TINY) -> Any:
    import deepspeed

    torch.manual_seed(0)
    model = _model(shape)
    config = ds_config(
        2,
        shape.subgroup,
        learning_rate=1e-3,
        clipping=shape.clipping,
        accumulation=shape.accumulation,
        precision=shape.dtype,
        stage=stage,
        stage3_param_persistence_threshold=1000,
    )
    config["scheduler"] = SCHEDULE
    if shape.dtype == "fp16":
        from deepspeed.accelerator import get_accelerator

        get_accelerator().is_fp16_supported = lambda: True  # DeepSpeed refuses fp16 on CPUs, although torch supports it
        config["fp16"] |= {"initial_scale_power": shape.initial_scale, "hysteresis": 1}
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1]},
        {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0},
    ]
    return deepspeed.initialize(model=model, model_parameters=groups, config=config)[0]


def _model(shape: VerifiedTraining) -> ByteGPT:
    model = ByteGPT(shape.model)
    if shape.tied:
        model.head.weight = model.bytes_in.weight
    if shape.frozen:
        model.bytes_in.requires_grad_(requires_grad=False)
        model.positions.requires_grad_(requires_grad=False)
    return model


def _attach(engine: Any) -> None:
    import ebbtide.runtime
    from ebbtide.runtime.zero.flat_partitions import subgroups_of
    from ebbtide.simulator.plan import Plan, Way

    count = len(subgroups_of(engine.optimizer, SUBGROUP))
    plan = Plan(subgroup_size=SUBGROUP, ways=Way.each(["host"] * count), overlap_forward=True)
    ebbtide.runtime.attach(engine, plan)


def overhead_pct(stage: int) -> float:
    """Return the time in which `tune verify` hashes an engine's tensors after a training step, in percent of the step's
    time.

    Both times are medians over several steps.
    """
    engine = started(stage, shape=VerifiedTraining(model=SIZES["4m"], accumulation=1, subgroup=10_000_000))
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
