"""The interface of the device that a plan runs on. The base class is a device with unified memory."""

import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from ebbtide.runtime.devices.clock import Mark, Moment
from ebbtide.runtime.devices.lane import Completion, Event, LaneQueue
from ebbtide.runtime.hardware.cores import BackwardThreads
from ebbtide.runtime.kernels import host
from ebbtide.runtime.kernels.step import UpdateStep
from ebbtide.simulator.schedule import Lane as LaneName

if TYPE_CHECKING:
    from ebbtide.runtime.devices.passes import WatchedPasses

HOST_LANES = (LaneName.HOST, LaneName.STORAGE, LaneName.STORAGE_READ)
DEVICE_LANES = (
    LaneName.H2D,
    LaneName.H2D_PARAMETERS,
    LaneName.D2H,
    LaneName.DEVICE_UPDATE,
    LaneName.H2D_FETCH,
    LaneName.D2H_GRADIENTS,
    LaneName.H2D_GRADIENTS,
)


class Device:
    """The base class of the devices that a plan runs on. It is also the device for unified memory.

    With unified memory, GPU memory is host memory. A buffer belongs to the code that requested it. Any thread
    may call `copy`.

    Attributes:
        unified: True if the model's parameters are in host memory. The CPU kernel then writes them in place,
            and gradients need no copy.
        watched: The recorder of the GPU's waits in forward and backward. None if nobody measures them.
    """

    name = "unified"
    unified = True
    watched: "WatchedPasses | None" = None
    backward_threads = BackwardThreads()
    cores: list[int] = []  # what host updates are bound to; empty: to nothing  # noqa: RUF012

    def lanes(self) -> dict[LaneName, LaneQueue]:
        """Start one worker for each lane of the optimizer update, and return a dict from lane name to worker."""
        return {name: LaneQueue(name.value) for name in (*HOST_LANES, *DEVICE_LANES)}

    def close(self) -> None:
        """Release what the device holds for its lanes and buffers, such as CUDA streams and page-locked memory."""

    def host_empty(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised tensor in host memory that can be copied to and from the GPU at full speed."""
        # The memory has exactly the size of the tensor, and is not rounded up.
        return torch.empty(elements, dtype=dtype)

    def host_adopt(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``tensor`` itself if the GPU can copy from its memory at full speed, or a copy that it can."""
        return tensor

    def host_buffers(self) -> list[torch.Tensor]:
        """Return the page-locked buffers from `host_empty` that `host_release` has not released yet."""
        return []

    def host_release(self, tensor: torch.Tensor) -> None:
        """Undo the page lock of a host tensor's memory, so that the tensor from `host_empty` can be freed."""

    def device_empty(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(elements, dtype=dtype)

    def copy(self, to: torch.Tensor, source: torch.Tensor, lane: LaneName, stream: Any) -> None:
        """Copy a tensor. With a ``stream``, return once the copy is issued to it, otherwise when it is complete."""
        del lane, stream
        host.copy(to, source)

    def fetch(self, to: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        """Copy parameters from host to GPU memory. The owner of the GPU memory may free it before the copy ends."""
        self.copy(to, source, LaneName.H2D_FETCH, stream)

    def prepare(self, steps: Sequence[UpdateStep], tensors: int, gradient: torch.dtype, wire: torch.dtype) -> None:
        """Compile kernels that update ``tensors`` tensors, one for each variant in ``steps``, so that no step waits."""

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
        """Run one optimizer step on tensors in GPU memory, and write the model's new parameters to ``out``."""
        del stream
        host.host_update(state, grad, out, step, scale, threads=1, tail=tail)

    def current_event(self) -> Event | None:
        """Record a GPU event after the work issued so far to the training stream, and return it. None without CUDA."""
        return None

    def mark(self, event: Event | None) -> Mark | None:
        """Make a GPU event the reference from which the times of later events are measured."""
        del event
        return None

    def moment(self, stream: Any = None) -> Moment:
        """Record the end of the work issued to the training stream so far. The result tells later when that was."""
        del stream
        return Moment(time.perf_counter())

    def will_wait(self, ends: Iterable[Completion]) -> None:
        """Record that forward or backward will now wait for the end of the given operations."""
        # Nothing is recorded unless such waits are being measured (``watched``).
        if self.watched is not None:
            self.watched.will_wait(ends)

    def training_streams(self) -> list[Any]:
        """Return the CUDA streams on which forward and backward may read parameters. None on other devices."""
        return []

    def training_waits(self, ends: Iterable[Completion]) -> None:
        """Make the training streams wait for the given operations. Without streams, the calling thread waits.

        Raises:
            BackgroundError: One of the operations failed.
        """
        streams = self.training_streams() or [None]
        for end in ends:
            for stream in streams:
                end.wait_on(stream)

    def host_update(self, elements: int, *, out_of_place: bool = False) -> AbstractContextManager[None]:
        """Return a context manager around the CPU kernel's optimizer update of ``elements`` parameters."""
        del elements, out_of_place
        return nullcontext()

    def leaving(self, source: torch.Tensor, stream: Any) -> torch.Tensor:
        """Return a tensor that stays readable without ``source``. Overwrite ``source`` only after `before_reuse`."""
        del stream
        return source

    def let_go(self, tensor: torch.Tensor) -> None:
        """Keep a GPU tensor's memory from being reused until the work issued to the current stream has read it."""

    def before_reuse(self, copied: Completion) -> None:
        """Wait until a gradient's background copy to host memory has ended, so that it may be overwritten."""

    def empty_on(self, where: torch.device, like: torch.Tensor) -> torch.Tensor:
        """Return an uninitialised tensor. Only for the training thread: CUDA memory belongs to its current stream."""
        return torch.empty(like.shape, dtype=like.dtype, device=where)

    def fetch_sum(self, total: torch.Tensor, base: torch.Tensor, gradient: torch.Tensor, stream: Any) -> None:
        """Add a micro-batch's gradient to the sum of earlier micro-batches' gradients: ``total = base + gradient``."""
        self.copy(total, base, LaneName.H2D_GRADIENTS, stream)
        total.add_(gradient)
