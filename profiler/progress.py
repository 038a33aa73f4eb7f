"""Progress of the ranks of a profiled script, exchanged through files in a shared folder."""

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from ebbtide.simulator.page import write_whole

FAILED = "ebbtide.profiler.script: error:"  # begins the line that a failing rank prints


@dataclass(frozen=True)
class RankProgress:
    """The progress of one rank of a profiled script.

    Attributes:
        steps: Optimizer steps so far.
        needed: Optimizer steps required.
        error: Error message. Empty if there was no error.
        at_s: Time at which the progress was written.
    """

    steps: int = 0
    needed: int = 0
    error: str = ""
    at_s: float = 0.0  # when it was written


class ProgressFile:
    """A rank's progress file in a shared folder, always replaced as a whole. Without a folder, nothing is written."""

    def __init__(self, folder: Path | None, rank: int) -> None:
        self._path = folder / f"rank-{rank}.json" if folder is not None else None

    def tell(self, steps: int, needed: int, error: str = "") -> None:
        if self._path is None:
            return
        progress = RankProgress(steps, needed, error, time.time())
        write_whole(self._path, json.dumps(asdict(progress)))


def read_progress(folder: Path) -> list[RankProgress]:
    """Return the latest progress of every rank of a profiled script."""
    return [RankProgress(**json.loads(path.read_text(encoding="utf-8"))) for path in sorted(folder.glob("rank-*.json"))]


def first_error(ranks: list[RankProgress]) -> str:
    """Return the earliest error of a profiled script's ranks, or an empty string.

    Later errors mostly follow from the first one.
    """
    failed = [rank for rank in ranks if rank.error]
    return min(failed, key=lambda rank: rank.at_s).error if failed else ""
