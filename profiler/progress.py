"""Progress of the ranks of a training script while the script is profiled.

Each rank writes its progress to a file in a shared folder.
"""

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from ebbtide.simulator.page import write_whole

FAILED = "ebbtide.profiler.script: error:"  # beginning of the line that a failing rank prints


@dataclass(frozen=True)
class RankProgress:
    """The progress of one rank of a training script that is profiled.

    Attributes:
        steps: Number of optimizer steps so far.
        needed: Number of optimizer steps until the profile is complete.
        error: Error message, or empty.
        at_s: Time at which the progress was written.
    """

    steps: int = 0
    needed: int = 0
    error: str = ""
    at_s: float = 0.0


class ProgressFile:
    """A file in a shared folder with the progress of one rank of a training script that is profiled.

    A write replaces the whole file at once. Without a folder, nothing is written.
    """

    def __init__(self, folder: Path | None, rank: int) -> None:
        self._path = folder / f"rank-{rank}.json" if folder is not None else None

    def tell(self, steps: int, needed: int, error: str = "") -> None:
        if self._path is None:
            return
        progress = RankProgress(steps, needed, error, time.time())
        write_whole(self._path, json.dumps(asdict(progress)))


def read_progress(folder: Path) -> list[RankProgress]:
    """Read the latest progress of every rank of a training script that is profiled, from files in a folder."""
    return [RankProgress(**json.loads(path.read_text(encoding="utf-8"))) for path in sorted(folder.glob("rank-*.json"))]


def first_error(ranks: list[RankProgress]) -> str:
    """Return the earliest error of the ranks of a training script that is profiled, or an empty string."""
    failed = [rank for rank in ranks if rank.error]
    return min(failed, key=lambda rank: rank.at_s).error if failed else ""
