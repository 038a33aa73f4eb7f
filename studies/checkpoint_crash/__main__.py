"""A study that kills training with SIGKILL and checks the checkpoints that are left on disk.

No committed checkpoint may be lost or incomplete, and resumed training must give the same bits.

Each trial is a real training run on one or two ranks that saves a checkpoint after every step. The run is killed at a
named point of the code that commits a checkpoint, or at a random moment. Then the study verifies the files on disk,
resumes the run from them, and compares every later step, bit by bit, with an uninterrupted run.

Some runs train with DeepSpeed's own optimizer. All others train under a plan of ebbtide: with
all or some parameters in host memory, with early updates (before the gradient norm is known), or
with a part of the optimizer state on storage, where each step is committed too. A run that was
killed with all parameters in host memory is resumed with some of them there, and vice versa.

    python -m studies.checkpoint_crash --kills 200 --json studies/results/checkpoint/crash.json
"""

import functools
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from ebbtide.runtime.checkpoint.deepspeed.loading import newest_whole
from ebbtide.runtime.checkpoint.protocol.inspect import list_checkpoints, verify
from ebbtide.runtime.hardware.launcher import free_port, remove_shared_buffers
from ebbtide.runtime.storage.reader import stored_problems
from rich.console import Console

from studies.bench import killed
from studies.bench.console import kill_parser
from studies.bench.killed import (
    POINTS,
    RARE_POINTS,
    STEP_POINTS,
    STORED_POINTS,
    campaign,
    concluded,
    counted,
    until_fired,
)
from studies.bench.many_engines import answer_once
from studies.bench.rank import become_only_rank
from studies.checkpoints.run import GUESSED, STEPS, STORED, KilledRun, RankKill, reap, recorded, start, warm_up

RANK_0_ONLY = {
    *POINTS[POINTS.index("votes_seen") : POINTS.index("committed")],
    "trash_renamed",
    "trash_deleted",
    *RARE_POINTS[1:],
}
RUN_LIMIT_S = 120.0
GRACE_S = 0.3  # time that a launcher gives the other ranks before it kills them too

Reference = dict[tuple[int, int], tuple[str, str]]  # (rank, step) -> state hash, random numbers


@dataclass
class CrashTrial(killed.KillTrial):
    """The outcome of one SIGKILL of a training run that saves checkpoints.

    Attributes:
        homes: Where the run keeps its 16-bit parameters, as a key of `RESUMED_WITH`.
        storing: True if every rank keeps some optimizer state on storage.
    """

    kill: RankKill
    world_size: int = 1
    homes: str = ""
    committed_step: int = -1
    storing: bool = False


RESUMED_WITH = {  # parameter locations of the runs
    "": "",
    "host": "mixed",
    "mixed": "host",
    STORED: STORED,
    GUESSED: GUESSED,
}
# Runs alternate between killing one rank and killing two. Runs with state on drives appear twice, because they have
# more points. The number of entries is odd, because with an even number, every other run would never get the random
# moment that each fourth kill has.
TRAINED = (*RESUMED_WITH, STORED, STORED)


def kills(seed: int, trained: Sequence[str] = TRAINED) -> Iterator[tuple[RankKill, int, str]]:
    """Yield endlessly, for each trial, the kill, the number of ranks and the parameter location.

    A parameter location is a key of `RESUMED_WITH`. Every fourth kill comes at a random moment. The other kills come at
    the named points of the code that commits a checkpoint, and take these points in turn.
    """
    rng, number = random.Random(seed), 0
    while True:
        world_size, homes = 1 + number % 2, trained[number // 2 % len(trained)]
        stored = (*STORED_POINTS, *STEP_POINTS) if homes == STORED else ()
        points = [*stored, *POINTS, *RARE_POINTS]
        if number % 4 == 3:
            yield RankKill(delay_s=rng.random(), rank=rng.randrange(world_size)), world_size, homes
        else:
            point = points[(number - number // 4) % len(points)]
            rank = 0 if point in RANK_0_ONLY else rng.randrange(world_size)
            aside = point == "tag_set_aside"
            yield (
                RankKill(
                    point,
                    _occurrence(point, rng),
                    rank=rank,
                    exchange=not aside,
                    one_tag=aside or (not point.startswith("trash") and rng.random() < 0.3),
                ),
                world_size,
                homes,
            )
        number += 1


def _occurrence(point: str, rng: random.Random) -> int:
    # The study kills training when it reaches a given point of the checkpoint code for the n-th time. For points that
    # delete old checkpoints, n is small, because deletion begins with the third save. For the point that copies a
    # block, n may be large, because each save passes this point many times.
    if point.startswith("trash") or point == "tag_set_aside":
        return rng.randint(1, 4)
    return rng.randint(1, 12 if point == "copied_on_update" else 6)


def reference(world_size: int, planned: bool, scratch: Path) -> tuple[Reference, float]:
    """Return the hashes of an uninterrupted run's training state, by rank and step, and the run's time in seconds.

    The run is made twice, and RuntimeError is raised if the hashes of both runs are not the same. If ``planned`` is
    True, the first run keeps the 16-bit parameters in GPU memory, and the second run keeps them in host memory. The
    training states of both must still be bit-identical.
    """
    runs: list[Reference] = []
    for attempt, homes in enumerate(("device", "host") if planned else ("", "")):
        folder = scratch / f"reference{world_size}{planned}_{attempt}/ck"
        run = KilledRun(folder, world_size, 0, free_port(), homes=homes)
        begin = time.monotonic()
        _require_success(run)
        remove_shared_buffers(run.port)
        length_s = time.monotonic() - begin
        runs.append({(r, step): (h, c) for r in range(world_size) for step, h, c in recorded(run, r)})
    if runs[0] != runs[1] or len(runs[0]) != world_size * STEPS:
        raise RuntimeError("two uninterrupted runs must be bit-identical, but they differ")
    return runs[0], length_s


def _require_success(run: KilledRun) -> None:
    ranks = start(run)
    statuses = reap(ranks, RUN_LIMIT_S)
    if any(statuses):
        logs = "\n".join(rank.output for rank in ranks)
        raise RuntimeError(f"a run that nobody killed ended with {statuses}:\n{logs}")


def one_trial(
    kill: RankKill, folder: Path, world_size: int, homes: str, truth: Reference, length_s: float
) -> CrashTrial:
    """Kill a training run, verify its checkpoints, resume it, and compare it with an uninterrupted run.

    Args:
        homes: Where the run keeps its 16-bit parameters, as a key of `RESUMED_WITH`.
        truth: State hashes of the uninterrupted run, by rank and step.

    Returns:
        The outcome, with all faults that were found.
    """
    trial = CrashTrial(kill, world_size=world_size, homes=homes)
    killed_run = KilledRun(folder / "ck", world_size, 0, free_port(), kill, homes=homes)
    trial.fired = _run_and_kill(killed_run, length_s)
    remove_shared_buffers(killed_run.port)
    trial.committed_step = max(_number(killed_run.note("committed", r)) for r in range(world_size))
    _check_disk(trial, killed_run.folder)
    resumed = KilledRun(
        killed_run.folder,
        world_size,
        1,
        free_port(),
        RankKill(rank=-1, one_tag=kill.one_tag, exchange=kill.exchange),
        homes=RESUMED_WITH[homes],
    )
    ranks = start(resumed)
    statuses = reap(ranks, RUN_LIMIT_S)
    trial.storing = len(list(resumed.stored_in.glob("*.extents"))) == world_size
    remove_shared_buffers(resumed.port)
    for rank in range(world_size):
        if statuses[rank]:
            trial.differing.append(f"rank {rank} did not resume: {ranks[rank].output[-600:]}")
        _compare(trial, resumed, rank, truth)
    _check_disk(trial, killed_run.folder)
    return trial


def _run_and_kill(run: KilledRun, length_s: float) -> bool:
    ranks = start(run)
    victim = ranks[run.kill.rank]
    if not run.kill.point:
        _wait_for(run.note("ready", run.kill.rank), victim.pid)
        time.sleep(run.kill.delay_s * 0.6 * length_s)
        os.kill(victim.pid, signal.SIGKILL)
    died = victim.ended(RUN_LIMIT_S) == -signal.SIGKILL
    others = [rank for rank in ranks if rank is not victim]
    reap(others, GRACE_S if died else RUN_LIMIT_S)
    reached = run.note("reached", run.kill.rank)
    return died and (not run.kill.point or reached.read_text() == run.kill.point)


def _wait_for(note: Path, pid: int) -> None:
    end = time.monotonic() + RUN_LIMIT_S
    while not note.exists() and time.monotonic() < end and Path(f"/proc/{pid}/exe").exists():
        time.sleep(0.002)


def _number(note: Path) -> int:
    text = note.read_text() if note.exists() else ""
    return int(text) if text else -1


def _check_disk(trial: CrashTrial, folder: Path) -> None:
    # Every checkpoint must be whole, and none that the run reported as committed may be missing.
    for entry in list_checkpoints(folder):
        if entry.status != "committed" or verify(folder, entry.tag):
            trial.torn.append(f"{entry.tag}: {entry.status} {verify(folder, entry.tag)[:1]}")
        trial.torn.extend(f"{entry.tag}: {p}" for p in stored_problems(folder / entry.tag))
    unsealed = {p.name for p in folder.glob("*") if p.is_dir() and not p.name.startswith(".")}
    unsealed -= {entry.tag for entry in list_checkpoints(folder)}
    trial.torn.extend(f"{tag}: visible without a manifest" for tag in sorted(unsealed))
    whole = newest_whole([folder])
    newest = -1 if whole is None else whole.manifest.step
    if newest < trial.committed_step:
        trial.lost.append(f"step {trial.committed_step} was committed, but {newest} is the newest")
    latest = folder / "latest"
    if latest.exists() and not (folder / latest.read_text()).is_dir():
        trial.lost.append(f"latest names {latest.read_text()!r}, which is not there")


def _compare(trial: CrashTrial, run: KilledRun, rank: int, truth: Reference) -> None:
    steps = {step: (digest, chain) for step, digest, chain in recorded(run, rank)}
    if steps:
        trial.resumed_step = min(steps) - 1
    if steps and (max(steps) != STEPS or trial.resumed_step < trial.committed_step):
        trial.differing.append(f"rank {rank} ran steps {min(steps)} to {max(steps)}")
    trial.differing.extend(f"rank {rank} step {step}" for step, result in steps.items() if result != truth[rank, step])


def trials(
    count: int, seed: int, limit_s: float, scratch: Path, trained: Sequence[str] = TRAINED
) -> Iterator[CrashTrial]:
    """Yield the outcomes of ``count`` trials, made one after the other. A trial kills and resumes a training run.

    No trial starts later than ``limit_s`` seconds after the first one.
    """
    begin = time.monotonic()
    truth_of = functools.cache(functools.partial(reference, scratch=scratch))
    for number, (kill, world_size, homes) in enumerate(islice(kills(seed, trained), count)):
        if time.monotonic() - begin > limit_s:
            break
        truth, length_s = truth_of(world_size, bool(homes))
        attempt = functools.partial(one_trial, world_size=world_size, homes=homes, truth=truth, length_s=length_s)
        yield until_fired(kill, attempt, scratch / f"trial{number}")


def figures(trials: list[CrashTrial], wall_s: float) -> dict[str, Any]:
    return {
        **counted(trials),
        "lost_committed": sum(bool(t.lost) for t in trials),
        "torn_visible": sum(bool(t.torn) for t in trials),
        "kills_by_homes": dict(Counter(t.homes or "no plan" for t in trials)),
        "kills_by_ranks": dict(Counter(str(t.world_size) for t in trials)),
        "kills_by_ranks_that_store": dict(Counter(str(t.world_size) for t in trials if t.storing)),
        "resumed_from_a_checkpoint": sum(t.resumed_step > 0 for t in trials),
        "steps_per_run": STEPS,
        "wall_s": round(wall_s, 1),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = kill_parser("checkpoint_crash", __doc__, 200)
    parser.add_argument(
        "--limit-s", type=float, default=float("inf"), help="seconds after which no further trial starts"
    )
    parser.add_argument(
        "--homes",
        choices=tuple(RESUMED_WITH),
        help="kind of training run to kill in every trial (default: each kind in turn). host: all 16-bit parameters "
        "are kept in host memory. mixed: every other subgroup's 16-bit parameters are kept in host memory, the others "
        "on the GPU. stored: part of the optimizer state is on a drive. guessed: all updates start before the gradient "
        "norm is known. Empty text: DeepSpeed trains without a plan",
    )
    options = parser.parse_args(arguments)
    console = Console()
    become_only_rank()
    warm_up()
    answer_once()
    begin = time.monotonic()
    scratch = Path(tempfile.mkdtemp(prefix="ebbtide-crash-"))
    trained = TRAINED if options.homes is None else (options.homes,)
    planned = trials(options.kills, options.seed, options.limit_s, scratch, trained)
    done = campaign(planned, options.kills, console)
    result = figures(done, time.monotonic() - begin)
    return concluded("checkpoint_crash", options.json, result, scratch, console)


if __name__ == "__main__":
    raise SystemExit(main())
