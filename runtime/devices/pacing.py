"""A pacer that makes emulated GPU operations last as long as they would on the emulated GPU.

Operations that run at the same time share bandwidth, by the same rules as in the simulator.
"""

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from ebbtide.simulator.engines.sharing import max_min_speeds


@dataclass(eq=False, slots=True)
class _Job:
    left_s: float  # seconds left at full speed
    demand: Mapping[str, float]
    speed: float = 1.0


class FluidPacer:
    """A pacer that makes concurrent emulated work last as long as it would on a GPU with given capacities.

    Concurrent work shares the capacities by max-min fairness, as in the simulator
    (`ebbtide.simulator.engines.sharing`). The pacer is thread-safe. Waiting threads sleep.
    """

    def __init__(self, capacities: Mapping[str, float]) -> None:
        """Start a pacer, which makes emulated work last as long as on a GPU with the given hardware resources.

        Args:
            capacities: Amount of each resource that is available per second, by the resource's name. For a link, this
                is its bytes per second. A resource without an entry is unlimited.
        """
        self._capacities = dict(capacities)
        self._active: list[_Job] = []
        self._changed = threading.Condition()
        self._now_s = time.perf_counter()

    @contextmanager
    def work(self, seconds: float, demand: Mapping[str, float]) -> Iterator[None]:
        """Make the ``with`` block last at least ``seconds``, the time that its work takes alone on the emulated GPU.

        The block lasts longer while concurrent blocks need the same resources, such as a link, because they share each
        resource.

        Args:
            seconds: Time that the work takes if no other work runs.
            demand: Amount of each resource that the work then uses per second, by the resource's name.
        """
        job = _Job(seconds, demand)
        self._begin(job)
        try:
            yield
        finally:
            self._end(job)

    def _begin(self, job: _Job) -> None:
        with self._changed:
            self._advance()
            if job.left_s > 0:
                self._active.append(job)
                self._share()

    def _end(self, job: _Job) -> None:
        with self._changed:
            self._advance()
            while job.left_s > 0:
                self._changed.wait(self._next_end_s())
                self._advance()

    def _share(self) -> None:
        speeds = max_min_speeds([job.demand for job in self._active], self._capacities)
        for job, speed in zip(self._active, speeds, strict=True):
            job.speed = speed
        self._changed.notify_all()

    def _next_end_s(self) -> float:
        return min((job.left_s / job.speed for job in self._active), default=0.0)

    def _advance(self) -> None:
        now_s = time.perf_counter()
        passed_s, self._now_s = now_s - self._now_s, now_s
        while passed_s > 0 and self._active:
            next_s = self._next_end_s()
            step_s = min(passed_s, next_s)
            for job in self._active:
                # The job that ends first ends exactly now, despite rounding errors.
                ends = step_s == next_s and job.left_s / job.speed <= next_s
                job.left_s = 0.0 if ends else job.left_s - step_s * job.speed
            passed_s -= step_s
            if any(job.left_s <= 0 for job in self._active):
                self._active = [job for job in self._active if job.left_s > 0]
                self._share()
