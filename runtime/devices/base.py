"""The interface that the executor needs of a device. The base class is a device with unified memory."""

import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from ebbtide.runtime.devices.clock import Mark, Moment
from ebbtide.runtime.devices.lane import Completion, Event, Lane
from ebbtide.runtime.kernels import host
from ebbtide.runtime.kernels.step import UpdateStep
from ebbtide.simulator.schedule import Lane as LaneName

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
    """The base class of devices, and the device for unified memory, where host memory is device memory.

    A buffer belongs to the code that requested it. Any thread may call `copy`.

    Attributes:
        unified: True if the device's parameters are in host memory. The CPU kernel then writes them in place,
            and gradients need no copy.
    """

    name = "unified"
    unified = True
    cores: list[int] = []  # what host updates are bound to; empty: to nothing  # noqa: RUF012

    def lanes(self) -> dict[LaneName, Lane]:
        """Start one worker thread per lane of the optimizer update, and return the workers by lane name."""
        return {name: Lane(name.value) for name in (*HOST_LANES, *DEVICE_LANES)}

    def close(self) -> None:
        """Release the resources that the device's lanes and buffers hold."""

    def host_empty(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Return uninitialised host memory of exact size, which copies to and from the device use at full speed."""
        return torch.empty(elements, dtype=dtype)

    def host_adopt(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``tensor`` itself, or a copy of it in host memory that `host_empty` allocates."""
        return tensor

    def host_release(self, tensor: torch.Tensor) -> None:
        """Undo what `host_empty` did to a tensor's memory, such as page-locking, before the tensor is dropped."""

    def device_empty(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(elements, dtype=dtype)

    def copy(self, to: torch.Tensor, source: torch.Tensor, lane: LaneName, stream: Any) -> None:
        """Copy a tensor on a lane. Return when the copy is issued to ``stream``, or is complete."""
        del lane, stream
        host.copy(to, source)

    def fetch(self, to: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        """Copy parameters to device memory that its owner may drop before the copy ends."""
        self.copy(to, source, LaneName.H2D_FETCH, stream)

    def prepare(self, steps: Sequence[UpdateStep], tensors: int, gradient: torch.dtype, wire: torch.dtype) -> None:
        """Compile the kernels that `update` needs in advance, so that no training step waits for it.

        Args:
            steps: An optimizer step of every form that the kernels must handle.
            tensors: Number of tensors in a subgroup's optimizer state.
            gradient: Dtype of gradients.
            wire: Dtype of the model's parameters.
        """

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
        """Run one optimizer step on tensors in device memory. ``state`` has the fp32 master parameters and moments."""
        del stream
        host.host_update(state, grad, out, step, scale, threads=1, tail=tail)

    def current_event(self) -> Event | None:
        """Return an event that marks the present end of the training stream's work. None without a stream."""
        return None

    def mark(self, event: Event | None) -> Mark | None:
        """Make a GPU event the reference for the times of later events. Return the previous reference.

        None if device and host use the same clock.
        """
        del event
        return None

    def moment(self) -> Moment:
        """Return the moment at which the training stream will have finished the work issued to it so far."""
        return Moment(time.perf_counter())

    def training_streams(self) -> list[Any]:
        """Return the streams on which parameters may be read. Empty if the calling thread itself reads them."""
        return []

    def training_waits(self, ends: Iterable[Completion]) -> None:
        """Make the training streams wait for the given ops. Without streams, the calling thread waits.

        Raises:
            BackgroundError: One of the ops failed.
        """
        streams = self.training_streams() or [None]
        for end in ends:
            for stream in streams:
                end.wait_on(stream)

    def host_update(self, elements: int, *, out_of_place: bool = False) -> AbstractContextManager[None]:
        """Return a context that surrounds the CPU kernel's update of ``elements`` parameters."""
        del elements, out_of_place
        return nullcontext()

    def leaving(self, source: torch.Tensor, stream: Any) -> torch.Tensor:
        """Return a tensor that a lane can still read after the owner of ``source`` has dropped it.

        The owner may overwrite ``source`` only after `before_reuse`.
        """
        del stream
        return source

    def let_go(self, tensor: torch.Tensor) -> None:
        """Keep a tensor's memory allocated until work issued to the current stream has read it."""

    def before_reuse(self, copied: Completion) -> None:
        """Wait until a gradient's copy has ended, before the memory of the gradient is overwritten."""

    def empty_on(self, where: torch.device, like: torch.Tensor) -> torch.Tensor:
        """Return uninitialised memory with the shape and dtype of ``like``, for the training thread."""
        return torch.empty(like.shape, dtype=like.dtype, device=where)

    def fetch_sum(self, total: torch.Tensor, base: torch.Tensor, gradient: torch.Tensor, stream: Any) -> None:
        """Set ``total`` to ``base``, which is in host memory, plus ``gradient``, on the lane of gradient copies."""
        self.copy(total, base, LaneName.H2D_GRADIENTS, stream)
        total.add_(gradient)
