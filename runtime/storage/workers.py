"""A pool of threads that read blocks of optimizer state from a drive or write blocks to the drive."""

from __future__ import annotations

import ctypes
import mmap
import queue
import threading
import time
from collections.abc import Callable

from ebbtide.runtime.checkpoint.format.memory import view_at
from ebbtide.runtime.hardware.background import free, native_work
from ebbtide.runtime.storage.errors import StorageError
from ebbtide.runtime.storage.waiting import Telling

DriveJob = Callable[["Bounce"], None]
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

    def run(self, job: DriveJob, bounce: Bounce) -> None:
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
        self._queue: queue.SimpleQueue[tuple[Transfer, DriveJob] | None] = queue.SimpleQueue()
        self._bounce_bytes = bounce_bytes
        self._threads = [
            threading.Thread(target=self._run, name=f"ebbtide {name} {i}", daemon=True) for i in range(depth)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, transfer: Transfer, job: DriveJob) -> None:
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
