"""Shared parts of the studies that kill training with SIGKILL: kills, trials, campaigns."""

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


@dataclass(frozen=True)
class Kill:
    """The moment at which a training process gets SIGKILL.

    Attributes:
        point: Named point in the code at which the kill happens. If empty, it happens after
            ``delay_s`` seconds.
        occurrence: Number of times that ``point`` must be reached for the kill.
    """

    point: str = ""
    occurrence: int = 1
    delay_s: float = 0.0

    def earlier(self) -> Self:
        return replace(self, occurrence=(1 + self.occurrence) // 2, delay_s=self.delay_s / 2)


class KillingFiles(Files):
    """File operations that kill their own process with SIGKILL at a named point of the commit protocol."""

    def __init__(self, kill: Kill) -> None:
        self._kill, self._left = kill, kill.occurrence
        self._lock = threading.Lock()

    def hit(self, name: str) -> bool:
        """Count an arrival at a named point, and return whether the kill is due there."""
        with self._lock:
            self._left -= name == self._kill.point
            return name == self._kill.point and self._left == 0

    def point(self, name: str) -> None:
        if self.hit(name):
            os.kill(os.getpid(), signal.SIGKILL)


@dataclass
class Trial:
    """The outcome of one kill of a training process."""

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


T = TypeVar("T")
OneTrial = TypeVar("OneTrial", bound=Trial)


def until_fired(kill: Kill, attempt: Callable[[Any, Path], OneTrial], folder: Path) -> OneTrial:
    """Try a kill at earlier and earlier moments until it takes effect. Return the last trial.

    A random moment may come after the end of the run, and an occurrence may never be reached. The
    folder of a successful trial is removed.
    """
    for number in range(ATTEMPTS):
        trial = attempt(kill, folder / str(number))
        if trial.fired or trial.wrong:
            break
        kill = kill.earlier()
    if trial.sound:
        shutil.rmtree(folder)
    return trial


def campaign(trials: Iterable[T], count: int, console: Console) -> list[T]:
    """Run all kill trials in turn and return them. Print the progress and every failed trial."""
    done = []
    for number, trial in enumerate(trials, start=1):
        done.append(trial)
        if not trial.sound:  # type: ignore[attr-defined]
            console.print(number, asdict(trial))  # type: ignore[call-overload]
        elif number % 10 == 0:
            console.print(f"{number} of {count} kills")
    return done


def counted(trials: Sequence[Trial]) -> dict[str, Any]:
    """Return the summary of kill trials for a study's record."""
    by_point = Counter(t.kill.point or "random moment" for t in trials if t.fired)
    return {
        "kills": len(trials),
        "fired": sum(t.fired for t in trials),
        "not_bit_identical": sum(bool(t.differing) for t in trials),
        "kills_by_point": dict(sorted(by_point.items())),
        "failures": [asdict(t) for t in trials if not t.sound],
    }


def concluded(study: str, path: Path | None, figures: dict[str, Any], scratch: Path, console: Console) -> int:
    """Write and print the record of a kill study, and return the exit code.

    The files of failed trials are kept. Without a failure the scratch folder is removed.
    """
    publish(study, path, figures)
    if figures["failures"]:
        console.print(f"what is left of the failed trials: {scratch}")
        return 1
    shutil.rmtree(scratch)
    return 0
