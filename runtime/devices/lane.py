"""Lanes and completions: the queues for a plan's operations, and the ends of these operations.

A lane is a thread or CUDA stream that runs operations in order. A completion is the end of one operation,
for which other code can wait.
"""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ebbtide.runtime.hardware.background import free, native_work

WAIT_DEADLINE_S = 600.0
_ISSUED = threading.Event()  # of every operation that has already ended or been issued
_ISSUED.set()


class Event(Protocol):
    """The part of the interface of ``torch.cuda.Event`` that ebbtide uses."""

    def synchronize(self) -> None: ...
    def query(self) -> bool: ...


class BackgroundError(RuntimeError):
    """An error: an optimizer update failed in the background. The training state is no longer usable."""


class Completion:
    """The end of one operation on a lane (a thread or stream that runs operations in order).

    The lane's thread sets ``issued`` once the operation has been handed to its CUDA stream. On a lane without a
    stream, ``issued`` is set when the operation has ended. On a lane with a stream, ``event`` marks the
    operation's end. Another stream can wait for this event without blocking the host.
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
        """Return the completion of an operation that ends at ``event`` in a stream, or has ended if it is None."""
        completion = cls.__new__(cls)  # without an event of its own, which takes longer than all else here
        completion.issued, completion.event, completion.error = _ISSUED, event, None
        completion.label, completion.start_event, completion.start_s, completion.end_s = "", None, 0.0, 0.0
        return completion

    def wait_issued(self) -> None:
        """Block the calling thread until the operation has been issued to its CUDA stream.

        Raises:
            BackgroundError: The operation failed, or was not issued within the deadline.
        """
        if not self.issued.wait(WAIT_DEADLINE_S):
            raise BackgroundError(
                f"the operation {self.label!r} was not started within {WAIT_DEADLINE_S:.0f} s: a background thread of "
                "ebbtide hangs. Stop the training and resume it from the newest checkpoint"
            )
        if self.error is not None:
            first_line, *_ = str(self.error).splitlines() or [""]
            why = f"{type(self.error).__name__}: {first_line}"
            raise BackgroundError(f"{self.label!r} failed in the background: {why}") from self.error

    def wait_host(self) -> None:
        """Block the calling thread until the operation has ended."""
        # For an operation on a CUDA stream, this is its end on the GPU.
        self.wait_issued()
        if self.event is not None:
            self.event.synchronize()

    def wait_on(self, stream: Any | None) -> None:
        """Make a CUDA stream wait for the operation's end. If ``stream`` is None, block the calling thread instead."""
        if stream is None:
            self.wait_host()
            return
        self.wait_issued()
        if self.event is not None:
            stream.wait_event(self.event)

    @property
    def ended(self) -> bool:
        """Return, without waiting, whether the operation has ended."""
        return self.issued.is_set() and (self.event is None or self.event.query())


class LaneQueue:
    """A lane: a queue of operations that run in order, on a thread of the lane or on the submitting thread.

    With a CUDA ``stream`` the thread only issues work to the stream. Without a stream the thread does the work
    itself. No other thread submits work to the stream.

    The first error stops the lane. Every later operation on the lane raises that error, and so does all code that
    waits for such an operation.
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
        """Start the lane. Its thread first calls ``begin``. Without such a thread, only one thread may submit."""
        self.name = name
        self._begin = begin
        self.stream = stream
        self._record = record
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._closed = False
        self._thread: threading.Thread | None = None
        if own_thread:
            self._thread = threading.Thread(target=self._run, name=f"ebbtide {name}", daemon=True)
            self._thread.start()

    def submit(self, body: Callable[[], None], waits: Sequence[Completion], completion: Completion) -> None:
        """Queue an operation on the lane. It runs after all operations queued earlier and after those in ``waits``.

        Args:
            completion: Object that receives the end of the operation, so that other code can wait for it.
        """
        if self._closed:  # no thread would run the op, and waiting for it would never end
            completion.error = RuntimeError(f"the lane {self.name!r} is closed")
            completion.issued.set()
            return
        if self._thread is None:
            self._execute(body, waits, completion)
            return
        self._queue.put(lambda: self._execute(body, waits, completion))

    def _execute(self, body: Callable[[], None], waits: Sequence[Completion], completion: Completion) -> None:
        try:
            if self._error is not None:
                raise self._error
            for wait in waits:
                wait.wait_issued()
            with native_work():
                for wait in waits:
                    wait.wait_on(self.stream)
                completion.start_s = time.perf_counter()
                if self.stream is not None and self._record is not None:
                    completion.start_event = self._record(self.stream)
                body()
                if self.stream is not None and self._record is not None:
                    completion.event = self._record(self.stream)
        except BaseException as error:  # raised at the next wait or step
            # Report the first failure, not the failures of ops that waited for it.
            root = error.__cause__ if isinstance(error, BackgroundError) else None
            self._error = self._error or root or error
            completion.error = root or error
        finally:
            completion.end_s = time.perf_counter()
            completion.issued.set()

    def _run(self) -> None:
        try:
            with native_work():
                self._begin()
        except BaseException as error:  # raised by every op of this lane
            self._error = error
        while (work := self._queue.get()) is not None:
            work()
            held: list[object] = [work]
            del work
            free(held)  # also frees the tensors of the op, because the next op may come much later

    def close(self, timeout_s: float = 30.0) -> None:
        """End the thread of this lane (a queue of copies or updates), once all queued operations have ended.

        Wait at most ``timeout_s`` seconds for the end of the thread.
        """
        self._closed = True
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(timeout_s)
