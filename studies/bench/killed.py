"""Code shared by the studies that kill training with SIGKILL: the kills, their outcomes, and a summary."""

import os
import shutil
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self, TypeVar

from ebbtide.runtime.checkpoint.files import Files
from rich.console import Console

from studies.bench.console import publish

ATTEMPTS = 4

# The named points of a checkpoint's commit in their order (see `Files.point`). Points after "votes_seen" are reached by
# rank 0 only. The rename before "tag_renamed" commits the checkpoint.
POINTS = (
    "save_begun",
    "staging_made",
    "skeleton_made",
    "job_started",
    "first_block",
    "half_written",
    "last_block",
    "payload_fsynced",
    "staging_fsynced",
    "vote_written",
    "vote_renamed",
    "voted",
    "votes_seen",
    "manifest_written",
    "manifest_renamed",
    "sealed",
    "tag_renamed",
    "parent_fsynced",
    "latest_written",
    "latest_renamed",
    "committed",
    "trash_renamed",
    "trash_deleted",
    "done",
)
# Points that only some runs reach: a subgroup was copied before its update, the tag was saved before, or two names were
# swapped by two renames.
RARE_POINTS = ("copied_on_update", "tag_set_aside")
# Points of a run with optimizer state on a drive.
STORED_POINTS = ("stored_prepared", "stored_settled")
# Points of the commit of a step's state on a drive. The rename before "steps_renamed" commits it.
STEP_POINTS = ("extents_synced", "steps_written", "steps_renamed", "steps_committed")


@dataclass(frozen=True)
class Kill:
    """The moment at which a study kills a training process with SIGKILL.

    Attributes:
        point: Name of the place in the code at which the process is killed. If empty, the process is
            killed after ``delay_s`` seconds.
        occurrence: Number of the arrival at ``point`` that triggers the kill, counted from 1.
    """

    point: str = ""
    occurrence: int = 1
    delay_s: float = 0.0

    def earlier(self) -> Self:
        return replace(self, occurrence=(1 + self.occurrence) // 2, delay_s=self.delay_s / 2)


class KillingFiles(Files):
    """File operations of a checkpoint save that kill their own process with SIGKILL at a chosen point of the save.

    The points are named places in the code that commits a checkpoint.
    """

    def __init__(self, kill: Kill) -> None:
        self._kill, self._left = kill, kill.occurrence
        self._lock = threading.Lock()

    def hit(self, name: str) -> bool:
        """Return True if the process must be killed now, when it has reached a named point of the checkpoint code."""
        # A study chooses the point, and how often the process must reach the point before the process is killed.
        with self._lock:
            self._left -= name == self._kill.point
            return name == self._kill.point and self._left == 0

    def point(self, name: str) -> None:
        if self.hit(name):
            os.kill(os.getpid(), signal.SIGKILL)


@dataclass
class KillTrial:
    """The outcome of one attempt of a study to kill a training process with SIGKILL."""

    kill: Kill
    fired: bool = False
    resumed_step: int = -1
    lost: list[str] = field(default_factory=list)
    torn: list[str] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)

    @property
    def wrong(self) -> bool:
        return bool(self.lost or self.torn or self.differing)

    @property
    def sound(self) -> bool:
        return self.fired and not self.wrong


OneTrial = TypeVar("OneTrial", bound=KillTrial)


def until_fired(kill: Kill, attempt: Callable[[Any, Path], OneTrial], folder: Path) -> OneTrial:
    """Repeat an attempt to kill training, each time at an earlier moment, until the kill takes effect. Make at most
    `ATTEMPTS` attempts.

    An attempt can fail to kill for two reasons. A random moment may come after the end of the run. A kill may be due
    when a point in the code is reached for the n-th time, but the run may reach it fewer times.

    Args:
        attempt: Function that trains in a given folder, kills the training, and returns the outcome.
        folder: Folder for the files of all attempts. It is removed if the last kill took effect and did no damage.

    Returns:
        The outcome of the last attempt.
    """
    for number in range(ATTEMPTS):
        trial = attempt(kill, folder / str(number))
        if trial.fired or trial.wrong:
            break
        kill = kill.earlier()
    if trial.sound:
        shutil.rmtree(folder)
    return trial


def campaign(trials: Iterable[OneTrial], count: int, console: Console) -> list[OneTrial]:
    """Run all kill trials of a study one after the other, and return the list of their outcomes.

    The progress and every failed outcome are printed.
    """
    done = []
    for number, trial in enumerate(trials, start=1):
        done.append(trial)
        if not trial.sound:
            console.print(number, asdict(trial))
        elif number % 10 == 0:
            console.print(f"{number} of {count} kills")
    return done


def counted(trials: Sequence[KillTrial]) -> dict[str, Any]:
    """Return a summary of a study's kill trials as a dict.

    The keys are ``kills`` (number of trials), ``fired`` (kills that took effect), ``not_bit_identical``
    (trials with differing results), ``kills_by_point`` (number by place in the code) and ``failures``.
    """
    by_point = Counter(t.kill.point or "random moment" for t in trials if t.fired)
    return {
        "kills": len(trials),
        "fired": sum(t.fired for t in trials),
        "not_bit_identical": sum(bool(t.differing) for t in trials),
        "kills_by_point": dict(sorted(by_point.items())),
        "failures": [asdict(t) for t in trials if not t.sound],
    }


def concluded(study: str, path: Path | None, figures: dict[str, Any], scratch: Path, console: Console) -> int:
    """Print the results of a study that kills training, and write them as JSON to the file ``path`` if given.

    If no kill led to a failure, the folder ``scratch`` is removed. Otherwise it is kept for inspection.

    Returns:
        The exit code of the study: 0 without failures, 1 with failures.
    """
    publish(study, path, figures)
    if figures["failures"]:
        console.print(f"the files of the failed trials are kept in {scratch}")
        return 1
    shutil.rmtree(scratch)
    return 0
