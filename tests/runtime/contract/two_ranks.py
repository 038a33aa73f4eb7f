"""Run by torchrun: stock and ebbtide on two ranks, each rank with placements of its own."""

import json
import os
import sys
from pathlib import Path

import deepspeed
import pytest
import torch

from studies.bench.bits import differences, state_of
from studies.bench.many_engines import answer_once, freeze_heap
from studies.byte_gpt import SIZES, Batches
from tests.runtime.contract.training import DEVICES, attached, start, train
from tests.runtime.stock_builds import runs_here, use_build

MIX = ["host", "device", "resident"]
DEVICE = list(DEVICES)[-1]
UNEVEN = 9_999  # elements of a subgroup: nothing here divides by two


def run(pattern=None, device=DEVICE, fail=False, **config):
    rank = torch.distributed.get_rank()
    engine = start(subgroup_size=UNEVEN, **config)
    if pattern:
        own = pattern[rank:] + pattern[:rank]
        homes = config.get("offload_param") and [["host"], ["device", "host"]][len(pattern) > 1]
        attached(engine, own, device, seed=rank, subgroup=UNEVEN, homes=homes)
    if fail and rank == 1:

        def die(op):
            raise OSError(f"planted on rank {rank} in {op.label}")

        engine.optimizer._ebbtide.executor.before_op = die
    batches = Batches(2, SIZES["tiny"].sequence, rank=rank)
    losses, norms = train(engine, 5, batches=batches)
    state = state_of(engine)
    engine.destroy()
    freeze_heap()
    return state, torch.stack(losses), norms


def compare(name, **config):
    stock = run(**config)
    found = {}
    for pattern, device in ((["host"], next(iter(DEVICES))), (MIX, DEVICE)):
        ours = run(pattern, device, **config)
        found[f"{name}: {pattern} on {device}"] = (
            not differences(ours[0], stock[0])
            and torch.equal(ours[1], stock[1])
            and ours[2] == stock[2]
        )
    return found


def main():
    deepspeed.init_distributed()
    answer_once()
    folder, rank = Path(sys.argv[1]), os.environ["RANK"]
    found = compare("default") | compare(
        "no persistent", stage3_param_persistence_threshold=0, offload_param={"device": "cpu"}
    )  # fmt: skip
    found |= compare("stage 2", stage=2) | compare("stage 1", stage=1, accumulation=2)
    if runs_here("avx2"):
        with pytest.MonkeyPatch.context() as patch:
            use_build(patch, "avx2")
            found |= compare("AVX2")
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    run(MIX, fail=True)
    (folder / f"trained{rank}.json").write_text("{}")  # not reached


main()
