"""The limit on the time that a checkpoint waits for other ranks after this process has received SIGTERM."""

import threading
import time

GRACE_S = 20.0  # torchrun, SLURM and Kubernetes kill a process 30 s after SIGTERM by default

sigterm_came = threading.Event()
_came_s = 0.0


def tell() -> None:
    """Record that the process has received SIGTERM, and when, so that waits for other ranks become shorter.

    Later calls change nothing.
    """
    global _came_s
    if not sigterm_came.is_set():
        _came_s = time.monotonic()
        sigterm_came.set()


def limit_s(begin_s: float, end_s: float, extra_s: float = 0.0) -> float:
    """Return the monotonic time in seconds at which a checkpoint's wait for other ranks must end."""
    # After SIGTERM the wait is shorter, because the awaited rank may be dead, and the launcher soon kills this process.
    if not sigterm_came.is_set():
        return end_s
    return min(end_s, max(begin_s, _came_s) + GRACE_S + extra_s)
