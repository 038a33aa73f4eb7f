"""The time that a checkpoint may still wait for other ranks after this process received SIGTERM."""

import threading
import time

GRACE_S = 20.0  # launchers kill after 30: torchrun, SLURM and Kubernetes, unless told otherwise

sigterm_came = threading.Event()
_came_s = 0.0


def tell() -> None:
    """Record that the process has received SIGTERM, and when. Later calls change nothing."""
    global _came_s
    if not sigterm_came.is_set():
        _came_s = time.monotonic()
        sigterm_came.set()


def limit_s(begin_s: float, end_s: float, extra_s: float = 0.0) -> float:
    """Return the time at which a wait for other ranks must end, in monotonic seconds.

    After SIGTERM the wait is shorter, because the awaited rank may be dead, and the launcher soon kills this
    process.
    """
    if not sigterm_came.is_set():
        return end_s
    return min(end_s, max(begin_s, _came_s) + GRACE_S + extra_s)
