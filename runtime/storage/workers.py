"""A pool of threads that read blocks of optimizer state from a drive or write blocks to the drive, and waits for the
drive: with warnings in the log, with a deadline, and until the first failure.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ebbtide.runtime.checkpoint.format.memory import view_at
from ebbtide.runtime.hardware.background import free, native_work
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
def told_late(what: str) -> Iterator[None]:
    """Log a warning if the code in the ``with`` block, which waits for a drive, takes long."""
    timer = threading.Timer(TOLD_AFTER_S, logger.warning, (_STUCK, what, TOLD_AFTER_S))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class Progress:
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


Job = Callable[["Bounce"], None]
END_S = 30.0  # time that a closing pool waits for its threads


class Bounce:
    """The aligned host buffer of one thread that reads or writes a drive, allocated on first use."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._memory: mmap.mmap | None = None

    def address(self) -> int:
        if self._memory is None:
            self._memory = mmap.mmap(-1, self.size_bytes)
        return ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    def view(self, size_bytes: int) -> memoryview:
        return view_at(self.address(), size_bytes)


class Transfer:
    """A read or write of several blocks on a drive. The thread that creates the transfer waits for it, and the first
    error ends it.
    """

    def __init__(self, blocks: int) -> None:
        self._condition = threading.Condition()
        self._left = blocks
        self._error: BaseException | None = None
        self._progress_s = time.monotonic()

    def run(self, job: Job, bounce: Bounce) -> None:
        """Read or write one of the blocks of this transfer between host memory and a drive. A worker thread calls this
        method.

        The first error ends the transfer: its remaining blocks are skipped, and `wait` raises the error.
        """
        error = None
        try:
            if self._error is None:
                with native_work():
                    job(bounce)
        except BaseException as caught:  # raised by `wait`
            error = caught
        with self._condition:
            self._error = self._error or error
            self._left -= 1
            self._progress_s = time.monotonic()
            self._condition.notify_all()

    def wait(self, what: str, deadline_s: float) -> None:
        """Wait until the last block of this transfer is read from the drive or written to it. Log a warning if the
        drive makes no progress.

        Raises:
            StorageError: A block failed, or none was moved for ``deadline_s`` seconds.
        """
        telling = Telling(what, deadline_s)
        with self._condition:
            while self._left:
                stuck_s = time.monotonic() - self._progress_s
                telling.stuck(stuck_s)
                if stuck_s > deadline_s:
                    self._error = StorageError(
                        f"no block of {what} was read or written for {stuck_s:.1f} s (limit: {deadline_s:g} s): the "
                        "drive hangs. Check the drive, then resume training"
                    )
                    break
                self._condition.wait(min(1.0, deadline_s / 4))
            if self._error is not None:
                raise self._error


class Workers:
    """A pool of ``depth`` threads with one queue, which read or write blocks on a drive.

    The threads are daemons: a thread that is stuck in the kernel does not keep the process alive.
    """

    def __init__(self, name: str, depth: int, bounce_bytes: int) -> None:
        self._queue: queue.SimpleQueue[tuple[Transfer, Job] | None] = queue.SimpleQueue()
        self._bounce_bytes = bounce_bytes
        self._threads = [
            threading.Thread(target=self._run, name=f"ebbtide {name} {i}", daemon=True) for i in range(depth)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, transfer: Transfer, job: Job) -> None:
        self._queue.put((transfer, job))

    def _run(self) -> None:
        bounce = Bounce(self._bounce_bytes)
        while (work := self._queue.get()) is not None:
            transfer, job = work
            transfer.run(job, bounce)
            held: list[object] = [work, transfer, job]
            del work, transfer, job
            free(held)  # also frees the tensors, because the next block may come much later

    def close(self) -> bool:
        """Stop the threads that read or write blocks on a drive. Return False if a thread is stuck."""
        for _ in self._threads:
            self._queue.put(None)
        end_s = time.monotonic() + END_S
        for thread in self._threads:
            thread.join(max(0.0, end_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)
