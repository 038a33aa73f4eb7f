"""Where device memory is and how bytes get there: CUDA, emulated, or unified with the host."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from runtime.kernels import host
from runtime.kernels.adam_step import AdamStep
from runtime.lane import Event, Lane
from simulator.schedule import Lane as LaneName

_DEVICE_LANES = (LaneName.H2D, LaneName.H2D_PARAMETERS, LaneName.D2H, LaneName.DEVICE_UPDATE)


class Device:
    """Base of the three. Buffers belong to who asked for them; any thread may call `copy`.

    Attributes:
        unified: the parameters on the device are host memory, so that the host kernel writes them
            in place and gradients need no copy.
    """

    name = "unified"
    unified = True

    def lanes(self) -> dict[LaneName, Lane]:
        """One worker per lane of the update."""
        names = (LaneName.HOST, *_DEVICE_LANES)
        return {name: Lane(name.value) for name in names}

    def close(self) -> None:
        """Gives back what the lanes and buffers hold."""

    def host_empty(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised host memory that copies may run from at full speed, of exact size."""
        return torch.empty(elements, dtype=dtype)

    def host_adopt(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` itself, or a copy of it in memory as `host_empty` gives it."""
        return tensor

    def host_release(self, tensor: torch.Tensor) -> None:
        """``tensor`` is about to be dropped: what `host_empty` did to its memory is undone."""

    def device_empty(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(elements, dtype=dtype)

    def copy(self, to: torch.Tensor, source: torch.Tensor, lane: LaneName, stream: Any) -> None:
        """Copies on ``lane``; returns once the copy is issued to ``stream`` (or done)."""
        del lane, stream
        host.copy(to, source)

    def adam(self, state: Sequence[torch.Tensor], grad: torch.Tensor, out: torch.Tensor,
             step: AdamStep, scale: float, tail: int, stream: Any) -> None:  # fmt: skip
        """One step of Adam in device memory; ``state`` is (p, m, v) in fp32."""
        del stream
        p, m, v = state
        host.host_adam(p, m, v, grad, out, step, scale, threads=1, tail=tail)

    def current_event(self) -> Event | None:
        """The moment up to which the training stream has been filled, or None."""
        return None

    def training_streams(self) -> list[Any]:
        """Streams that a reader of parameters may be on; empty: the calling thread itself."""
        return []

    def side_stream(self) -> Any | None:
        """A stream for gradient copies that start in backward, or None."""
        return None


@dataclass(frozen=True, slots=True)
class EmulatedRates:
    """Speeds the emulated device is slowed down to; None: as fast as the host does it."""

    h2d_bytes_per_s: float | None = None
    d2h_bytes_per_s: float | None = None
    device_adam_params_per_s: float | None = None


class EmulatedDevice(Device):
    """A device that is not there: its memory is other host memory, its streams are threads.

    Real copies and real arithmetic, optionally slowed to given rates, for development and tests.
    No figure taken on it is a GPU figure. Both H2D lanes share one link, as on a GPU.
    """

    name = "emulated"
    unified = False

    def __init__(self, rates: EmulatedRates = EmulatedRates()) -> None:
        self.rates = rates
        self._links = {name: threading.Lock() for name in ("h2d", "d2h", "compute")}

    def copy(self, to: torch.Tensor, source: torch.Tensor, lane: LaneName, stream: Any) -> None:
        del stream
        down = lane == LaneName.D2H
        rate = self.rates.d2h_bytes_per_s if down else self.rates.h2d_bytes_per_s
        with self._links["d2h" if down else "h2d"], _AtLeast(to.nbytes, rate):
            host.copy(to, source)

    def adam(self, state: Sequence[torch.Tensor], grad: torch.Tensor, out: torch.Tensor,
             step: AdamStep, scale: float, tail: int, stream: Any) -> None:  # fmt: skip
        with self._links["compute"], _AtLeast(grad.numel(), self.rates.device_adam_params_per_s):
            super().adam(state, grad, out, step, scale, tail, stream)


class _AtLeast:
    """Sleeps out the rest of ``amount / rate`` seconds on exit."""

    def __init__(self, amount: float, rate: float | None) -> None:
        self.duration_s = amount / rate if rate else 0.0

    def __enter__(self) -> None:
        self.start_s = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        left_s = self.duration_s - (time.perf_counter() - self.start_s)
        if left_s > 0:
            time.sleep(left_s)


class CudaDevice(Device):
    """A CUDA GPU: a stream per lane, page-locked host buffers of exact size.

    PyTorch's own pinned allocator rounds up to powers of two, so buffers are ordinary host memory
    that is registered with CUDA afterwards (cudaHostRegister).
    """

    name = "cuda"
    unified = False

    def __init__(self) -> None:
        self.index = torch.cuda.current_device()
        self._registered: dict[int, torch.Tensor] = {}  # by address
        self._gradients = torch.cuda.Stream(self.index)
        # Updates must not delay the training stream's own kernels.
        self._streams = {name: torch.cuda.Stream(self.index) for name in _DEVICE_LANES}

    def lanes(self) -> dict[LaneName, Lane]:
        lanes = {LaneName.HOST: Lane(LaneName.HOST.value)}
        for name, stream in self._streams.items():
            lanes[name] = Lane(name.value, stream, _record_event)
        return lanes

    def close(self) -> None:
        torch.cuda.synchronize(self.index)
        for tensor in list(self._registered.values()):
            self.host_release(tensor)

    def host_release(self, tensor: torch.Tensor) -> None:
        if self._registered.pop(tensor.data_ptr(), None) is not None:
            torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())

    def host_empty(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        tensor = torch.empty(elements, dtype=dtype)
        if elements:
            self._register(tensor)
        return tensor

    def _register(self, tensor: torch.Tensor) -> None:
        tensor.view(torch.uint8)[::4096].fill_(0)  # back the pages before they are locked
        error = torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)
        if int(error) != 0:
            raise MemoryError(
                f"page-locking {tensor.nbytes} bytes of host memory failed with CUDA error "
                f"{int(error)}: raise the limit (ulimit -l), or use a smaller model per rank"
            )
        self._registered[tensor.data_ptr()] = tensor

    def host_adopt(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.numel() or (tensor.device.type == "cpu" and tensor.is_pinned()):
            return tensor
        pinned = self.host_empty(tensor.numel(), tensor.dtype)
        pinned.copy_(tensor)
        return pinned

    def device_empty(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(elements, dtype=dtype, device=f"cuda:{self.index}")

    def copy(self, to: torch.Tensor, source: torch.Tensor, lane: LaneName, stream: Any) -> None:
        del lane
        with torch.cuda.stream(stream):
            to.copy_(source, non_blocking=True)

    def adam(self, state: Sequence[torch.Tensor], grad: torch.Tensor, out: torch.Tensor,
             step: AdamStep, scale: float, tail: int, stream: Any) -> None:  # fmt: skip
        from runtime.kernels.device import device_adam

        p, m, v = state
        with torch.cuda.stream(stream):
            device_adam(p, m, v, grad, out, step, scale, tail=tail)

    def current_event(self) -> Event | None:
        return _record_event(torch.cuda.current_stream(self.index))

    def training_streams(self) -> list[Any]:
        # DeepSpeed gathers on its own stream (current in the caller) and computes on the default
        # one; with one rank a gather is an alias that only the default stream reads.
        current = torch.cuda.current_stream(self.index)
        default = torch.cuda.default_stream(self.index)
        return [current] if current == default else [current, default]

    def side_stream(self) -> Any | None:
        return self._gradients


def _record_event(stream: Any) -> Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event


def choose_device(kind: str = "auto") -> Device:
    """``auto``: CUDA where DeepSpeed runs on it, unified host memory elsewhere.

    Raises:
        ValueError: an unknown kind, or CUDA where there is none.
    """
    from deepspeed.accelerator import get_accelerator

    on_cuda = get_accelerator()._name == "cuda"
    if kind == "auto":
        kind = "cuda" if on_cuda else "unified"
    if kind == "cuda" and not on_cuda:
        raise ValueError("device 'cuda' needs a CUDA GPU, but DeepSpeed found none: use 'auto'")
    if kind in ("unified", "emulated") and on_cuda:
        raise ValueError(
            f"device {kind!r} is for machines without a GPU, but DeepSpeed runs on CUDA: use 'auto'"
        )
    choices = {"cuda": CudaDevice, "emulated": EmulatedDevice, "unified": Device}
    if kind not in choices:
        raise ValueError(f"device must be 'auto' or one of {sorted(choices)}, but got {kind!r}")
    chosen: Device = choices[kind]()
    return chosen
