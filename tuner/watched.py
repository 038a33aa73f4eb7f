"""The start of a user's training command with ebbtide in every Python process, until it ends or a limit is reached."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

STARTUP = Path(__file__).resolve().parents[1] / "runtime" / "frontdoor" / "startup"
SHOWN_LINES = 25
END_S = 5.0  # time in which a launcher may end its ranks by itself
TOO_LONG = None  # instead of an exit code


def ended(
    command: Sequence[str],
    folder: Path,
    asked: Mapping[str, str],
    environment: Mapping[str, str] | None = None,
    *,
    limit_s: float | None = None,
) -> tuple[int | None, str]:
    """Run a training command to its end, and return its exit code and its output.

    All processes of the command have ended then, also after an interrupt.

    Args:
        folder: Folder of this run alone. Its path must be in ``asked``: the run's processes are known by it.
        asked: Environment variables that tell ebbtide's startup module what to do.
        limit_s: Seconds after which the command is ended, and the code is `TOO_LONG`.
    """
    from ebbtide.runtime.hardware.launcher import only_rank

    assert any(str(folder) in value for value in asked.values())
    given = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and p != str(STARTUP)]
    variables = {
        **(os.environ if environment is None else environment),
        **asked,
        "PYTHONPATH": os.pathsep.join([str(STARTUP), *given]),
        "WANDB_MODE": os.environ.get("WANDB_MODE", "disabled"),
        **only_rank(os.environ, command),
    }
    output = folder / "output.txt"
    with output.open("w", encoding="utf-8") as to:
        process = subprocess.Popen(
            list(command), stdin=subprocess.DEVNULL, stdout=to, stderr=subprocess.STDOUT, env=variables
        )
        code: int | None = TOO_LONG
        try:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(limit_s)
        finally:
            _end(process, folder)
    return code, output.read_text(encoding="utf-8", errors="replace")


def tail(text: str) -> str:
    """Return the last lines of a command's output."""
    return "\n".join(text.splitlines()[-SHOWN_LINES:])


def _end(process: subprocess.Popen[bytes], folder: Path) -> None:
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
    # Ranks may outlive their launcher, and are not always in its process group or session.
    by = time.monotonic() + END_S
    while left := list(_processes(folder)):
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > by:
            return  # a process in an uninterruptible wait ends when its device answers
        time.sleep(0.05)
    process.wait()


def _processes(folder: Path) -> Iterator[int]:
    """Yield the numbers of the processes with a run's folder in their environment. Zombies have none."""
    mark, own = os.fsencode(folder), os.getpid()
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process is another user's, or has ended
            if int(place.name) != own and mark in (place / "environ").read_bytes():
                yield int(place.name)
