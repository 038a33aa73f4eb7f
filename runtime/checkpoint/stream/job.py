"""The background job that writes and commits one checkpoint."""

import contextlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from ebbtide.runtime.checkpoint.errors import Cancelled
from ebbtide.runtime.checkpoint.files import Files
from ebbtide.runtime.checkpoint.live_state import AnnouncedStep, LiveState
from ebbtide.runtime.checkpoint.protocol.commit import Attempt, Commit
from ebbtide.runtime.checkpoint.protocol.folders import prune
from ebbtide.runtime.checkpoint.protocol.rotation import Note
from ebbtide.runtime.checkpoint.stream.persist import BlockWriter


@dataclass(frozen=True)
class SaveReport:
    """The cost of a finished checkpoint, in bytes and seconds.

    Attributes:
        stall_s: Seconds that the training loop waited in ``save_checkpoint``.
        update_wait_s: Seconds that optimizer updates waited for copies and for the disk.
        copied_bytes: Number of bytes that were copied because an update was about to overwrite them.
    """

    tag: str
    step: int
    payload_bytes: int
    stall_s: float
    update_wait_s: float
    copied_bytes: int
    persist_s: float


class BackgroundSave:
    """A background job that writes and commits one checkpoint on its own thread.

    Several threads use a job: its own, that of the training loop (`wait`, `cancel`), and those of optimizer updates,
    which must not overwrite a block before the checkpoint has copied it.
    """

    def __init__(
        self,
        attempt: Attempt,
        commit: Commit,
        writer: BlockWriter,
        live: LiveState,
        files: Files,
        keep: int,
        durably: Files | None = None,
        when_over: Callable[[], None] = lambda: None,
        stored: AnnouncedStep | None = None,
    ) -> None:
        self.attempt = attempt
        self.failure: BaseException | None = None
        self.report: SaveReport | None = None
        self.stall_s = 0.0
        self._commit = commit
        self._writer = writer
        self._live = live
        self._files = files
        self._keep = keep
        self._durably = durably  # if set, the checkpoint first gets its final name, and is synced to disk afterwards
        self._when_over = when_over
        self._stored = stored
        self._placed = threading.Event()
        self._over = threading.Event()
        self._pid = os.getpid()
        # Not a daemon thread, so that the process waits for it before it ends (also a child of multiprocessing, which
        # does not run atexit functions). All waits of this thread have a deadline.
        self._thread = threading.Thread(target=self._run, name=f"ebbtide-checkpoint-{attempt.tag}", daemon=False)

    def start(self) -> None:
        """Start to write in the background. From now on, updates must first call `LiveState.before_update`."""
        self._live.attach(self._writer.release)
        self._writer.start()
        self._thread.start()
        self._files.point("job_started")

    @property
    def running(self) -> bool:
        return not self._over.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the checkpoint is committed or has failed. Return False if the timeout passed first."""
        if self.elsewhere:
            return self._wait_for_the_parent(timeout_s)
        return self._over.wait(timeout_s)

    def wait_while_moving(self, limit_s: float) -> None:
        """Wait until the checkpoint is committed or has failed. Give up waiting if no block of the checkpoint has been
        written for ``limit_s`` seconds.
        """
        begin = time.monotonic()
        while not self.wait(min(1.0, limit_s)):
            if time.monotonic() - max(begin, self._writer.progress_s) > limit_s:
                return

    def wait_until_placed(self) -> None:
        """Wait until the checkpoint's files have their final names, or until the checkpoint has failed."""
        self._placed.wait()

    @property
    def placed(self) -> bool:
        return self._placed.is_set()

    @property
    def elsewhere(self) -> bool:
        """Return whether this process is a fork of the process that writes the checkpoint."""
        # A fork has no writer threads, and must not wait for them.
        return self._pid != os.getpid()

    def _wait_for_the_parent(self, timeout_s: float | None) -> bool:
        a, end = self.attempt, time.monotonic() + (timeout_s or 600.0)
        while time.monotonic() < end:
            if not a.staging.exists() or os.getppid() != self._pid:
                self._over.set()
                return True
            time.sleep(0.02)
        return False

    @property
    def note(self) -> Note:
        return self._commit.note

    def cancel(self) -> None:
        """Cancel the checkpoint that is being written. If all its blocks are written already, the commit continues."""
        self._writer.cancel()

    def _run(self) -> None:
        begin = time.monotonic()
        try:
            self._commit.tidy()
            records = self._writer.finish()
            self._live.attach(None)
            if self._stored is not None:  # before the vote, which says that all of this rank's state is durable
                self._stored.prepare()
                self._files.point("stored_prepared")
            persisted = time.monotonic()
            self._commit.vote(records)
            self._commit.conclude()
            if self._durably is not None:
                self._placed.set()
                self._files.point("placed")
                self._commit.make_durable(records, self._durably)
            self._commit.close(committed=True)
            self.report = SaveReport(
                self.attempt.tag,
                self.attempt.step,
                sum(r.size_bytes for r in records),
                self.stall_s,
                self._writer.waited_s,
                self._writer.copied_bytes,
                persisted - begin,
            )
            if self._keep and self.attempt.rank == 0:
                prune(self.attempt.save_dir, self._keep, self._files)
            if self._stored is not None:  # last, so that the state of every existing checkpoint is still there
                self._stored.settle(committed=True)
                self._files.point("stored_settled")
            self._files.point("done")
        except BaseException as error:  # the next save raises it
            self.failure = error
            self._commit.abort(error)
            if self._stored is not None:
                with contextlib.suppress(Exception):  # a failed store reports its error at its next write
                    self._stored.settle(committed=self._commit.is_committed())
        finally:
            self._live.attach(None)
            self._placed.set()
            try:
                self._when_over()  # first, so that deletions are settled when a waiting thread continues
            finally:
                self._over.set()

    @property
    def cancelled(self) -> bool:
        return isinstance(self.failure, Cancelled)
