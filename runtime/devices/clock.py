"""The conversion of GPU events to seconds of the host's clock, precise even in long training runs."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ebbtide.runtime.devices.lane import Completion


class Mark:
    """A reference event on the GPU, from which the times of later events are measured.

    The object also holds the time at which the GPU reached the reference event, once this time is known.
    """

    __slots__ = ("_before", "_host", "_reached_s", "_recorded_s", "event")

    def __init__(self, event: Any, reached_s: float | None, before: "Mark | None", host: Callable[[], float]) -> None:
        self.event = event
        self._reached_s = reached_s
        self._host, self._recorded_s = host, host()
        self._before = before

    @property
    def reached_s(self) -> float:
        """Return the time, in seconds of the host's clock, at which the GPU reached this reference event.

        Call this method only after the GPU has reached the event.
        """
        if self._reached_s is None:
            assert self._before is not None
            dated_s = self._before.date_s(self.event)
            # The clocks of GPU and host drift apart by some ms per minute. An event is reached after it was recorded,
            # and before the host has seen it.
            self._reached_s = min(max(dated_s, self._recorded_s), self._host())
            self._before = None  # otherwise the chain of all earlier marks would stay in memory
        return self._reached_s

    def date_s(self, event: Any) -> float:
        """Return the time, in seconds of the host's clock, at which the GPU reached ``event``."""
        # The time is measured from this object's reference event.
        return self.reached_s + float(self.event.elapsed_time(event)) / 1e3


@dataclass(frozen=True, slots=True)
class Moment:
    """A point in the work of the training stream, on which forward and backward run.

    Attributes:
        event: The GPU event at this point. None if the device uses the host's clock.
        mark: The earlier event from which the time of ``event`` is measured.
    """

    host_s: float
    event: Any = None
    mark: Mark | None = None

    @property
    def is_past(self) -> bool:
        """Return whether the training stream has done all work that was issued before this moment was recorded."""
        # Do not wait for the work.
        return self.event is None or bool(self.event.query())

    @property
    def reached_s(self) -> float:
        """Return the time on the host's clock, in seconds, at which the training stream reached this recorded point."""
        # The stream has reached the point once it has done all work that was issued before the point was recorded.
        return self.host_s if self.mark is None else self.mark.date_s(self.event)

    def date_s(self, end: Completion) -> float:
        """Return the time, in seconds of the host's clock, at which an operation, such as a copy, has ended."""
        # Call this method only after the operation's end. The result is precise only if the operation ended within
        # seconds of the moment that this object records, because GPU events measure long times imprecisely.
        if self.mark is None or end.event is None:
            return end.end_s
        return self.mark.date_s(end.event)


class DeviceClock:
    """A clock for GPU events that stays precise in long runs.

    CUDA returns the time between two events in milliseconds in single precision: in steps of 0.25 ms after an hour, and
    of 4 ms after ten hours. Each event is therefore timed from a reference event shortly before it. Every training step
    records a new reference event. The times between reference events are added in double precision. Only the training
    thread uses this clock.
    """

    def __init__(self, event: Any, host: Callable[[], float] = time.perf_counter) -> None:
        self._host = host
        self.latest = Mark(event, host(), None, host)
        self._undated: deque[Mark] = deque()

    def mark(self, event: Any) -> None:
        """Make a GPU event the reference from which the times of later events are measured.

        The GPU need not have reached the event yet.
        """
        self.latest = Mark(event, None, self.latest, self._host)
        self._undated.append(self.latest)
        # Computed as early as possible, so that no chain of marks grows.
        while self._undated and self._undated[0].event.query():
            _ = self._undated.popleft().reached_s
