"""Lanes: in-order workers that run ops, and the completions they wait for."""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

WAIT_DEADLINE_S = 600.0


class Event(Protocol):
    """The used part of ``torch.cuda.Event``."""

    def synchronize(self) -> None: ...
    def query(self) -> bool: ...


class BackgroundError(RuntimeError):
    """An update failed in the background; the training state is no longer usable."""


class Completion:
    """The end of one op.

    ``issued`` is set by the lane's thread once the op has been handed to its stream (device lanes)
    or has ended (host lanes). On a device lane ``event`` then stands for the op's end; waiting for
    it from another stream does not block the host.
    """

    __slots__ = ("end_s", "error", "event", "issued", "label", "start_event", "start_s")

    def __init__(self, label: str = "") -> None:
        self.issued = threading.Event()
        self.event: Event | None = None
        self.error: BaseException | None = None
        self.label = label
        self.start_event: Event | None = None
        self.start_s = 0.0
        self.end_s = 0.0

    @classmethod
    def done(cls, event: Event | None = None) -> "Completion":
        """Return a completion that has been issued already."""
        completion = cls()
        completion.event = event
        completion.issued.set()
        return completion

    def wait_issued(self) -> None:
        """Block until the op is on its stream.

        Raises:
            BackgroundError: it failed, or did not get there within the deadline.
        """
        if not self.issued.wait(WAIT_DEADLINE_S):
            raise BackgroundError(
                f"{self.label!r} was not started within {WAIT_DEADLINE_S:.0f} s: a background thread hangs"
            )
        if self.error is not None:
            first_line, *_ = str(self.error).splitlines() or [""]
            why = f"{type(self.error).__name__}: {first_line}"
            raise BackgroundError(f"{self.label!r} failed in the background: {why}") from self.error

    def wait_host(self) -> None:
        """Block until the op has ended."""
        self.wait_issued()
        if self.event is not None:
            self.event.synchronize()

    def wait_on(self, stream: Any | None) -> None:
        """Make ``stream`` wait for the op; without a stream, the calling thread."""
        if stream is None:
            self.wait_host()
            return
        self.wait_issued()
        if self.event is not None:
            stream.wait_event(self.event)

    @property
    def ended(self) -> bool:
        """True once the op has ended, without waiting."""
        return self.issued.is_set() and (self.event is None or self.event.query())


class Lane:
    """A worker that runs its ops in order, on its own thread or on the submitting thread.

    With a ``stream`` the thread only issues work to it. Without one the op's body is the work (host
    lane, emulated streams). The thread owns the order: no other thread submits to its stream.

    The first error stops the lane. Every later op, and everything that waits for one, gets the error.
    """

    def __init__(
        self,
        name: str,
        stream: Any | None = None,
        record: Callable[[Any], Event] | None = None,
        begin: Callable[[], None] = lambda: None,
        *,
        own_thread: bool = True,
    ) -> None:
        """Args:
        begin: called first in the thread: binds it to cores, chooses its GPU.
        own_thread: False: `submit` issues the op itself, for a stream that one thread fills.
        """
        self.name = name
        self._begin = begin
        self.stream = stream
        self._record = record
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        if own_thread:
            self._thread = threading.Thread(target=self._run, name=f"ebbtide {name}", daemon=True)
            self._thread.start()

    def submit(self, body: Callable[[], None], waits: Sequence[Completion], completion: Completion) -> None:
        """Queue ``body`` to run after everything submitted before and after ``waits``."""
        if self._thread is None:
            self._execute(body, waits, completion)
            return
        self._queue.put(lambda: self._execute(body, waits, completion))

    def _execute(self, body: Callable[[], None], waits: Sequence[Completion], completion: Completion) -> None:
        try:
            if self._error is not None:
                raise self._error
            for wait in waits:
                wait.wait_on(self.stream)
            completion.start_s = time.perf_counter()
            if self.stream is not None and self._record is not None:
                completion.start_event = self._record(self.stream)
            body()
            if self.stream is not None and self._record is not None:
                completion.event = self._record(self.stream)
        except BaseException as error:  # surfaces at the next wait or step
            # What failed first is told, not who waited for it.
            root = error.__cause__ if isinstance(error, BackgroundError) else None
            self._error = self._error or root or error
            completion.error = root or error
        finally:
            completion.end_s = time.perf_counter()
            completion.issued.set()

    def _run(self) -> None:
        try:
            self._begin()
        except BaseException as error:  # every op gets it
            self._error = error
        while (work := self._queue.get()) is not None:
            work()
            del work  # with the tensors that it copied: the next one may be long in coming

    def close(self, timeout_s: float = 30.0) -> None:
        """End the thread after what is queued."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(timeout_s)
