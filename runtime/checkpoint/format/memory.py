"""The sources of a checkpoint's bytes, and the buffers that they pass through."""

import contextlib
import ctypes
import mmap
import threading
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from ebbtide.runtime.hardware.pages import lock, unlock

ALIGNMENT = 4096  # of O_DIRECT: address, length and file offset


class Source(Protocol):
    """Bytes to write. ``subgroup`` is None if no update overwrites them."""

    @property
    def size_bytes(self) -> int: ...

    @property
    def subgroup(self) -> int | None: ...

    def address(self, offset: int) -> int | None:
        """Host address of a byte, for writing without a copy; None: not in host memory."""
        ...

    def copy_to(self, destination: int, offset: int, size_bytes: int) -> None:
        """Copy a range to a host address; return when it is there."""
        ...


@dataclass(frozen=True)
class HostBytes:
    """A range of host memory; ``owner`` keeps it alive."""

    start: int
    size_bytes: int
    owner: object
    subgroup: int | None = None

    def address(self, offset: int) -> int | None:
        return self.start + offset

    def copy_to(self, destination: int, offset: int, size_bytes: int) -> None:
        ctypes.memmove(destination, self.start + offset, size_bytes)  # releases the GIL

    @classmethod
    def of_tensor(cls, tensor: torch.Tensor, subgroup: int | None = None) -> "HostBytes":
        """Return the bytes of a contiguous host tensor, without a copy."""
        return cls(tensor.data_ptr(), tensor.numel() * tensor.element_size(), tensor, subgroup)

    @classmethod
    def of_bytes(cls, data: bytes) -> "HostBytes":
        buffer = ctypes.create_string_buffer(data, len(data))
        return cls(ctypes.addressof(buffer), len(data), buffer)


class DeviceBytes:
    """The bytes of a contiguous device tensor, copied D2H chunk by chunk on a stream of their own.

    The stream first waits for what the training stream had been given when this was made, so that
    it sees the values of this step; `LiveState.before_update` holds the next update back until the
    last chunk is on the host.
    """

    def __init__(self, tensor: torch.Tensor, subgroup: int | None) -> None:
        self._bytes = tensor.detach().reshape(-1).view(torch.uint8)
        self.size_bytes = self._bytes.numel()
        self.subgroup = subgroup
        self._ready = None
        if tensor.device.type == "cuda":
            self._ready = torch.cuda.Event()
            self._ready.record(torch.cuda.current_stream(tensor.device))

    def address(self, offset: int) -> int | None:
        return None

    def copy_to(self, destination: int, offset: int, size_bytes: int) -> None:
        target = torch.frombuffer(memory_at(destination, size_bytes), dtype=torch.uint8)
        chunk = self._bytes[offset : offset + size_bytes]
        if self._ready is None:
            target.copy_(chunk)
            return
        with _side_stream(chunk.device) as stream:
            stream.wait_event(self._ready)
            with torch.cuda.stream(stream):
                target.copy_(chunk, non_blocking=True)
            stream.synchronize()


_streams: defaultdict[torch.device, deque[torch.cuda.Stream]] = defaultdict(deque)


@contextlib.contextmanager
def _side_stream(device: torch.device) -> Iterator[torch.cuda.Stream]:
    """Return a stream that no other copy has meanwhile. Copies know no priority; theirs are of one block,
    so that none of training's waits for more than that.

    They are used again: CUDA's streams come from a pool of 32, and those of every new checkpoint's
    threads would soon be the lanes' own.
    """
    try:
        stream = _streams[device].pop()
    except IndexError:
        stream = torch.cuda.Stream(device)
    try:
        yield stream
    finally:
        _streams[device].append(stream)


def memory_at(address: int, size_bytes: int) -> ctypes.Array[ctypes.c_char]:
    """Return a writable buffer over existing memory; the caller keeps that memory alive."""
    return (ctypes.c_char * size_bytes).from_address(address)


class Slots:
    """Aligned host buffers of one size, reserved at once. Thread-safe.

    On a CUDA machine they are pinned, so that D2H copies into them run at full speed.

    Args:
        pinned: False for buffers that no copy from a device goes through: locking pages takes
            milliseconds in which the driver serves nobody else.
    """

    def __init__(self, count: int, slot_bytes: int, *, pinned: bool = True) -> None:
        self.slot_bytes = slot_bytes
        self._lock = threading.Lock()
        self._memory = mmap.mmap(-1, max(1, count) * slot_bytes)
        self._view = ctypes.c_char.from_buffer(self._memory)
        start = ctypes.addressof(self._view)
        self._free = [start + i * slot_bytes for i in range(count)]
        self.count = count
        self.peak = 0
        self._pinned = False
        self._start = start
        if pinned and count and torch.cuda.is_available():
            self._pinned = lock(start, count * slot_bytes) == 0  # else they are slower, no more

    def close(self) -> None:
        """Unpins and gives the memory back. Not what a writer that is stuck in the kernel still has
        a slot of: that goes with the object.
        """
        if self._pinned:
            unlock(self._start)
            self._pinned = False
        with self._lock:
            if len(self._free) < self.count or self._memory.closed:
                return
            self._free = []
            del self._view  # nothing can be unmapped while it is shown
            self._memory.close()

    def take(self) -> int | None:
        """Address of a free slot; None where all are in use."""
        with self._lock:
            if not self._free:
                return None
            slot = self._free.pop()
            self.peak = max(self.peak, self.count - len(self._free))
            return slot

    def give(self, slot: int) -> None:
        with self._lock:
            self._free.append(slot)
