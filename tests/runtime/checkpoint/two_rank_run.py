"""Run by torchrun: trains under a plan on two ranks and saves; each rank tells what it holds."""

import json
import os
import random
import sys
from pathlib import Path

import deepspeed
import numpy as np
import torch

from studies.bench.bits import state_of
from studies.byte_gpt import SIZES, Batches
from tests.runtime.contract.training import DEVICES, attached, start, train

STEPS = 3


def train_on(engine, steps, first=0):
    rank = torch.distributed.get_rank()
    return train(engine, steps, first, batches=Batches(2, SIZES["tiny"].sequence, rank=rank))


def seed(rank):
    random.seed(rank)
    np.random.seed(rank)  # noqa: NPY002 - the global generator is what a checkpoint restores
    torch.manual_seed(100 + rank)


def draws():
    return [random.random(), float(np.random.rand()), torch.rand(2).tolist()]  # noqa: NPY002


def main():
    deepspeed.init_distributed()
    rank, folder = int(os.environ["RANK"]), Path(sys.argv[1])
    engine = attached(
        start(stage=int(sys.argv[2])), ["host", "device"], list(DEVICES)[-1], seed=rank
    )
    train_on(engine, STEPS)
    seed(rank)
    engine.save_checkpoint(str(folder / "checkpoints"))
    uninterrupted = draws()
    seed(7)
    engine.load_checkpoint(str(folder / "checkpoints"))
    told = {"draws_alike": uninterrupted == draws(), "steps": engine.global_steps}
    state = state_of(engine)
    if rank == 0:
        torch.save(state, folder / "state.pt")
    engine.destroy()
    (folder / f"rank{rank}.json").write_text(json.dumps({**told, "draws": uninterrupted}))
    torch.distributed.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # once in 30 runs torch's own threads abort while the interpreter ends


main()
