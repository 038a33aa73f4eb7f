"""Run by torchrun: state of two ranks on one drive, a checkpoint after every step, a resume."""

import json
import os
import sys
from pathlib import Path

import deepspeed
import torch

from studies.bench.bits import differences
from studies.bench.byte_gpt import SIZES, Batches
from studies.bench.many_engines import answer_once
from tests.runtime.contract.training import DEVICES, all_state, attached, start, train

ACCUMULATION, STEPS, RESUMED = 3, 3, 2
PATTERNS = (["stored", "host"], ["stored"])  # by rank


def engine_on(folder=None):
    engine = start(accumulation=ACCUMULATION, clipping=0.01)
    if folder is not None:
        rank = torch.distributed.get_rank()
        attached(
            engine, PATTERNS[rank], list(DEVICES)[-1], seed=rank, storage_dir=str(folder / "state")
        )
    return engine


def steps(engine, first, count, folder=None):
    """Losses, norms, state after so many steps."""

    def save(engine, number):
        if folder is not None and (number + 1) % ACCUMULATION == 0:
            engine.save_checkpoint(str(folder / "ck"))

    batches = Batches(2, SIZES["tiny"].sequence, rank=torch.distributed.get_rank())
    losses, norms = train(
        engine, count * ACCUMULATION, first * ACCUMULATION, each=save, batches=batches
    )
    return torch.stack(losses), norms[ACCUMULATION - 1 :: ACCUMULATION], all_state(engine)


def alike(ours, stock):
    return (
        torch.equal(ours[0], stock[0]) and ours[1] == stock[1]
        and differences(ours[2], stock[2]) == ()
    )  # fmt: skip


def main():
    deepspeed.init_distributed()
    answer_once()
    folder, rank = Path(sys.argv[1]), os.environ["RANK"]
    stock = engine_on()
    expected, later = steps(stock, 0, STEPS), steps(stock, STEPS, RESUMED)
    stock.destroy()
    ours = engine_on(folder)
    found = {"trained": alike(steps(ours, 0, STEPS, folder), expected)}
    ours.destroy()
    again = engine_on(folder)
    again.load_checkpoint(str(folder / "ck"))
    store = again.optimizer._ebbtide._store
    found["adopted"] = [record.step for record in store.steps] == [STEPS]
    found["resumed"] = alike(steps(again, STEPS, RESUMED, folder), later)
    again.load_checkpoint(str(folder / "ck"), tag=f"global_step{STEPS + RESUMED}")
    found["gone back"] = differences(all_state(again), later[2]) == ()
    again.destroy()
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # once in 30 runs torch's own threads abort while the interpreter ends


main()
