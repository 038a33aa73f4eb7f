"""An emulated GPU with given rates of copies and updates.

Operations that run at the same time share bandwidth, by the same rules as in the simulator.
"""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from ebbtide.runtime.devices.choice import EmulatedDevice
from ebbtide.runtime.kernels.step import UpdateStep
from ebbtide.simulator.engines.reference import max_min_speeds
from ebbtide.simulator.machine import OUT_OF_PLACE
from ebbtide.simulator.schedule import D2H_LANES
from ebbtide.simulator.schedule import Lane as LaneName


@dataclass(frozen=True, slots=True)
class EmulatedRates:
    """The speeds that an emulated machine has for copies and optimizer updates.

    None for a speed means that the work is not slowed down.

    Attributes:
        duplex_factor: Bytes per second of concurrent copies in both directions together, divided by the sum of the
            bytes per second of each direction alone.
    """

    h2d_bytes_per_s: float | None = None
    d2h_bytes_per_s: float | None = None
    device_adam_params_per_s: float | None = None
    host_adam_params_per_s: float | None = None
    host_adam_out_of_place: float = OUT_OF_PLACE
    duplex_factor: float = 1.0


@dataclass(eq=False, slots=True)
class _PacedWork:
    left_s: float  # seconds left at full speed
    demand: Mapping[str, float]
    speed: float = 1.0


class FluidPacer:
    """A pacer that makes concurrent emulated work last as long as it would on a GPU with given capacities.

    Concurrent work shares the capacities by max-min fairness, as in the simulator
    (`ebbtide.simulator.engines.reference`). The pacer is thread-safe. Waiting threads sleep.
    """

    def __init__(self, capacities: Mapping[str, float]) -> None:
        """Start a pacer, which makes emulated work last as long as on a GPU with the given hardware resources.

        Args:
            capacities: Amount of each resource that is available per second, by the resource's name. For a link, this
                is its bytes per second. A resource without an entry is unlimited.
        """
        self._capacities = dict(capacities)
        self._active: list[_PacedWork] = []
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
        job = _PacedWork(seconds, demand)
        self._begin(job)
        try:
            yield
        finally:
            self._end(job)

    def _begin(self, job: _PacedWork) -> None:
        with self._changed:
            self._advance()
            if job.left_s > 0:
                self._active.append(job)
                self._share()

    def _end(self, job: _PacedWork) -> None:
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


class PacedDevice(EmulatedDevice):
    """An emulated GPU that is slowed down to given rates.

    Copies share the emulated link, and updates share the emulated GPU with the work of `compute`. They share by max-min
    fairness, as in the simulator, but in real time.
    """

    def __init__(self, rates: EmulatedRates = EmulatedRates()) -> None:
        self.rates = rates
        capacities = {"device": 1.0}
        if rates.h2d_bytes_per_s is not None:
            capacities["h2d"] = rates.h2d_bytes_per_s
        if rates.d2h_bytes_per_s is not None:
            capacities["d2h"] = rates.d2h_bytes_per_s
        if len(capacities) == 3:
            capacities["link"] = rates.duplex_factor * (capacities["h2d"] + capacities["d2h"])
        self._pacer = FluidPacer(capacities)

    def compute(self, seconds: float) -> AbstractContextManager[None]:
        """Return a context manager that emulates a training kernel."""
        return self._pacer.work(seconds, {"device": 1.0})

    def copy(self, to: torch.Tensor, source: torch.Tensor, lane: LaneName, stream: Any) -> None:
        with self._crossing(to.nbytes, "d2h" if lane in D2H_LANES else "h2d"):
            super().copy(to, source, lane, stream)

    def _crossing(self, size_bytes: int, way: str) -> AbstractContextManager[None]:
        down = way == "d2h"
        rate = self.rates.d2h_bytes_per_s if down else self.rates.h2d_bytes_per_s
        if rate is None:
            return nullcontext()
        return self._pacer.work(size_bytes / rate, {way: rate, "link": rate})

    def update(
        self,
        state: Sequence[torch.Tensor],
        grad: torch.Tensor,
        out: torch.Tensor,
        step: UpdateStep,
        scale: float,
        tail: int,
        stream: Any,
    ) -> None:
        rate = self.rates.device_adam_params_per_s
        with nullcontext() if rate is None else self.compute(grad.numel() / rate):
            super().update(state, grad, out, step, scale, tail, stream)

    def host_update(self, elements: int, *, out_of_place: bool = False) -> AbstractContextManager[None]:
        rate = self.rates.host_adam_params_per_s
        if rate is None:
            return nullcontext()
        slower = self.rates.host_adam_out_of_place if out_of_place else 1.0
        return self._pacer.work(elements / (slower * rate), {})
