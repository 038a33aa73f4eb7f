"""Times of GPU events in seconds of the host's clock, precise even in long training runs."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class Mark:
    """A GPU event and, once known, the time at which the GPU reached it."""

    __slots__ = ("_before", "_host", "_reached_s", "_recorded_s", "event")

    def __init__(self, event: Any, reached_s: float | None, before: "Mark | None", host: Callable[[], float]) -> None:
        self.event = event
        self._reached_s = reached_s
        self._host, self._recorded_s = host, host()
        self._before = before

    @property
    def reached_s(self) -> float:
        """Return the time, on the host's clock, at which the GPU reached this event. The event must have been
        reached.
        """
        if self._reached_s is None:
            assert self._before is not None
            dated_s = self._before.date_s(self.event)
            # The two clocks drift apart (some ms a minute): no event is reached before it was
            # recorded, nor after somebody saw that it was.
            self._reached_s = min(max(dated_s, self._recorded_s), self._host())
            self._before = None  # else all marks since the beginning would stay
        return self._reached_s

    def date_s(self, event: Any) -> float:
        """Return the time at which the GPU reached another event, preferably one within seconds of this event."""
        return self.reached_s + float(self.event.elapsed_time(event)) / 1e3


@dataclass(frozen=True, slots=True)
class Moment:
    """A point in time of the training stream, on which forward and backward run.

    Attributes:
        event: the event on that stream. None: the device uses the host's clock.
        mark: the mark that dates the event.
    """

    host_s: float
    event: Any = None
    mark: Mark | None = None

    @property
    def is_past(self) -> bool:
        """Return whether the training stream has passed this moment, without waiting."""
        return self.event is None or bool(self.event.query())

    @property
    def reached_s(self) -> float:
        """Return the time of this moment on the host's clock. The moment must be past."""
        return self.host_s if self.mark is None else self.mark.date_s(self.event)


class DeviceClock:
    """A clock that dates each GPU event relative to a reference event shortly before it.

    CUDA returns the time between two events in milliseconds in single precision: in steps of 0.25 ms
    after an hour, and of 4 ms after ten hours. Each training step therefore leaves a reference event,
    dated relative to the previous one, and sums have double precision. Only the training thread uses it.
    """

    def __init__(self, event: Any, host: Callable[[], float] = time.perf_counter) -> None:
        """Start a clock for GPU events.

        Args:
            event: A GPU event that has just been synchronised with.
            host: A function that returns the time on the host's clock.
        """
        self._host = host
        self.latest = Mark(event, host(), None, host)
        self._undated: deque[Mark] = deque()

    def mark(self, event: Any) -> None:
        """Make a GPU event the reference for the times of later events. It need not have been reached yet."""
        self.latest = Mark(event, None, self.latest, self._host)
        self._undated.append(self.latest)
        # Dated as soon as can be, so that no chain of marks grows.
        while self._undated and self._undated[0].event.query():
            _ = self._undated.popleft().reached_s
