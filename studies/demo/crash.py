"""The demo's crash: a training run killed with SIGKILL while a checkpoint is being written."""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ebbtide.simulator import CheckpointPlan, Plan

from studies.trials.phase_process import PhaseProcess

_POLL_S = 0.01


class CrashError(RuntimeError):
    """An error of the demo: a training run could not be killed in the middle of a checkpoint."""


@dataclass(frozen=True)
class Crash:
    """The state of the demo's checkpoints when its training was killed.

    Attributes:
        committed: Tag of the last committed checkpoint, which must survive the kill.
        written_bytes: Bytes on disk of the next checkpoint, which was not committed yet.
    """

    committed: str
    written_bytes: int
    checkpoint_bytes: int


def checkpointed_plan(plan: Plan, folder: Path, interval_steps: int, checkpoint_bytes: int, iteration_s: float) -> Plan:
    """Return the plan with background checkpoints, each written to disk during about half a checkpoint interval.

    The write rate is limited for two reasons. The demo can then kill training while a checkpoint is half
    written, and the disk traffic is spread over several iterations as in a long run.
    """
    rate = checkpoint_bytes / (0.5 * interval_steps * iteration_s)
    checkpoint = CheckpointPlan(
        interval_steps=interval_steps,
        mode="lazy",
        busy="wait",
        dir=str(folder),
        copy_budget_bytes=plan.checkpoint.copy_budget_bytes,
        write_bytes_per_s=rate,
    )
    return plan.model_copy(update={"checkpoint": checkpoint})


def kill_in_the_middle(child: PhaseProcess, folder: Path) -> Crash:
    """Kill a training process when one of its checkpoints is partly on disk and not yet committed.

    The moment is found from the checkpoint folder alone: its size on disk, and the tag that the file ``latest`` names.

    Raises:
        CrashError: If training ends before the kill, or commits the checkpoint just before the kill.
    """
    first, size = _wait_for_commit(child, folder)
    for written in _growth(child, folder, size):
        if committed(folder) != first:
            first, size = committed(folder), disk_bytes(folder)
        elif written > 0.2 * size:
            child.kill()
            break
    else:
        raise CrashError(
            "the demo must kill the training run while a checkpoint is being written, but the run ended before that. "
            f"See the log {child.log}"
        )
    if committed(folder) != first:
        raise CrashError(
            f"the kill came too late: checkpoint {committed(folder)} was already committed. Run the demo again"
        )
    return Crash(first, disk_bytes(folder) - size, size)


def _wait_for_commit(child: PhaseProcess, folder: Path) -> tuple[str, int]:
    running = True
    while running:
        running = child.running  # read before the log, so that everything that an ended process wrote is visible
        if committed(folder):
            return committed(folder), disk_bytes(folder)
        time.sleep(_POLL_S)
    raise CrashError(f"the run ended without a committed checkpoint; see {child.log}")


def _growth(child: PhaseProcess, folder: Path, size: int) -> Iterator[int]:
    while child.running:
        yield disk_bytes(folder) - size
        time.sleep(_POLL_S)


def committed(folder: Path) -> str:
    """Return the tag that the file ``latest`` of a checkpoint folder names: the newest committed checkpoint, or ""."""
    latest = folder / "latest"
    try:
        return latest.read_text().strip()
    except FileNotFoundError:
        return ""


def disk_bytes(folder: Path) -> int:
    """Return the number of bytes that a folder's files occupy on disk, so that ranges not yet written do not count."""
    total = 0
    for parent, _, names in os.walk(folder):  # os.walk skips a folder that has just been removed
        for name in names:
            try:
                total += Path(parent, name).stat().st_blocks * 512
            except FileNotFoundError:  # renamed meanwhile
                continue
    return total
