"""Kills training with SIGKILL and checks that no checkpoint is lost, torn, or resumes differently.

Each trial: a real training run (one or two ranks) that saves after every step is killed, at a named
point of the commit protocol or at a random moment; then what is on disk is verified, the run
resumes from it, and every later step is compared, bit by bit, with the uninterrupted run. A third
of the runs are DeepSpeed's own updates, the others train under a plan with parameters in host
memory, or some of them there: killed with one of these homes, resumed with another; with updates
that begin before the norm; or with a part of the state on storage, whose steps are committed there.

    python -m studies.checkpoint_crash --kills 200 --json studies/results/checkpoint/crash.json
"""

from __future__ import annotations

import functools
import os
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from runtime.checkpoint.deepspeed.restore import newest_valid
from runtime.checkpoint.files import POINTS, RARE_POINTS, STORED_POINTS
from runtime.checkpoint.protocol.inspect import list_checkpoints, verify
from runtime.hardware.launcher import free_port, remove_shared_buffers
from runtime.storage.folder import POINTS as STEP_POINTS
from runtime.storage.reader import stored_problems
from studies.bench.console import kill_parser
from studies.bench.rank import become_only_rank
from studies.bench.record import write_record
from studies.checkpoints.run import (
    GUESSED,
    STEPS,
    STORED,
    Kill,
    Run,
    as_dict,
    reap,
    recorded,
    release_shared_memory,
    start,
    warm_up,
)

RANK_0_ONLY = {
    *POINTS[POINTS.index("votes_seen") : POINTS.index("committed")],
    "trash_renamed", "trash_deleted", *RARE_POINTS[1:],
}  # fmt: skip
RUN_LIMIT_S = 120.0
GRACE_S = 0.3  # what a launcher leaves the other ranks before it kills them too
ATTEMPTS = 4

Reference = dict[tuple[int, int], tuple[str, str]]  # (rank, step) -> state hash, random numbers


@dataclass
class Trial:
    """What one kill did."""

    kill: Kill
    world_size: int
    homes: str = ""
    fired: bool = False
    committed_step: int = -1
    resumed_step: int = -1
    storing: bool = False  # every rank has state on storage
    lost: list[str] = field(default_factory=list)
    torn: list[str] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)

    @property
    def sound(self) -> bool:
        return self.fired and not (self.lost or self.torn or self.differing)


RESUMED_WITH = {  # parameter homes
    "": "", "host": "mixed", "mixed": "host", STORED: STORED, GUESSED: GUESSED,
}  # fmt: skip
# In turn, a kill of one rank and one of two each; those on storage have more points. Of an even
# number every other one would never meet a random moment, which comes at each fourth kill.
TRAINED = (*RESUMED_WITH, STORED, STORED)


def kills(seed: int, trained: Sequence[str] = TRAINED) -> Iterator[tuple[Kill, int, str]]:
    """Kill, world size and parameter homes (`Run.homes`), without end: every named point in turn,
    random moments in between.
    """
    rng, number = random.Random(seed), 0
    while True:
        world_size, homes = 1 + number % 2, trained[number // 2 % len(trained)]
        stored = (*STORED_POINTS, *STEP_POINTS) if homes == STORED else ()
        points = [*stored, *POINTS, *RARE_POINTS]
        if number % 4 == 3:
            yield Kill(delay_s=rng.random(), rank=rng.randrange(world_size)), world_size, homes
        else:
            point = points[(number - number // 4) % len(points)]
            rank = 0 if point in RANK_0_ONLY else rng.randrange(world_size)
            aside = point == "tag_set_aside"
            yield Kill(
                point, _occurrence(point, rng), rank=rank, exchange=not aside,
                one_tag=aside or (not point.startswith("trash") and rng.random() < 0.3),
            ), world_size, homes  # fmt: skip
        number += 1


def _occurrence(point: str, rng: random.Random) -> int:
    """Which save is hit; retention deletes from the third on, copies come per block."""
    if point.startswith("trash") or point == "tag_set_aside":
        return rng.randint(1, 4)
    return rng.randint(1, 12 if point == "copied_on_update" else 6)


def reference(world_size: int, planned: bool, scratch: Path) -> tuple[Reference, float]:
    """The uninterrupted run, twice: it must agree with itself, and where parameters live may change
    no bit. And its length in seconds.
    """
    runs: list[Reference] = []
    for attempt, homes in enumerate(("device", "host") if planned else ("", "")):
        folder = scratch / f"reference{world_size}{planned}_{attempt}/ck"
        run = Run(folder, world_size, 0, free_port(), homes=homes)
        begin = time.monotonic()
        _require_success(run, reap(start(run), RUN_LIMIT_S))
        release_shared_memory(run)
        length_s = time.monotonic() - begin
        runs.append(
            {(r, step): (h, c) for r in range(world_size) for step, h, c in recorded(run, r)}
        )
    if runs[0] != runs[1] or len(runs[0]) != world_size * STEPS:
        raise RuntimeError("two uninterrupted runs must be bit-identical, but they differ")
    return runs[0], length_s


def _require_success(run: Run, statuses: list[int]) -> None:
    if any(statuses):
        logs = "\n".join(run.note("log", r).read_text()[-2000:] for r in range(run.world_size))
        raise RuntimeError(f"a run that nobody killed ended with {statuses}:\n{logs}")


def one_trial(
    kill: Kill, world_size: int, homes: str, truth: Reference, length_s: float, folder: Path
) -> Trial:
    """Kill, verify, resume, compare."""
    trial = Trial(kill, world_size, homes)
    killed = Run(folder / "ck", world_size, 0, free_port(), kill, homes=homes)
    trial.fired = _run_and_kill(killed, length_s)
    release_shared_memory(killed)
    trial.committed_step = max(_number(killed.note("committed", r)) for r in range(world_size))
    _check_disk(trial, killed.folder)
    resumed = Run(
        killed.folder, world_size, 1, free_port(),
        Kill(rank=-1, one_tag=kill.one_tag, exchange=kill.exchange), homes=RESUMED_WITH[homes],
    )  # fmt: skip
    statuses = reap(start(resumed), RUN_LIMIT_S)
    trial.storing = len(list(resumed.stored_in.glob("*.extents"))) == world_size
    release_shared_memory(resumed)
    for rank in range(world_size):
        if statuses[rank]:
            trial.differing.append(f"rank {rank} did not resume: {_tail(resumed, rank)}")
        _compare(trial, resumed, rank, truth)
    _check_disk(trial, killed.folder)
    for run in (killed, resumed):
        remove_shared_buffers(run.port)
    return trial


def _run_and_kill(run: Run, length_s: float) -> bool:
    """Whether the victim died of our SIGKILL, where it was meant to."""
    pids = start(run)
    victim = pids[run.kill.rank]
    if not run.kill.point:
        _wait_for(run.note("ready", run.kill.rank), victim)
        time.sleep(run.kill.delay_s * 0.6 * length_s)
        os.kill(victim, signal.SIGKILL)
    statuses = _reap_after_kill(pids, run.kill.rank)
    died = os.WIFSIGNALED(statuses[run.kill.rank])
    reached = run.note("reached", run.kill.rank)
    return died and (not run.kill.point or reached.read_text() == run.kill.point)


def _wait_for(note: Path, pid: int) -> None:
    end = time.monotonic() + RUN_LIMIT_S
    while not note.exists() and time.monotonic() < end and Path(f"/proc/{pid}/exe").exists():
        time.sleep(0.002)


def _reap_after_kill(pids: list[int], victim: int) -> list[int]:
    first = reap([pids[victim]], RUN_LIMIT_S)
    others = [pid for number, pid in enumerate(pids) if number != victim]
    rest = reap(others, GRACE_S if os.WIFSIGNALED(first[0]) else RUN_LIMIT_S)
    rest.insert(victim, first[0])
    return rest


def _number(note: Path) -> int:
    text = note.read_text() if note.exists() else ""
    return int(text) if text else -1


def _check_disk(trial: Trial, folder: Path) -> None:
    """What has the name of a checkpoint is whole; nothing that was reported committed is gone."""
    for entry in list_checkpoints(folder):
        if entry.status != "committed" or verify(folder, entry.tag):
            trial.torn.append(f"{entry.tag}: {entry.status} {verify(folder, entry.tag)[:1]}")
        trial.torn.extend(f"{entry.tag}: {p}" for p in stored_problems(folder / entry.tag))
    unsealed = {p.name for p in folder.glob("*") if p.is_dir() and not p.name.startswith(".")}
    unsealed -= {entry.tag for entry in list_checkpoints(folder)}
    trial.torn.extend(f"{tag}: visible without a manifest" for tag in sorted(unsealed))
    choice = newest_valid(folder)
    newest = -1 if choice.step is None else choice.step
    if newest < trial.committed_step:
        trial.lost.append(f"step {trial.committed_step} was committed, but {newest} is the newest")
    latest = folder / "latest"
    if latest.exists() and not (folder / latest.read_text()).is_dir():
        trial.lost.append(f"latest names {latest.read_text()!r}, which is not there")


def _compare(trial: Trial, run: Run, rank: int, truth: Reference) -> None:
    steps = {step: (digest, chain) for step, digest, chain in recorded(run, rank)}
    if steps:
        trial.resumed_step = min(steps) - 1
    if steps and (max(steps) != STEPS or trial.resumed_step < trial.committed_step):
        trial.differing.append(f"rank {rank} ran steps {min(steps)} to {max(steps)}")
    trial.differing.extend(
        f"rank {rank} step {step}" for step, result in steps.items() if result != truth[rank, step]
    )


def _tail(run: Run, rank: int) -> str:
    note = run.note("log", rank)
    return note.read_text()[-600:] if note.exists() else "no log"


def campaign(
    count: int, seed: int, limit_s: float, scratch: Path, console: Console,
    trained: Sequence[str] = TRAINED,
) -> list[Trial]:  # fmt: skip
    """The trials, one after the other; none starts after ``limit_s``."""
    begin = time.monotonic()
    truth_of = functools.cache(functools.partial(reference, scratch=scratch))
    trials = []
    for number, (kill, world_size, homes) in enumerate(islice(kills(seed, trained), count)):
        if time.monotonic() - begin > limit_s:
            break
        truth, length_s = truth_of(world_size, bool(homes))
        folder = scratch / f"trial{number}"
        trial = _until_fired(kill, world_size, homes, truth, length_s, folder)
        trials.append(trial)
        if not trial.sound:
            console.print(number, as_dict(kill), trial.lost, trial.torn, trial.differing)
        elif (number + 1) % 10 == 0:
            console.print(f"{number + 1} of {count} kills")
    return trials


def _until_fired(
    kill: Kill, world_size: int, homes: str, truth: Reference, length_s: float, folder: Path
) -> Trial:
    """A random moment may come after the end, an occurrence may not come up: try an earlier one."""
    for attempt in range(ATTEMPTS):
        trial = one_trial(kill, world_size, homes, truth, length_s, folder / str(attempt))
        if trial.fired or trial.lost or trial.torn or trial.differing:
            break
        kill = Kill(
            kill.point, 1 + kill.occurrence // 2 if kill.occurrence > 1 else 1,
            kill.delay_s / 2, kill.rank, kill.one_tag, kill.exchange,
        )  # fmt: skip
    if trial.sound:
        shutil.rmtree(folder)
    return trial


def figures(trials: list[Trial], wall_s: float) -> dict[str, Any]:
    """What the record shows."""
    by_point = Counter(t.kill.point or "random moment" for t in trials if t.fired)
    return {
        "kills": len(trials),
        "fired": sum(t.fired for t in trials),
        "lost_committed": sum(bool(t.lost) for t in trials),
        "torn_visible": sum(bool(t.torn) for t in trials),
        "not_bit_identical": sum(bool(t.differing) for t in trials),
        "kills_by_point": dict(sorted(by_point.items())),
        "kills_by_homes": dict(Counter(t.homes or "no plan" for t in trials)),
        "kills_by_ranks": dict(Counter(str(t.world_size) for t in trials)),
        "kills_by_ranks_that_store": dict(Counter(str(t.world_size) for t in trials if t.storing)),
        "resumed_from_a_checkpoint": sum(t.resumed_step > 0 for t in trials),
        "steps_per_run": STEPS,
        "wall_s": round(wall_s, 1),
        "failures": [
            {**as_dict(t.kill), "homes": t.homes, "lost": t.lost, "torn": t.torn,
             "differing": t.differing}
            for t in trials if not t.sound
        ],
    }  # fmt: skip


def show(found: dict[str, Any], console: Console) -> None:
    table = Table(title="SIGKILL during checkpointing")
    names = ("kills", "fired", "lost_committed", "torn_visible", "not_bit_identical")
    for name in names:
        table.add_column(name, justify="right")
    table.add_row(*(str(found[name]) for name in names))
    console.print(table)


def main(arguments: list[str] | None = None) -> int:
    parser = kill_parser("checkpoint_crash", __doc__, 200)
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="starts no more then")
    parser.add_argument(
        "--homes", choices=tuple(RESUMED_WITH), help="of the parameters, in every run"
    )
    options = parser.parse_args(arguments)
    console = Console()
    become_only_rank()
    warm_up()
    begin = time.monotonic()
    scratch = Path(tempfile.mkdtemp(prefix="ebbtide-crash-"))
    trained = TRAINED if options.homes is None else (options.homes,)
    trials = campaign(options.kills, options.seed, options.limit_s, scratch, console, trained)
    result = figures(trials, time.monotonic() - begin)
    show(result, console)
    if options.json:
        write_record(options.json, "checkpoint_crash", result)
    if result["failures"]:
        console.print(f"what is left of the failed trials: {scratch}")
        return 1
    shutil.rmtree(scratch)
    return 0
