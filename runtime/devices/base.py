"""The interface that the executor needs of a device. The base class keeps device memory in host memory."""

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
    """Base of the three, and itself the one for unified memory.

    Buffers belong to who asked for them; any thread may call `copy`.

    Attributes:
        unified: the parameters on the device are host memory, so that the host kernel writes them
            in place and gradients need no copy.
    """

    name = "unified"
    unified = True
    cores: list[int] = []  # what host updates are bound to; empty: to nothing  # noqa: RUF012

    def lanes(self) -> dict[LaneName, Lane]:
        """Return one worker for each lane of the update."""
        return {name: Lane(name.value) for name in (*HOST_LANES, *DEVICE_LANES)}

    def close(self) -> None:
        """Give back what the lanes and buffers hold."""

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

    def fetch(self, to: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        """Copies on the lane of fetches to memory that its owner may drop before the copy ends."""
        self.copy(to, source, LaneName.H2D_FETCH, stream)

    def prepare(self, steps: Sequence[UpdateStep], tensors: int, gradient: torch.dtype, wire: torch.dtype) -> None:
        """Make ready what `update` needs, so that no training step pays for it: ``steps`` of every
        form, ``tensors`` of state.
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
        """Update one step in device memory. ``state`` is the fp32 master and its moments."""
        del stream
        host.host_update(state, grad, out, step, scale, threads=1, tail=tail)

    def current_event(self) -> Event | None:
        """Return the moment up to which the training stream has been filled, or None."""
        return None

    def mark(self, event: Event | None) -> Mark | None:
        """``event`` dates what comes after it; returns what dates the events before it.

        None where the host's clock is the device's.
        """
        del event
        return None

    def moment(self) -> Moment:
        """Now, for the training stream: when it has done what it was given so far."""
        return Moment(time.perf_counter())

    def training_streams(self) -> list[Any]:
        """Streams that a reader of parameters may be on; empty: the calling thread itself."""
        return []

    def training_waits(self, ends: Iterable[Completion]) -> None:
        """Make the training streams wait for ``ends``; without any, the calling thread.

        Raises:
            BackgroundError: one of them failed.
        """
        streams = self.training_streams() or [None]
        for end in ends:
            for stream in streams:
                end.wait_on(stream)

    def host_update(self, elements: int, *, out_of_place: bool = False) -> AbstractContextManager[None]:
        """Entered around the host kernel's update of so many parameters."""
        del elements, out_of_place
        return nullcontext()

    def leaving(self, source: torch.Tensor, stream: Any) -> torch.Tensor:
        """``source`` as a lane may still read it when its owner has dropped it, or written it
        again after `before_reuse`.
        """
        del stream
        return source

    def let_go(self, tensor: torch.Tensor) -> None:
        """``tensor`` is about to be dropped, but work issued to the current stream reads it."""

    def before_reuse(self, copied: Completion) -> None:
        """Called before the source of a gradient's copy is written again."""

    def empty_on(self, where: torch.device, like: torch.Tensor) -> torch.Tensor:
        """Uninitialised memory of a shape and dtype, for the training thread."""
        return torch.empty(like.shape, dtype=like.dtype, device=where)

    def fetch_sum(self, total: torch.Tensor, base: torch.Tensor, gradient: torch.Tensor, stream: Any) -> None:
        """``total`` = ``base``, from the host, + ``gradient``, on the lane of gradients."""
        self.copy(total, base, LaneName.H2D_GRADIENTS, stream)
        total.add_(gradient)
