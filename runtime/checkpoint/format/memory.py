"""Classes that give a checkpoint the bytes of tensors in host or GPU memory, and host buffers to which some bytes are
copied before a checkpoint writes them.
"""

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

ALIGNMENT = 4096  # required by O_DIRECT for addresses, lengths and file offsets


def padded(size_bytes: int) -> int:
    """Return a number of bytes rounded up to whole sectors, as direct I/O requires."""
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT


class Source(Protocol):
    """A source of bytes that a checkpoint writes, such as a tensor.

    ``subgroup`` is the subgroup whose optimizer update overwrites the bytes. None if no update overwrites them.
    """

    @property
    def size_bytes(self) -> int: ...

    @property
    def subgroup(self) -> int | None: ...

    def address(self, offset: int) -> int | None:
        """Return the host address of byte ``offset``, or None if the bytes must first be copied to a host buffer."""
        ...

    def copy_to(self, destination: int, offset: int, size_bytes: int) -> None:
        """Copy a range of the source's bytes to a host address. Return when the copy is complete."""
        ...


@dataclass(frozen=True)
class HostBytes:
    """A range of host memory to write in a checkpoint. ``owner`` keeps the memory alive."""

    start: int
    size_bytes: int
    owner: object
    subgroup: int | None = None

    def address(self, offset: int) -> int | None:
        return self.start + offset

    def copy_to(self, destination: int, offset: int, size_bytes: int) -> None:
        ctypes.memmove(destination, self.start + offset, size_bytes)  # releases the GIL

    @classmethod
    def of_tensor(cls, tensor: torch.Tensor) -> "HostBytes":
        """Return a contiguous host tensor's bytes as a source for a checkpoint to write, without a copy."""
        return cls(tensor.data_ptr(), tensor.numel() * tensor.element_size(), tensor)

    @classmethod
    def of_bytes(cls, data: bytes) -> "HostBytes":
        buffer = ctypes.create_string_buffer(data, len(data))
        return cls(ctypes.addressof(buffer), len(data), buffer)


class DeviceBytes:
    """The bytes of a contiguous GPU tensor for a checkpoint, copied to the host chunk by chunk on a separate stream.

    The stream first waits for the work issued to the training stream before this object was created, so that it copies
    the values of this step. `LiveState.before_update` delays the next update until the last chunk is on the host.
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
        # A thread begins with GPU 0, and to go back to it from a stream would take memory there, of each rank.
        with torch.cuda.device(chunk.device), _side_stream(chunk.device) as stream, torch.cuda.stream(stream):
            stream.wait_event(self._ready)
            target.copy_(chunk, non_blocking=True)
            stream.synchronize()


_streams: defaultdict[torch.device, deque[torch.cuda.Stream]] = defaultdict(deque)


@contextlib.contextmanager
def _side_stream(device: torch.device) -> Iterator[torch.cuda.Stream]:
    try:
        stream = _streams[device].pop()
    except IndexError:
        stream = torch.cuda.Stream(device)
    try:
        yield stream
    finally:
        _streams[device].append(stream)


def memory_at(address: int, size_bytes: int) -> ctypes.Array[ctypes.c_char]:
    """Return a writable buffer over ``size_bytes`` bytes of host memory at ``address``."""
    # The caller must keep the memory alive.
    return (ctypes.c_char * size_bytes).from_address(address)


def view_at(address: int, size_bytes: int) -> memoryview:
    """Return the host memory of `memory_at` as bytes, which files can be read into and written from."""
    return memoryview(memory_at(address, size_bytes)).cast("B")


class Slots:
    """A set of aligned host buffers of equal size, to which checkpoints copy bytes before they write them. Thread-safe.

    All buffers are allocated when the object is created. On a CUDA machine the buffers are pinned, so that
    device-to-host copies into them run at full speed.
    """

    def __init__(self, count: int, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self._lock = threading.Lock()
        self._memory = mmap.mmap(-1, max(1, count) * slot_bytes)
        self._view = ctypes.c_char.from_buffer(self._memory)
        start = ctypes.addressof(self._view)
        self._free = [start + i * slot_bytes for i in range(count)]
        self.count = count
        self._pinned = False
        self._start = start
        if count and torch.cuda.is_available():
            self._pinned = lock(start, count * slot_bytes) == 0  # without page-locking, copies are slower

    def close(self) -> None:
        """Unpin and release the host buffers through which checkpoints are written.

        If a writer thread still uses one of the buffers, because it is stuck in the kernel, the memory of all buffers
        is released only when this object is deleted.
        """
        if self._pinned:
            unlock(self._start)
            self._pinned = False
        with self._lock:
            if len(self._free) < self.count or self._memory.closed:
                return
            self._free = []
            del self._view  # the memory cannot be unmapped while a view of it exists
            self._memory.close()

    def take(self) -> int | None:
        """Return the address of a free host buffer of the set, or None if all buffers are in use."""
        with self._lock:
            return self._free.pop() if self._free else None

    def give(self, slot: int) -> None:
        with self._lock:
            self._free.append(slot)
