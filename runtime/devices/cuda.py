"""A CUDA GPU: a stream per lane, page-locked host buffers of exact size."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any

import torch

from runtime.devices.base import DEVICE_LANES, Device
from runtime.devices.lane import Completion, Event, Lane
from runtime.hardware.cores import bound, update_cores
from runtime.kernels.rule import UpdateStep
from simulator.schedule import Lane as LaneName


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
        self._streams = {name: torch.cuda.Stream(self.index) for name in DEVICE_LANES}

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

    def prepare(self, steps: Sequence[UpdateStep], tensors: int, gradient: torch.dtype,
                wire: torch.dtype) -> None:  # fmt: skip
        from runtime.kernels.device import compile_for

        compile_for(steps, tensors, gradient, wire)

    def update(self, state: Sequence[torch.Tensor], grad: torch.Tensor, out: torch.Tensor,
               step: UpdateStep, scale: float, tail: int, stream: Any) -> None:  # fmt: skip
        from runtime.kernels.device import device_update

        # A kept gradient is dropped when the next one takes its place, which nothing makes wait for
        # this kernel: its memory may be handed out again only after it.
        grad.record_stream(stream)
        with torch.cuda.stream(stream):
            device_update(state, grad, out, step, scale, tail=tail)

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
