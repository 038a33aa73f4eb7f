"""Kills training on stored state with SIGKILL and checks that no finished step is lost or torn.

Each trial: a process updates subgroups whose state lives on storage (`runtime.storage`, two
directories, the runtime's Adam kernel) and commits every step behind the next one's reads. It is
killed at a named point of the commit, inside a write of a block, or at a random moment. Then every
step that is there is read and compared, bit by bit, with a run whose state never left memory; the
run is resumed to its end and compared again. The store alone, without DeepSpeed.

    python -m studies.storage_kills --kills 100 --json studies/results/checkpoint/storage_kills.json
"""

from __future__ import annotations

import mmap
import os
import random
import signal
import struct
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from runtime.checkpoint.files import Files
from runtime.checkpoint.format.manifest import block_hash
from runtime.kernels.host import host_update
from runtime.kernels.rules import AdamRule
from runtime.storage.errors import StorageError
from runtime.storage.folder import POINTS, Drive
from runtime.storage.store import ExtentStore
from runtime.storage.view import page_aligned
from studies.bench.console import kill_parser
from studies.bench.record import write_record

STEPS = 8
ELEMENTS = (300_000, 200_001, 5)  # of the subgroups
GROUP = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
BLOCK_BYTES = 256 * 2**10
ATTEMPTS = 4
LENGTH_S = 0.4  # random moments come within this
LIMIT_S = 60.0

State = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Kill:
    """When the process gets SIGKILL.

    Attributes:
        point: of the commit, or ``write``: half of a block is written; at its ``occurrence``-th
            time; empty: after ``delay_s``.
    """

    point: str = ""
    occurrence: int = 1
    delay_s: float = 0.0


@dataclass
class Trial:
    """What one kill did; ``steps_lost``: finished, and not there afterwards."""

    kill: Kill
    fired: bool = False
    lost: list[str] = field(default_factory=list)
    torn: list[str] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)
    steps_lost: int = 0
    resumed_step: int = 0

    @property
    def sound(self) -> bool:
        return self.fired and not (self.lost or self.torn or self.differing)


class Progress:
    """Steps finished and committed, in memory that outlives a killed child."""

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


class KillingFiles(Files):
    """Ends its process at a named point, or with half of a block written."""

    def __init__(self, kill: Kill) -> None:
        self._kill, self._left = kill, kill.occurrence
        self._lock = threading.Lock()

    def _hit(self, name: str) -> bool:
        with self._lock:
            self._left -= name == self._kill.point
            return name == self._kill.point and self._left == 0

    def point(self, name: str) -> None:
        if self._hit(name):
            os.kill(os.getpid(), signal.SIGKILL)

    def call(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        if name == "pwrite" and len(args[1]) >= BLOCK_BYTES and self._hit("write"):
            os.pwrite(args[0], args[1][: BLOCK_BYTES // 2], args[2])
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args)


def first_state(subgroup: int) -> State:
    generator = torch.Generator().manual_seed(subgroup)
    master = torch.randn(ELEMENTS[subgroup], generator=generator)
    return master, torch.zeros_like(master), torch.zeros_like(master)


def update(rule: AdamRule, state: State, subgroup: int, step: int) -> None:
    """In place; the gradient follows from the step and from the parameters themselves."""
    generator = torch.Generator().manual_seed(1_000 * step + subgroup)
    gradient = torch.randn(ELEMENTS[subgroup], generator=generator) + state[0]
    host_update(state, gradient, None, rule.step(GROUP, step), 0.5)


def digest(state: State) -> str:
    return block_hash("".join(block_hash(t.numpy().tobytes()) for t in state).encode())


def truth() -> dict[int, list[str]]:
    """Hash of every subgroup's state after each step; 0: before the first."""
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
    return ExtentStore.open(drives, sizes, depth=2, block_bytes=BLOCK_BYTES, files=files)


def train(folder: Path, files: Files, progress: Progress) -> None:
    """From the newest step to the last one; each is committed while the next one begins."""
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
    for version, step in enumerate(range(done + 1, STEPS + 1), start=1):
        store.announce(version)
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
    store.commit(version, step)
    progress.note(1, step)


def run_killed(kill: Kill, folder: Path, progress: Progress) -> bool:
    """Trains in a child; False: it came to its end."""
    child = os.fork()
    if not child:
        try:
            train(folder, KillingFiles(kill), progress)
        except BaseException:  # noqa: BLE001 - a child ends here, whatever it met
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    begin = time.monotonic()
    limit_s = LIMIT_S if kill.point else kill.delay_s
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        if time.monotonic() - begin > limit_s:
            os.kill(child, signal.SIGKILL)
            limit_s = LIMIT_S
        time.sleep(0.001)
    if not os.WIFSIGNALED(status) and os.WEXITSTATUS(status):
        raise RuntimeError("the run that was to be killed failed by itself: see above")
    return os.WIFSIGNALED(status)


def inspect(trial: Trial, folder: Path, progress: Progress, expected: dict[int, list[str]]) -> None:
    """Every step that is there, against the run in memory."""
    store = opened(folder)
    try:
        steps = [record.step for record in store.steps]
        newest = max(steps, default=0)
        if newest < progress.committed:
            trial.lost.append(f"step {progress.committed} was committed, {newest} is there")
        trial.steps_lost = max(0, progress.finished - newest)
        trial.resumed_step = newest
        for step in steps:
            store.restore(step)
            for subgroup, elements in enumerate(ELEMENTS):
                state = tuple(torch.empty(elements) for _ in range(3))
                try:
                    store.read(subgroup, state)
                except StorageError as error:
                    trial.torn.append(str(error))
                    continue
                if digest(state) != expected[step][subgroup]:
                    trial.differing.append(f"subgroup {subgroup} at step {step}")
    finally:
        store.close()


def one_trial(kill: Kill, folder: Path, expected: dict[int, list[str]]) -> Trial:
    trial, progress = Trial(kill), Progress()
    trial.fired = run_killed(kill, folder, progress)
    inspect(trial, folder, progress, expected)
    if trial.sound:
        after = Trial(kill)
        run_killed(Kill("never"), folder, progress)
        inspect(after, folder, progress, expected)
        trial.lost += after.lost
        trial.torn += after.torn
        trial.differing += after.differing
        if after.resumed_step != STEPS:
            trial.lost.append(f"resumed, it came to step {after.resumed_step} of {STEPS}")
    return trial


def kill_of(number: int, rng: random.Random) -> Kill:
    """Every point in turn, random moments in between."""
    points = (*POINTS, "write")
    if number % 3 == 2:
        return Kill(delay_s=rng.random() * LENGTH_S)
    point = points[(number - number // 3) % len(points)]
    return Kill(point, rng.randint(1, 40 if point == "write" else STEPS))


def campaign(count: int, seed: int, scratch: Path, console: Console) -> list[Trial]:
    expected, rng, trials = truth(), random.Random(seed), list[Trial]()
    for number in range(count):
        kill = kill_of(number, rng)
        for attempt in range(ATTEMPTS):  # what came after the end is tried earlier
            trial = one_trial(kill, scratch / f"{number}.{attempt}", expected)
            if trial.fired or trial.lost or trial.torn or trial.differing:
                break
            kill = Kill(kill.point, (1 + kill.occurrence) // 2, kill.delay_s / 2)
        trials.append(trial)
        if not trial.sound:
            console.print(number, asdict(trial))
        Files().remove_tree(scratch / f"{number}.{attempt}")
    return trials


def figures(trials: list[Trial]) -> dict[str, Any]:
    """What the record shows."""
    by_point = Counter(t.kill.point or "random moment" for t in trials if t.fired)
    return {
        "kills": len(trials),
        "fired": sum(t.fired for t in trials),
        "lost": sum(bool(t.lost) for t in trials),
        "torn": sum(bool(t.torn) for t in trials),
        "not_bit_identical": sum(bool(t.differing) for t in trials),
        "steps_lost_max": max(t.steps_lost for t in trials),
        "kills_by_point": dict(sorted(by_point.items())),
        "resumed_from_a_step": sum(t.resumed_step > 0 for t in trials),
        "steps_per_run": STEPS,
        "failures": [asdict(t) for t in trials if not t.sound],
    }


def main(arguments: list[str] | None = None) -> int:
    parser = kill_parser("storage_kills", __doc__, 100)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # what forks may have no threads of its own
    console = Console()
    with tempfile.TemporaryDirectory(prefix="ebbtide-kills-", dir=Path.cwd()) as scratch:
        found = figures(campaign(options.kills, options.seed, Path(scratch), console))
    console.print(found)
    if options.json:
        write_record(options.json, "storage_kills", found)
    sound = found["fired"] == found["kills"] and not found["failures"]
    return 0 if sound and found["steps_lost_max"] <= 1 else 1
