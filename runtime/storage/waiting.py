"""Waits for a drive: with warnings in the log, with a deadline, and until the first failure."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ebbtide.runtime.storage.errors import StorageError

logger = logging.getLogger("ebbtide")

_STUCK = "ebbtide: waiting for storage: %s made no progress for %.1f s"
# Time without a finished block after which a warning is logged. The next one follows after twice this time.
TOLD_AFTER_S = 10.0


class Telling:
    """A warning that is repeated in the log while some code waits for a drive.

    Attributes:
        begin_s: Time, in seconds of the monotonic clock, at which the wait began.
    """

    def __init__(self, what: str, deadline_s: float) -> None:
        self.begin_s = time.monotonic()
        self._what, self._deadline_s = what, deadline_s
        self._next_s = TOLD_AFTER_S

    def stuck(self, stuck_s: float) -> None:
        if stuck_s >= self._next_s:
            logger.warning(
                _STUCK + " (training ends with an error after %.0f s without progress)",
                self._what,
                stuck_s,
                self._deadline_s,
            )
            self._next_s = 2 * stuck_s


@contextmanager
def late_wait_logged(what: str) -> Iterator[None]:
    """Log a warning if the code in the ``with`` block, which waits for a drive, takes long."""
    timer = threading.Timer(TOLD_AFTER_S, logger.warning, (_STUCK, what, TOLD_AFTER_S))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class DriveProgress:
    """A condition variable for threads that wait for a drive, with a deadline since the latest progress.

    The first failure ends all waits.

    Attributes:
        condition: Condition variable of the store. Hold its lock while `made` and `wait` are called.
    """

    def __init__(self, deadline_s: float) -> None:
        self.condition = threading.Condition()
        self._deadline_s = deadline_s
        self._made_s = 0.0  # time of the last write or commit
        self._failure: BaseException | None = None

    def made(self) -> None:
        """Wake the waiting threads, and begin their deadlines again."""
        self._made_s = time.monotonic()
        self.condition.notify_all()

    def wait(self, waiting: Telling, rule: str, fact: str) -> None:
        """Wait until progress is made, at most a second. Log a warning if the wait is long.

        Args:
            rule, fact: Two parts of the error message: the event that must happen, and the present situation.

        Raises:
            StorageError: There was an earlier failure, or no progress within the deadline.
        """
        self.raise_failure()
        stuck_s = time.monotonic() - max(waiting.begin_s, self._made_s)
        waiting.stuck(stuck_s)
        if stuck_s > self._deadline_s:
            raise StorageError(
                f"{rule} within {self._deadline_s:g} s, but {fact}: the drive hangs or is too slow. "
                "Check the drive, then resume"
            )
        self.condition.wait(min(1.0, self._deadline_s / 4))

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Keep the first error that is raised in the ``with`` block, for `raise_failure`."""
        try:
            yield
        except BaseException as error:
            with self.condition:
                self._failure = self._failure or error
                self.condition.notify_all()
            raise

    def raise_failure(self) -> None:
        """Raise the first failure again. Do nothing if there was none."""
        if self._failure is not None:
            raise StorageError(
                f"the optimizer state on drives cannot be used after an error while state was written "
                f"({self._failure}). Fix the cause, and resume training from a checkpoint"
            ) from self._failure
