"""The identity of the process that wrote a note in a checkpoint's folder, and whether it still runs."""

import contextlib
import os
import socket
import time
from pathlib import Path
from typing import Any

LEASE_S = 4.0  # a note is renewed this often
LEASES = 3  # a note not renewed for so many is nobody's


def owner() -> dict[str, Any]:
    """Return the identity of this process, including its start time.

    After a container's restart another process may have the same process id.
    """
    return {"host": socket.gethostname(), "pid": os.getpid(), "started": _started(os.getpid())}


def _started(pid: int) -> str:
    """Return a process's start time in clock ticks since boot. Empty if there is no such process or no /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def lives(who: dict[str, Any], path: Path) -> bool:
    """Return whether the process that wrote a note in a checkpoint's folder may still be at work."""
    if who.get("host") != socket.gethostname():
        return _is_renewed(path)
    started = _started(int(who.get("pid", 0)))
    return bool(started) and started == who.get("started", started)


def _is_renewed(path: Path) -> bool:
    """Return whether a process on another machine still renews its note. Its process table is not visible."""
    with contextlib.suppress(FileNotFoundError):
        before = path.stat().st_mtime_ns
        if _now_ns(path.parent) - before > LEASES * LEASE_S * 1e9:
            return False  # silent for long enough already: a resume after a crash does not wait
        for _ in range(LEASES):
            time.sleep(LEASE_S)  # nothing tells that a machine is gone, but that it is silent
            if path.stat().st_mtime_ns != before:
                return True
    return False


def _now_ns(folder: Path) -> int:
    """Return the time by the clock of a folder's filesystem, which also dates files of other machines."""
    try:
        os.utime(folder)
        return folder.stat().st_mtime_ns
    except OSError:  # not ours to change
        return time.time_ns()
