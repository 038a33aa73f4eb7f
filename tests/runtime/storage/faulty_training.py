"""Training with optimizer state on a faulty drive, and resumed training on a sound drive.

`test_training_faults.py` runs this module. Each training run is a separate process that writes its result to a file.

    python -m tests.runtime.storage.faulty_training FOLDER
"""

import contextlib
import errno
import itertools
import json
import os
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import xxhash
from ebbtide.runtime.checkpoint.files import Files
from ebbtide.runtime.storage.folder import EXTENTS, STORE, file_of, read_page
from ebbtide.runtime.storage.folder import STEPS as STEPS_PAGE
from ebbtide.runtime.storage.layout import Layout
from ebbtide.runtime.storage.pages import StepsPage, StorePage

from studies.bench.forked import Child
from studies.bench.many_engines import answer_once
from studies.checkpoints.run import warm_up

STEPS, RESUMED_STEPS, FAULT_AT, LIMIT_S = 4, 2, 2, 60
STALL_S = 0.8  # duration of a drive's stall. The log reports it after a quarter of this time


class Drive(Files):
    """File operations of a simulated drive. Some calls of these operations have a fault after the test has set
    ``armed``.

    From then on, calls of the operations in ``names`` are counted from 0. Call number ``nth`` has the fault, and then
    each ``every``-th call after it. For such a call, the function ``act`` is called instead of the operation.
    """

    def __init__(self, names=(), act=None, nth=0, *, every=10**9):
        self.names, self.act, self.nth, self.every = names, act, nth, every
        self.armed, self.fired, self.count = False, 0, itertools.count()

    def call(self, name, function, *args):
        if not self.armed or name not in self.names or not _is_block(name, args):
            return function(*args)
        number = next(self.count) - self.nth
        if number < 0 or number % self.every:
            return function(*args)
        self.fired += 1
        return self.act(function, *args)


def _is_block(name, args):
    # Reads and writes of less than 4096 bytes never have the fault, because they do not belong to optimizer state.
    sizes = {"pwrite": lambda: len(args[1]), "preadv": lambda: len(args[1][0])}
    return name not in sizes or sizes[name]() >= 4096


def fails(error):
    def act(*_):
        raise OSError(error, os.strerror(error))

    return act


def stalls(function, *args):
    time.sleep(STALL_S)
    return function(*args)


def hangs(*_):
    threading.Event().wait()


def cut_short(function, descriptor, data, offset):
    if isinstance(data, list):
        return function(descriptor, [data[0][: len(data[0]) // 8]], offset)
    return function(descriptor, data[: len(data) // 8], offset)


def torn(function, descriptor, data, offset):
    """Write only half of a block to the drive, but report that the whole block was written."""
    function(descriptor, data[: len(data) // 2], offset)
    return len(data)


def flipped(function, descriptor, data, offset):
    count = function(descriptor, data, offset)
    data[0][100] ^= 4
    return count


@dataclass
class Case:
    """A case of the tests: several training runs one after the other, with a drive that is faulty in one of the runs.

    Attributes:
        at: Time from which the drive is faulty. A number of 0 or more: in the first run, before the training step with
            this number. -1: in the first run, before the engine is made. None: in the second run, before this run loads
            a checkpoint.
    """

    drive: Drive = field(default_factory=Drive)
    at: int | None = FAULT_AT
    verify_reads: bool = False
    flip_tensor: int | None = None  # flipped on the drive, between two runs
    deadline_s: float = 30.0  # training looks for a stall after each quarter of this time, and at least every second


def cases():
    write, read = ("pwrite",), ("preadv",)
    return {
        "full at begin": Case(Drive(("allocate",), fails(errno.ENOSPC)), at=-1),
        "full": Case(Drive(write, fails(errno.ENOSPC), 4, every=1)),
        "read": Case(Drive(read, fails(errno.EIO), 4)),
        "sync": Case(Drive(("fdatasync",), fails(errno.EIO))),
        "commit": Case(Drive(("rename",), fails(errno.EIO))),
        "short": Case(Drive((*write, *read), cut_short, every=1)),
        "stalls": Case(Drive((*write, *read), stalls, 4, every=9), deadline_s=2.0),
        "stall of a sync": Case(Drive(("fdatasync",), stalls), deadline_s=2.0),
        "hang": Case(Drive(write, hangs, 4), deadline_s=2.0),
        "torn, all reads checked": Case(Drive(write, torn, 4), verify_reads=True),
        "flipped, all reads checked": Case(Drive(read, flipped, 7), verify_reads=True),
        "torn at the end": Case(Drive(write, torn, 4), at=STEPS - 1),
        "flipped master": Case(flip_tensor=0),
        "read at resume": Case(Drive(read, fails(errno.EIO), 4), at=None),
    }


def engine_on(place, drive, case):
    """Return an engine under a plan that stores all optimizer state on a drive."""
    import ebbtide.runtime.storage.reader
    import ebbtide.runtime.storage.store
    import ebbtide.runtime.storage.waiting
    from ebbtide.simulator import CheckpointPlan

    from tests.runtime.contract.training import DEVICES, attached, start

    for module in (ebbtide.runtime.storage.store, ebbtide.runtime.storage.reader):
        vars(module)["Files"] = lambda: drive  # so that this whole process uses the faulty drive
    ebbtide.runtime.storage.waiting.TOLD_AFTER_S = STALL_S / 4
    checkpoint = CheckpointPlan(keep=2, deadline_s=case.deadline_s, verify_reads=case.verify_reads)
    return attached(
        start(), ["stored"], list(DEVICES)[-1], seed=None, storage_dir=str(place / "state"), checkpoint=checkpoint
    )


def digest(engine):
    from tests.runtime.contract.training import all_state

    found = xxhash.xxh3_128()
    for _, tensor in sorted(all_state(engine).items()):
        found.update(tensor.float().numpy().tobytes())
    return found.hexdigest()


def steps(engine, first, told, last=STEPS, drive=None, at=None, save_in=None):
    from studies.bench.byte_gpt import SIZES, Batches, train_step

    batches = Batches(2, SIZES["tiny"].sequence)
    for number in range(first, last):
        if number == at:
            engine.optimizer.wait()  # so that the earlier steps are written without a fault
            drive.armed = True
        loss = train_step(engine, batches.at(number, engine.device))
        told["losses"][str(number)] = loss.item().hex()
        if save_in is not None:
            engine.save_checkpoint(save_in)
            if engine.checkpoint_engine.last is not None:
                told["committed"] = engine.checkpoint_engine.last.step
    if save_in is not None:
        told["committed"] = engine.checkpoint_engine.wait().step
    told["state"] = digest(engine)


def stock(path):
    """Train with stock DeepSpeed, and write the loss of each step and two hashes of the training state to a file.

    One hash is of the state after `STEPS` steps, at which the test's first run under a plan ends. The other is
    of the state after `RESUMED_STEPS` more steps, at which a resumed run ends. If a run under a plan does not
    fail, its final state must have the same hash as stock DeepSpeed's.
    """
    from tests.runtime.contract.training import start

    engine, told, states = start(), {"losses": {}}, {}
    for first, last in ((0, STEPS), (STEPS, STEPS + RESUMED_STEPS)):
        steps(engine, first, told, last)
        states[str(last)] = told["state"]
    path.write_text(json.dumps({**told, "states": states}))


def run(place, case, path, *, resume, tag=None, faulty=True):
    """Train once with optimizer state on a drive, and write the losses, the error and the committed step to
    ``path``, however the run ends.
    """
    drive = case.drive if faulty else Drive()
    told = {"losses": {}, "error": "", "from": 0, "committed": 0}
    engine = None
    try:
        drive.armed = faulty and case.at == -1
        engine = engine_on(place, drive, case)
        drive.armed |= faulty and resume
        if resume:
            engine.load_checkpoint(place / "ck", tag=tag)
            told["from"] = engine.global_steps
        last = STEPS + RESUMED_STEPS * resume
        steps(engine, told["from"], told, last, drive, case.at, place / "ck")
    except Exception as error:  # the test checks the error
        told["error"] = f"{type(error).__name__}: {error}; {error.__cause__}"
    told["fired"] = drive.fired
    path.write_text(json.dumps(told))
    if engine is not None:
        with contextlib.suppress(Exception):
            engine.destroy()  # raises the same error again


def _newest(place):
    return read_page(file_of(place / "state", 0, STEPS_PAGE), StepsPage, Files()).steps[0]


def flip(place, case):
    """Flip one bit of the newest step's optimizer state in its file on the drive."""
    folder, newest = place / "state", _newest(place)
    store = read_page(file_of(folder, 0, STORE), StorePage, Files())
    layout = Layout(dict(store.sizes), store.weights, store.block_bytes, store.extents)
    held = next(one for one in newest.extents if one.subgroup == 1)
    block = next(b for b in layout.blocks(1) if b.tensor == case.flip_tensor)
    path = file_of(folder, 0, EXTENTS)
    content = bytearray(path.read_bytes())
    content[layout.start(0, 1, held.extent) + block.offset + 1000] ^= 4
    path.write_bytes(content)


def lives(name, case, place):
    """Train on a faulty drive, then resume from the newest checkpoint, or from the one before if the first
    resume fails.

    Each run is a process of its own.

    Returns:
        The results of all runs in order.
    """
    place.mkdir()
    found = []

    def live(**how):
        path, log = place / f"told{len(found)}", place / f"log{len(found)}"
        child = Child(lambda: run(place, case, path, **how), log)
        status, told = child.ended(LIMIT_S), {}
        if path.exists():
            told = json.loads(path.read_text())
        found.append({"status": status, "log": log.read_text()[-20_000:], **told})
        return found[-1]

    first = live(resume=False, faulty=case.at is not None)
    if case.flip_tensor is not None:
        flip(place, case)
    if case.at is None:
        live(resume=True)
    if live(resume=first.get("committed", 0) > 0, faulty=False).get("error"):
        live(resume=True, tag=f"global_step{_newest(place).step - 1}", faulty=False)
    return found


def main():
    folder = Path(sys.argv[1])
    warm_up()
    answer_once()
    import tests.runtime.contract.training  # noqa: F401 - once, for all that are forked

    child = Child(lambda: stock(folder / "stock.json"), folder / "stock.log")
    child.wait()
    found = {"stock": json.loads((folder / "stock.json").read_text())}
    wanted = sys.argv[2:]
    for number, (name, case) in enumerate(cases().items()):
        if not wanted or name in wanted:
            found[name] = lives(name, case, folder / str(number))
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
