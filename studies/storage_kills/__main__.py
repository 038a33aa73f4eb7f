"""A study that kills training with optimizer state on drives, and checks the state that is left on the drives.

In each trial, a process updates subgroups of optimizer state that are stored in two directories, with the storage code
(`ebbtide.runtime.storage`) and the Adam kernel of ebbtide's runtime. Each step is committed while the next step reads.
The process is killed with SIGKILL at a named point of the commit, inside the write of a block, or at a random moment.

Then every stored step is read, and compared bit by bit with a run that keeps its state in memory. No
finished step may be lost or incomplete. The killed run is resumed to its end and compared again. Only the
storage code is tested, without DeepSpeed.

    python -m studies.storage_kills --kills 100 --json studies/results/checkpoint/storage_kills.json
"""

import mmap
import os
import random
import signal
import struct
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from ebbtide.runtime.checkpoint.files import Files
from ebbtide.runtime.checkpoint.format.manifest import block_hash
from ebbtide.runtime.kernels.host import host_update
from ebbtide.runtime.kernels.rules import AdamRule
from ebbtide.runtime.storage.errors import StorageError
from ebbtide.runtime.storage.folder import Drive
from ebbtide.runtime.storage.store import ExtentStore
from ebbtide.runtime.storage.view import page_aligned
from rich.console import Console

from studies.bench import killed
from studies.bench.console import kill_parser
from studies.bench.forked import Forked
from studies.bench.killed import STEP_POINTS, Kill, campaign, concluded, counted, until_fired

STEPS = 8
ELEMENTS = (300_000, 200_001, 5)  # of the subgroups
GROUP = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
BLOCK_BYTES = 256 * 2**10
LENGTH_S = 0.4  # random moments lie within this time
LIMIT_S = 60.0

State = tuple[torch.Tensor, ...]


@dataclass
class Trial(killed.Trial):
    """The outcome of one attempt to kill training, with its optimizer state on drives, by SIGKILL.

    Attributes:
        steps_lost: Number of finished steps that are missing from the drives after the kill.
    """

    steps_lost: int = 0


class Progress:
    """The numbers of the last finished step and the last committed step of a training process.

    They are in shared memory, so that they can be read after the process was killed.
    """

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 16)

    def note(self, at: int, step: int) -> None:
        struct.pack_into("q", self._memory, 8 * at, step)

    @property
    def finished(self) -> int:
        return int(struct.unpack_from("q", self._memory, 0)[0])

    @property
    def committed(self) -> int:
        return int(struct.unpack_from("q", self._memory, 8)[0])


class KillingFiles(killed.KillingFiles):
    """File operations of the drive storage that kill their own process at a named point of the storage code.

    At the point ``write``, half of a block is written before the kill.
    """

    def call(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        if name == "pwrite" and len(args[1]) >= BLOCK_BYTES and self.hit("write"):
            os.pwrite(args[0], args[1][: BLOCK_BYTES // 2], args[2])
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args)


def first_state(subgroup: int) -> State:
    generator = torch.Generator().manual_seed(subgroup)
    master = torch.randn(ELEMENTS[subgroup], generator=generator)
    return master, torch.zeros_like(master), torch.zeros_like(master)


def update(rule: AdamRule, state: State, subgroup: int, step: int) -> None:
    """Update one subgroup's optimizer state in place, with an artificial gradient.

    The gradient is the parameters plus random numbers that depend only on the step and the subgroup, so that every run
    computes the same bits.
    """
    generator = torch.Generator().manual_seed(1_000 * step + subgroup)
    gradient = torch.randn(ELEMENTS[subgroup], generator=generator) + state[0]
    host_update(state, gradient, None, rule.step(GROUP, step), 0.5)


def digest(state: State) -> str:
    return block_hash("".join(block_hash(t.numpy().tobytes()) for t in state).encode())


def truth() -> dict[int, list[str]]:
    """Return a dict from training step to the expected hashes of the optimizer state, one hash per subgroup.

    Step 0 has the initial state. The hashes come from a run that keeps its state in memory.
    """
    rule, states = AdamRule(), [first_state(s) for s in range(len(ELEMENTS))]
    result = {0: [digest(state) for state in states]}
    for step in range(1, STEPS + 1):
        for subgroup, state in enumerate(states):
            update(rule, state, subgroup, step)
        result[step] = [digest(state) for state in states]
    return result


def opened(folder: Path, files: Files | None = None) -> ExtentStore:
    drives = [Drive(folder / "one", 2.0), Drive(folder / "other", 1.0)]
    sizes = {subgroup: (4 * elements,) * 3 for subgroup, elements in enumerate(ELEMENTS)}
    return ExtentStore(drives, sizes, depth=2, block_bytes=BLOCK_BYTES, files=files)


def train(folder: Path, files: Files, progress: Progress) -> None:
    """Train to the last step, starting after the newest step with optimizer state on the drives.

    If the drives hold no state, training starts with the first step. The state of each step is committed while the
    next step runs.
    """
    store, rule = opened(folder, files), AdamRule()
    buffers = [tuple(page_aligned(elements) for _ in range(3)) for elements in ELEMENTS]
    if store.steps:
        done = store.restore().step
        rule.resume(done, [GROUP] * len(ELEMENTS))
    else:
        done = 0
        for subgroup in range(len(ELEMENTS)):
            store.write(subgroup, first_state(subgroup), 0)
    commit = None
    for step in range(done + 1, STEPS + 1):
        store.tick()
        version = store.announce()
        for subgroup, buffer in enumerate(buffers):
            store.read(subgroup, buffer)
            update(rule, buffer, subgroup, step)
            store.write(subgroup, buffer, version)
        progress.note(0, step)
        commit = threading.Thread(target=_commit, args=(store, version, step, progress))
        commit.start()
    if commit is not None:
        commit.join()
    store.close()


def _commit(store: ExtentStore, version: int, step: int, progress: Progress) -> None:
    name = uuid.uuid4().hex
    store.prepare(version, step, name, "")
    store.settle(name, committed=True)
    progress.note(1, step)


def run_killed(kill: Kill, folder: Path, progress: Progress) -> bool:
    """Train in a child process, and kill the process. Return False if the process ended before the kill.

    Args:
        kill: Moment of the kill: the n-th arrival at a named point in the code, or some seconds after the start.
    """
    folder.mkdir(parents=True, exist_ok=True)
    child = Forked(lambda: train(folder, KillingFiles(kill), progress), folder / "log")
    status = child.ended(LIMIT_S if kill.point else kill.delay_s)
    if status > 0:
        raise RuntimeError(f"the run that was to be killed failed by itself: {child.output}")
    return status < 0


def inspect(trial: Trial, folder: Path, progress: Progress, expected: dict[int, list[str]]) -> None:
    """Compare the optimizer state of every step on the drives with the expected state, and note differences in
    ``trial``.

    Args:
        expected: Hashes of the state of each subgroup, by step, from a run that keeps its state in memory.
    """
    store = opened(folder)
    try:
        newest = max((record.step for record in store.steps), default=0)
        if newest < progress.committed:
            trial.lost.append(f"step {progress.committed} was committed, {newest} is there")
        trial.steps_lost = max(0, progress.finished - newest)
        trial.resumed_step = newest
        for record in store.steps:
            store.restore(record.name)
            for subgroup, elements in enumerate(ELEMENTS):
                state = tuple(torch.empty(elements) for _ in range(3))
                try:
                    store.read(subgroup, state)
                except StorageError as error:
                    trial.torn.append(str(error))
                    continue
                if digest(state) != expected[record.step][subgroup]:
                    trial.differing.append(f"subgroup {subgroup} at step {record.step}")
    finally:
        store.close()


def one_trial(kill: Kill, folder: Path, expected: dict[int, list[str]]) -> Trial:
    trial, progress = Trial(kill), Progress()
    trial.fired = run_killed(kill, folder, progress)
    inspect(trial, folder, progress, expected)
    if trial.sound:
        run_killed(Kill("never"), folder, progress)
        after = Trial(kill)
        inspect(after, folder, progress, expected)
        trial.lost += after.lost
        trial.torn += after.torn
        trial.differing += after.differing
        if after.resumed_step != STEPS:
            trial.lost.append(f"resumed, it came to step {after.resumed_step} of {STEPS}")
    return trial


def kill_of(number: int, rng: random.Random) -> Kill:
    """Choose the moment at which trial ``number`` of the study kills its process.

    Two of three trials kill at a named point of the code: in the commit of a step, or while a block is written.
    All named points are taken in turn. Every third trial kills at a random moment.
    """
    points = (*STEP_POINTS, "write")
    if number % 3 == 2:
        return Kill(delay_s=rng.random() * LENGTH_S)
    point = points[(number - number // 3) % len(points)]
    return Kill(point, rng.randint(1, 40 if point == "write" else STEPS))


def trials(count: int, seed: int, scratch: Path) -> Iterator[Trial]:
    rng, attempt = random.Random(seed), partial(one_trial, expected=truth())
    for number in range(count):
        yield until_fired(kill_of(number, rng), attempt, scratch / str(number))


def figures(done: list[Trial]) -> dict[str, Any]:
    return {
        **counted(done),
        "lost": sum(bool(t.lost) for t in done),
        "torn": sum(bool(t.torn) for t in done),
        "steps_lost_max": max(t.steps_lost for t in done),
        "resumed_from_a_step": sum(t.resumed_step > 0 for t in done),
        "steps_per_run": STEPS,
    }


def main(arguments: list[str] | None = None) -> int:
    options = kill_parser("storage_kills", __doc__, 100).parse_args(arguments)
    torch.set_num_threads(1)  # processes that fork must not have threads of their own
    console, scratch = Console(), Path(tempfile.mkdtemp(prefix="ebbtide-kills-", dir=Path.cwd()))
    planned = trials(options.kills, options.seed, scratch)
    found = figures(campaign(planned, options.kills, console))
    failed = concluded("storage_kills", options.json, found, scratch, console)
    return failed or int(found["steps_lost_max"] > 1)


if __name__ == "__main__":
    raise SystemExit(main())
