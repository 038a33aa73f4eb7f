"""The identity of a process, and a check that the process still runs.

A process that saves a checkpoint writes its identity to a file (a note) in the checkpoint's folder. Another process can
then tell a save in progress from a save that has crashed.
"""

import contextlib
import os
import socket
import time
from pathlib import Path
from typing import Any

LEASE_S = 4.0  # interval at which a note is renewed
LEASES = 3  # after this many intervals without renewal, the owner of a note counts as dead


def owner() -> dict[str, Any]:
    """Return the identity of this process, including its start time."""
    # The start time is needed because another process may have the same process id after a container's restart.
    return {"host": socket.gethostname(), "pid": os.getpid(), "started": _started(os.getpid())}


def _started(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def lives(who: dict[str, Any], path: Path) -> bool:
    """Return whether the process that wrote a note in a checkpoint folder may still be running."""
    if who.get("host") != socket.gethostname():
        return _is_renewed(path)
    started = _started(int(who.get("pid", 0)))
    return bool(started) and started == who.get("started", started)


def _is_renewed(path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        before = path.stat().st_mtime_ns
        if _now_ns(path.parent) - before > LEASES * LEASE_S * 1e9:
            return False  # not renewed for long enough, so that a resume after a crash need not wait
        for _ in range(LEASES):
            time.sleep(LEASE_S)  # whether a process on another machine has died shows only by its silence
            if path.stat().st_mtime_ns != before:
                return True
    return False


def _now_ns(folder: Path) -> int:
    try:
        os.utime(folder)
        return folder.stat().st_mtime_ns
    except OSError:  # the folder belongs to another user
        return time.time_ns()
