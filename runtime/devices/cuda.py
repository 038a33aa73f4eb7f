"""The device class for CUDA GPUs, on which training under a plan copies and updates optimizer state.

A CUDA device has one CUDA stream per lane (a queue of copies in one direction, or of kernels). Its host buffers are
page-locked, and their sizes are not rounded up to powers of two.
"""

import time
import weakref
from collections.abc import Collection, Sequence
from typing import Any

import torch
from ebbtide.runtime.devices.base import DEVICE_LANES, HOST_LANES, Device
from ebbtide.runtime.devices.clock import DeviceClock, Mark, Moment
from ebbtide.runtime.devices.lane import Completion, Event, LaneQueue
from ebbtide.runtime.hardware.cores import BackwardThreads, bind, spared_cores, update_cores
from ebbtide.runtime.hardware.pages import back, lock, own_pages, unlock
from ebbtide.runtime.hardware.pci import address_of
from ebbtide.runtime.kernels.step import UpdateStep
from ebbtide.simulator.schedule import Lane as LaneName

# Copies of one direction share a copy engine. With pieces, an urgent copy (parameters that forward waits for) waits for
# one piece of another stream's copy (1 ms at 25 GB/s), and not for the whole copy.
PIECE_BYTES = 32 * 2**20


class CudaDevice(Device):
    """A CUDA GPU on which a plan runs, with one CUDA stream per lane and with page-locked host buffers.

    PyTorch's own pinned allocator rounds sizes up to powers of two. Buffers are therefore ordinary host memory that is
    registered with CUDA afterwards (cudaHostRegister).
    """

    name = "cuda"
    unified = False

    def __init__(self, masks: Sequence[Collection[int]] = ()) -> None:
        self.index = torch.cuda.current_device()
        gpus = [address_of(torch.cuda.get_device_properties(index)) for index in range(torch.cuda.device_count())]
        address = gpus[self.index]
        self.cores = update_cores(address, gpus=gpus, masks=masks)
        self.backward_threads = BackwardThreads(spared_cores(address, gpus=gpus, masks=masks))
        self._registered: dict[int, torch.Tensor] = {}  # keyed by address
        # If pages are unmapped while they are locked, CUDA treats the next mapping at this address as locked. At exit,
        # the system releases everything anyway.
        weakref.finalize(self, _unlock_all, self.index, self._registered).atexit = False
        # CUDA's default priority is the lowest one, so no kernel of these streams runs before the training stream's own
        # kernels.
        self._streams = {name: torch.cuda.Stream(self.index) for name in DEVICE_LANES}
        now = _record_event(torch.cuda.current_stream(self.index))
        now.synchronize()
        self._clock = DeviceClock(now)

    def lanes(self) -> dict[LaneName, LaneQueue]:
        lanes = {name: LaneQueue(name.value, begin=self._begin_host_lane) for name in HOST_LANES}
        current = torch.cuda.current_stream(self.index)
        for name, stream in self._streams.items():
            # Staging slots and resident state were allocated and written in the order of the current stream, and
            # earlier users of this memory may not have finished.
            stream.wait_stream(current)
            # The training thread itself issues copies of gradients, because the rest of backward follows them.
            own = name not in (LaneName.D2H_GRADIENTS, LaneName.H2D_GRADIENTS)
            lanes[name] = LaneQueue(name.value, stream, _record_event, self._choose_gpu, own_thread=own)
        return lanes

    def _choose_gpu(self) -> None:
        torch.cuda.set_device(self.index)

    def _begin_host_lane(self) -> None:
        self._choose_gpu()
        bind(self.cores)

    def close(self) -> None:
        self.backward_threads.let_go()
        torch.cuda.synchronize(self.index)
        _unlock_all(self.index, self._registered)

    def host_buffers(self) -> list[torch.Tensor]:
        return [*self._registered.values()]

    def host_release(self, tensor: torch.Tensor) -> None:
        if self._registered.pop(tensor.data_ptr(), None) is not None:
            torch.cuda.synchronize(self.index)  # behind an error nobody has waited for all copies
            unlock(tensor.data_ptr())

    def host_empty(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        if not elements:
            return torch.empty(0, dtype=dtype)
        tensor = own_pages(elements, dtype)
        self._register(tensor)
        return tensor

    def _register(self, tensor: torch.Tensor) -> None:
        back(tensor.data_ptr(), tensor.nbytes, self.cores)
        error = lock(tensor.data_ptr(), tensor.nbytes)
        if error != 0:
            raise MemoryError(
                f"page-locking {tensor.nbytes} bytes of host memory failed with CUDA error "
                f"{error}. Free host memory, raise the container's limit (docker run --memory), "
                "or train with fewer parameters per rank"
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
        piece = max(1, PIECE_BYTES // to.element_size())
        with torch.cuda.stream(stream):
            for part, of in zip(to.split(piece), source.split(piece), strict=True):
                part.copy_(of, non_blocking=True)

    def fetch(self, to: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        to.record_stream(stream)
        super().fetch(to, source, stream)

    def prepare(self, steps: Sequence[UpdateStep], tensors: int, gradient: torch.dtype, wire: torch.dtype) -> None:
        from ebbtide.runtime.kernels.device import compile_for

        compile_for(steps, tensors, gradient, wire)

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
        from ebbtide.runtime.kernels.device import device_update

        # The next gradient replaces a kept one without waiting for this kernel, so the allocator must not reuse the old
        # one's memory before the kernel ends.
        grad.record_stream(stream)
        with torch.cuda.stream(stream):
            device_update(state, grad, out, step, scale, tail=tail)

    def current_event(self) -> Event | None:
        return _record_event(torch.cuda.current_stream(self.index))

    def mark(self, event: Event | None) -> Mark | None:
        before = self._clock.latest
        self._clock.mark(event)
        return before

    def moment(self, stream: Any = None) -> Moment:
        event = self.current_event() if stream is None else _record_event(stream)
        return Moment(time.perf_counter(), event, self._clock.latest)

    def let_go(self, tensor: torch.Tensor) -> None:
        tensor.record_stream(torch.cuda.current_stream(self.index))

    def training_streams(self) -> list[Any]:
        # DeepSpeed gathers on its own stream, which is current here. The compute stream waits for this stream only
        # before a module that needs the gathered parameters, so it continues with the present layer while the next
        # layer's parameters are updated.
        return [torch.cuda.current_stream(self.index)]

    def leaving(self, source: torch.Tensor, stream: Any) -> torch.Tensor:
        source.record_stream(stream)  # the allocator reuses the memory only after the copy
        return source

    def before_reuse(self, copied: Completion) -> None:
        # DeepSpeed's reduction stream is the current one here, so only this stream waits, and backward continues.
        copied.wait_on(torch.cuda.current_stream(self.index))

    def fetch_sum(self, total: torch.Tensor, base: torch.Tensor, gradient: torch.Tensor, stream: Any) -> None:
        for tensor in (total, gradient):
            tensor.record_stream(stream)
        self.copy(total, base, LaneName.H2D_GRADIENTS, stream)
        with torch.cuda.stream(stream):
            total.add_(gradient)


def _unlock_all(index: int, registered: dict[int, torch.Tensor]) -> None:
    if registered:
        torch.cuda.synchronize(index)
    while registered:
        unlock(registered.popitem()[0])


def _record_event(stream: Any) -> Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event
