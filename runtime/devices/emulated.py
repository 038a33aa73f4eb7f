"""An emulated GPU: threads make real copies and real arithmetic at given rates, on a machine without a GPU."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from ebbtide.runtime.devices.base import Device
from ebbtide.runtime.devices.pacing import FluidPacer
from ebbtide.runtime.kernels import host
from ebbtide.runtime.kernels.step import UpdateStep
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


class EmulatedDevice(Device):
    """An emulated GPU for development and tests: its memory is host memory and its streams are threads.

    It makes real copies and real arithmetic, optionally slowed down to given rates. A time measured on it says
    nothing about a real GPU. Copies share the emulated link, and updates share the emulated GPU with the work
    of `compute`. They share by max-min fairness, as in the simulator, but in real time.
    """

    name = "emulated"
    unified = False

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
        """Return a context manager that emulates a training kernel. Its ``with`` block lasts at least as long as the
        kernel.

        The block lasts longer if optimizer updates use the emulated GPU at the same time.

        Args:
            seconds: Time that the kernel takes alone on the emulated GPU.
        """
        return self._pacer.work(seconds, {"device": 1.0})

    def copy(self, to: torch.Tensor, source: torch.Tensor, lane: LaneName, stream: Any) -> None:
        del stream
        with self._crossing(to.nbytes, "d2h" if lane in D2H_LANES else "h2d"):
            host.copy(to, source)

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

    def leaving(self, source: torch.Tensor, stream: Any) -> torch.Tensor:
        del stream
        # Streams are threads here, so only a copy protects the source from being overwritten.
        return source.clone()
