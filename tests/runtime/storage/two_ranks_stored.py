"""Training on two ranks (`forked_ranks`) with optimizer state on one drive.

The runs cover a checkpoint after every step, a resume, exchange of checkpoints with stock DeepSpeed,
changed plans, an unchanged DeepSpeed config, and a failing drive on one rank.
"""

import contextlib
import errno
import json
import os

import ebbtide.runtime
import ebbtide.runtime.storage.store
import torch
from ebbtide.runtime import session_of
from ebbtide.runtime.checkpoint.errors import CheckpointError
from ebbtide.runtime.devices.lane import BackgroundError
from ebbtide.runtime.storage.errors import StorageError
from ebbtide.runtime.storage.reader import export
from ebbtide.runtime.zero.attach import switch_plan

from studies.bench.bits import differences
from studies.bench.byte_gpt import SIZES, Batches, ds_config
from tests.runtime.contract.small_model import SmallModel
from tests.runtime.contract.training import DEVICES, SUBGROUP, all_state, attached, plan_for, start, train
from tests.runtime.storage.faulty_training import Drive, fails

ACCUMULATION, STEPS, RESUMED = 3, 3, 2
PATTERNS = (["stored", "host"], ["stored"])  # by rank


def engine_on(folder=None):
    engine = start(accumulation=ACCUMULATION, clipping=0.01)
    if folder is not None:
        rank = torch.distributed.get_rank()
        attached(engine, PATTERNS[rank], list(DEVICES)[-1], seed=rank, storage_dir=str(folder / "state"))
    return engine


def steps(engine, first, count, folder=None):
    """Train some steps on this rank, and return the losses, the gradient norms and the final state."""

    def save(engine, number):
        if folder is not None and (number + 1) % ACCUMULATION == 0:
            engine.save_checkpoint(str(folder / "ck"))

    batches = Batches(2, SIZES["tiny"].sequence, rank=torch.distributed.get_rank())
    losses, norms = train(engine, count * ACCUMULATION, first * ACCUMULATION, each=save, batches=batches)
    return torch.stack(losses), norms[ACCUMULATION - 1 :: ACCUMULATION], all_state(engine)


def alike(ours, stock):
    return torch.equal(ours[0], stock[0]) and ours[1] == stock[1] and differences(ours[2], stock[2]) == ()


def trained_and_resumed(folder, expected, later):
    ours = engine_on(folder)
    found = {"trained": alike(steps(ours, 0, STEPS, folder), expected)}
    ours.destroy()
    again = engine_on(folder)
    again.load_checkpoint(str(folder / "ck"))
    store = session_of(again)._store
    found["adopted"] = [record.step for record in store.steps] == [STEPS]
    found["resumed"] = alike(steps(again, STEPS, RESUMED, folder), later)
    again.load_checkpoint(str(folder / "ck"), tag=f"global_step{STEPS + RESUMED}")
    found["gone back"] = differences(all_state(again), later[2]) == ()
    again.destroy()
    return found


def exchanged_with_stock(stock, folder, later):
    """Resume from a checkpoint of stock DeepSpeed under a plan that stores optimizer state on a drive, then export a
    checkpoint of ebbtide and load it with stock DeepSpeed. Return whether each direction has the expected results.
    """
    ours = engine_on(folder)
    ours.load_checkpoint(str(stock))
    found = {"imported": alike(steps(ours, STEPS, RESUMED, folder), later)}
    ours.checkpoint_engine.wait()
    ours.destroy()
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        export(folder / "ck", f"global_step{STEPS + RESUMED}", folder / "exported")
    torch.distributed.barrier()
    back = engine_on()
    back.load_checkpoint(str(folder / "exported"))
    found["exported"] = differences(all_state(back), later[2]) == ()
    back.destroy()
    return found


def replanned(folder, expected):
    """Change the plan so that for one training step no optimizer state is on the drive, and back again. Return
    whether the results are the expected ones.
    """
    ours, pattern = engine_on(folder), PATTERNS[torch.distributed.get_rank()]
    parts = []
    for number, placements in enumerate((pattern, ["host", "device"], pattern)):
        if number:
            there = {"storage_dir": str(folder / "state")} if "stored" in placements else {}
            switch_plan(ours, plan_for(ours, placements, **there))
        parts.append(steps(ours, number, 1))
    ours.destroy()
    losses, norms = torch.cat([p[0] for p in parts]), [n for p in parts for n in p[1]]
    return {"replanned": alike((losses, norms, parts[-1][2]), expected)}


def stored_on_one(folder, expected):
    """Save a checkpoint although only one of the two ranks stores optimizer state on the drive.

    In an earlier version the save blocked, because one rank waited for the other in a gather.
    """
    ours = start(accumulation=ACCUMULATION, clipping=0.01, stage3_param_persistence_threshold=1000)
    pattern = ["host"] if torch.distributed.get_rank() else ["stored"]
    attached(ours, pattern, list(DEVICES)[-1], storage_dir=str(folder / "state"))
    found = {"stored on one": alike(steps(ours, 0, 1, folder), expected)}
    ours.destroy()
    return found


def on_a_drive(folder, plan, expected):
    """Train under a plan with a DeepSpeed config that was written for NVMe offload. Return whether the results
    are the expected ones.
    """
    config = ds_config(2, SUBGROUP, accumulation=ACCUMULATION, clipping=0.01, learning_rate=1e-3)
    config["zero_optimization"]["offload_optimizer"] = {
        "device": "nvme",
        "nvme_path": str(folder),
        "pipeline_read": True,
        "pipeline_write": True,
        "buffer_count": 5,
    }
    config["aio"] = {"block_size": 1048576, "queue_depth": 8, "overlap_events": True}
    torch.manual_seed(0)
    model = SmallModel()
    ours, *_ = ebbtide.runtime.initialize(
        model=model,
        model_parameters=model.parameters(),
        config=config,
        device="emulated",
        plan=plan.model_copy(update={"storage_dir": None}),
    )
    same = alike(steps(ours, 0, STEPS), expected)
    rank = torch.distributed.get_rank()
    stored = folder / f"ebbtide_state/rank_{rank:05d}.extents"
    ours.destroy()
    return {"on a drive": same and stored.stat().st_size > 0}


def failing_commit(folder, later):
    """Let the commit of step 2's checkpoint fail on rank 1's drive. Return whether both ranks report the
    error, and whether a resume from step 1 has the expected results.
    """
    drive, rank = Drive(("fdatasync",), fails(errno.EIO)), torch.distributed.get_rank()
    if rank:
        vars(ebbtide.runtime.storage.store)["Files"] = lambda: drive
    ours = engine_on(folder)
    steps(ours, 0, 1, folder)
    ours.checkpoint_engine.wait()
    drive.armed = True
    told = ""
    try:
        steps(ours, 1, 1, folder)
        ours.checkpoint_engine.wait()
    except (CheckpointError, BackgroundError) as error:
        told = f"{error} {error.__cause__}"
    with contextlib.suppress(CheckpointError, BackgroundError, StorageError):
        ours.destroy()
    drive.armed = False
    again = engine_on(folder)
    again.load_checkpoint(str(folder / "ck"))
    resumed = again.global_steps == 1 and alike(steps(again, 1, STEPS - 1, folder), later)
    again.destroy()
    return {"failed": "EIO" in told and drive.fired == rank, "went on": resumed}


def plan_of(pattern):
    engine = engine_on()
    made = plan_for(engine, pattern)
    engine.destroy()
    return made


def refused(folder):
    """Return whether attaching a plan refuses the stored optimizer state of a run with another number of ranks."""
    engine = start()
    try:
        plan = plan_for(engine, ["stored"], storage_dir=str(folder))
        ebbtide.runtime.attach(engine, plan, device="emulated")
    except StorageError as error:
        return {"refused": "world_size = 1 and this run wants 2" in str(error)}
    return {"refused": False}


def main(folder):
    rank = os.environ["RANK"]
    stock = engine_on()
    first, rest = steps(stock, 0, 1), steps(stock, 1, STEPS - 1)
    expected = torch.cat([first[0], rest[0]]), first[1] + rest[1], rest[2]
    stock.save_checkpoint(str(folder / "stock"))
    later = steps(stock, STEPS, RESUMED)
    stock.destroy()
    found = trained_and_resumed(folder, expected, later)
    found |= exchanged_with_stock(folder / "stock", folder / "exchanged", later)
    found |= replanned(folder / "replanned", expected)
    found |= stored_on_one(folder / "one stores", first)
    plan = plan_of(PATTERNS[int(rank)])
    found |= on_a_drive(folder / "drive", plan, expected)
    found |= refused(folder / "one")
    found |= failing_commit(folder / "failing", rest)
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()
