"""Training under a plan on two ranks with checkpoints (see `forked_ranks`). Each rank writes its results to a file."""

import json
import os
import random
from functools import partial

import deepspeed
import numpy as np
import torch
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from ebbtide.runtime.checkpoint.format.plain_data import tensors_of
from ebbtide.simulator import CheckpointPlan

from studies.bench.bits import state_of
from studies.bench.byte_gpt import SIZES, Batches
from tests.runtime.contract.training import DEVICES, attached, start, train

STEPS = 3


def train_on(engine, steps, first=0):
    rank = torch.distributed.get_rank()
    return train(engine, steps, first, batches=Batches(2, SIZES["tiny"].sequence, rank=rank))


def seed(rank):
    random.seed(rank)
    np.random.seed(rank)
    torch.manual_seed(100 + rank)


def draws():
    return [random.random(), float(np.random.rand()), torch.rand(2).tolist()]


def saved_apart(engine, folder):
    """Save each rank's checkpoint under a tag of its own. Return the names of all files, and the tensors in
    this rank's files as a dict per file.
    """
    tag = f"rank{torch.distributed.get_rank()}"
    engine.save_checkpoint(str(folder), tag=tag)
    mine = {path.name: dict(tensors_of(torch.load(path, weights_only=False))) for path in (folder / tag).glob("*.pt")}
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*")), mine


def same(one, other):
    """Return whether two tensors of a checkpoint are equal and their storages have the same size."""
    sizes = one.untyped_storage().nbytes(), other.untyped_storage().nbytes()
    return torch.equal(one, other) and sizes[0] == sizes[1]


def alike(one, other):
    return one.keys() == other.keys() and all(
        one[name].keys() == other[name].keys()
        and all(same(tensor, other[name][key]) for key, tensor in one[name].items())
        for name in one
    )


def save(stage, folder):
    rank = int(os.environ["RANK"])
    engine = attached(
        start(stage=stage),
        ["host", "device"],
        list(DEVICES)[-1],
        seed=rank,
        checkpoint=CheckpointPlan(restore_random=True),
    )
    train_on(engine, STEPS)
    seed(rank)
    engine.save_checkpoint(str(folder / "checkpoints"))
    uninterrupted = draws()
    seed(7)
    engine.load_checkpoint(str(folder / "checkpoints"))
    told = {"draws_alike": uninterrupted == draws(), "steps": engine.global_steps}
    ours, files = saved_apart(engine, folder / "apart")
    lazy, engine.checkpoint_engine = engine.checkpoint_engine, TorchCheckpointEngine()
    original = partial(deepspeed.DeepSpeedEngine.save_checkpoint, engine)
    engine.save_checkpoint, wrapped = original, engine.save_checkpoint
    stock, stock_files = saved_apart(engine, folder / "stock")
    engine.checkpoint_engine, engine.save_checkpoint = lazy, wrapped
    told |= {"apart": ours, "apart_as_stock": ours == stock and alike(files, stock_files)}
    state = state_of(engine)
    if rank == 0:
        torch.save(state, folder / "state.pt")
    engine.destroy()
    (folder / f"rank{rank}.json").write_text(json.dumps({**told, "draws": uninterrupted}))


def main(folder):
    for stage in (3, 2):
        save(stage, folder / f"stage{stage}")
    torch.distributed.destroy_process_group()
