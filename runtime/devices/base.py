"""Where device memory is and how bytes get there: CUDA, emulated, or unified with the host."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from runtime.devices.lane import Completion, Event, Lane
from runtime.devices.pacing import FluidPacer
from runtime.hardware.cores import bound, update_cores
from runtime.kernels import host
from runtime.kernels.adam import AdamStep
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
    cores: list[int] = []  # what host updates are bound to; empty: to nothing  # noqa: RUF012

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

    def host_update(self, elements: int) -> AbstractContextManager[None]:
        """Entered around the host kernel's update of so many parameters."""
        del elements
        return nullcontext()

    def store_gradient(self, home: torch.Tensor, source: torch.Tensor) -> Completion | None:
        """Starts the copy of a gradient on the device to its home on the host.

        ``source`` may be dropped at once, but written again only after the copy.

        Returns:
            What to wait for before ``home`` is read; None: it is there.
        """
        home.copy_(source)
        return None

    def before_reuse(self, copied: Completion) -> None:
        """Called before the source of a gradient's copy is written again."""

    def fetch_gradient(
        self, home: torch.Tensor, to: torch.device, arrival: Completion | None
    ) -> torch.Tensor:
        """A copy on the device of what ``home`` holds after ``arrival``."""
        if arrival is not None:
            arrival.wait_host()
        return home.to(to, copy=True)


@dataclass(frozen=True, slots=True)
class EmulatedRates:
    """Speeds the emulated device is slowed down to; None: as fast as the host does it.

    ``duplex_factor``: what both directions of the link carry together, over the sum of the two.
    """

    h2d_bytes_per_s: float | None = None
    d2h_bytes_per_s: float | None = None
    device_adam_params_per_s: float | None = None
    host_adam_params_per_s: float | None = None
    duplex_factor: float = 1.0


class EmulatedDevice(Device):
    """A device that is not there: its memory is other host memory, its streams are threads.

    Real copies and real arithmetic, optionally slowed to given rates, for development and tests.
    No figure taken on it is a GPU figure. Copies share the link, and updates share the device with
    what `compute` stands for, by max-min fairness: the simulator's model, in real time.
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
        self._gradients: Lane | None = None

    def close(self) -> None:
        if self._gradients is not None:
            self._gradients.close()
            self._gradients = None

    def compute(self, seconds: float) -> AbstractContextManager[None]:
        """Stands for a kernel of the training loop that takes so long with the device to itself."""
        return self._pacer.work(seconds, {"device": 1.0})

    def copy(self, to: torch.Tensor, source: torch.Tensor, lane: LaneName, stream: Any) -> None:
        del stream
        with self._crossing(to.nbytes, "d2h" if lane == LaneName.D2H else "h2d"):
            host.copy(to, source)

    def _crossing(self, size_bytes: int, way: str) -> AbstractContextManager[None]:
        down = way == "d2h"
        rate = self.rates.d2h_bytes_per_s if down else self.rates.h2d_bytes_per_s
        if rate is None:
            return nullcontext()
        return self._pacer.work(size_bytes / rate, {way: rate, "link": rate})

    def adam(self, state: Sequence[torch.Tensor], grad: torch.Tensor, out: torch.Tensor,
             step: AdamStep, scale: float, tail: int, stream: Any) -> None:  # fmt: skip
        rate = self.rates.device_adam_params_per_s
        with nullcontext() if rate is None else self.compute(grad.numel() / rate):
            super().adam(state, grad, out, step, scale, tail, stream)

    def host_update(self, elements: int) -> AbstractContextManager[None]:
        rate = self.rates.host_adam_params_per_s
        return nullcontext() if rate is None else self._pacer.work(elements / rate, {})

    def store_gradient(self, home: torch.Tensor, source: torch.Tensor) -> Completion | None:
        if self._gradients is None:
            self._gradients = Lane("gradients")
        # Where streams are threads, nothing else keeps the source from being written again.
        crossing = source.clone()
        completion = Completion("gradient D2H")
        self._gradients.submit(
            lambda: self.copy(home, crossing, LaneName.D2H, None), [], completion
        )
        return completion

    def fetch_gradient(
        self, home: torch.Tensor, to: torch.device, arrival: Completion | None
    ) -> torch.Tensor:
        if arrival is not None:
            arrival.wait_host()
        with self._crossing(home.nbytes, "h2d"):
            return home.to(to, copy=True)


class CudaDevice(Device):
    """A CUDA GPU: a stream per lane, page-locked host buffers of exact size.

    PyTorch's own pinned allocator rounds up to powers of two, so buffers are ordinary host memory
    that is registered with CUDA afterwards (cudaHostRegister).
    """

    name = "cuda"
    unified = False

    def __init__(self) -> None:
        self.index = torch.cuda.current_device()
        self.cores = update_cores(_pci_address(self.index))
        self._registered: dict[int, torch.Tensor] = {}  # by address
        self._gradients = torch.cuda.Stream(self.index)
        # Updates must not delay the training stream's own kernels.
        self._streams = {name: torch.cuda.Stream(self.index) for name in _DEVICE_LANES}

    def lanes(self) -> dict[LaneName, Lane]:
        lanes = {LaneName.HOST: Lane(LaneName.HOST.value, cores=self.cores)}
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
        if not elements:
            return torch.empty(0, dtype=dtype)
        tensor = _on_own_pages(elements, dtype)
        self._register(tensor)
        return tensor

    def _register(self, tensor: torch.Tensor) -> None:
        with bound(self.cores):  # pages are backed where they are touched first
            tensor.view(torch.uint8)[::4096].fill_(0)
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
        # A kept gradient is dropped when the next one takes its place, which nothing makes wait for
        # this kernel: its memory may be handed out again only after it.
        grad.record_stream(stream)
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

    def store_gradient(self, home: torch.Tensor, source: torch.Tensor) -> Completion | None:
        # The copy waits for the reduction that wrote `source`; the allocator may hand its memory
        # out again only after the copy, hence record_stream.
        self._gradients.wait_stream(torch.cuda.current_stream(self.index))
        self.copy(home, source, LaneName.D2H, self._gradients)
        source.record_stream(self._gradients)
        return Completion.done(_record_event(self._gradients))

    def before_reuse(self, copied: Completion) -> None:
        # DeepSpeed's reduction stream, which is the current one here: backward goes on.
        copied.wait_on(torch.cuda.current_stream(self.index))

    def fetch_gradient(
        self, home: torch.Tensor, to: torch.device, arrival: Completion | None
    ) -> torch.Tensor:
        if arrival is not None:
            arrival.wait_on(torch.cuda.current_stream(self.index))
        return home.to(to, non_blocking=True)


def _on_own_pages(elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Host memory that shares no page with anything else: page locks reach no neighbour, and
    O_DIRECT writes of a checkpoint take it as it is.
    """
    memory = mmap.mmap(-1, elements * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype, count=elements)


def _pci_address(index: int) -> str | None:
    found = torch.cuda.get_device_properties(index)
    parts = [getattr(found, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if any(part is None for part in parts):
        return None
    domain, bus, device = parts
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"


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
