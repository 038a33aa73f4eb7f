"""The writer of a note on a checkpoint's folder, and whether it is still at work."""

import contextlib
import os
import socket
import time
from pathlib import Path
from typing import Any

LEASE_S = 4.0  # a note is renewed this often
LEASES = 3  # a note not renewed for so many is nobody's


def owner() -> dict[str, Any]:
    """Return the identity of this process. The number alone could belong to another one after a container's restart."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "started": _started(os.getpid())}


def _started(pid: int) -> str:
    """Clock ticks since boot; empty: there is no such process, or no /proc to ask."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def lives(who: dict[str, Any], path: Path) -> bool:
    """Return whether the process that wrote the note at ``path`` may still be at work."""
    if who.get("host") != socket.gethostname():
        return _is_renewed(path)
    started = _started(int(who.get("pid", 0)))
    return bool(started) and started == who.get("started", started)


def _is_renewed(path: Path) -> bool:
    """Return whether a process on another machine renews the note. Its process table cannot be seen."""
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
    """Return the time by the filesystem's own clock, which stamps what other machines write there."""
    try:
        os.utime(folder)
        return folder.stat().st_mtime_ns
    except OSError:  # not ours to change
        return time.time_ns()
