"""A registry of the tensors of optimizer state, through which an update waits for a checkpoint in progress.

The update waits only while the checkpoint still reads the tensors that the update overwrites.
"""

import threading
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

EVERY_SUBGROUP = -2  # for tensors on the device that were not registered: any update may overwrite them


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint that stays on a drive. The checkpoint's own file has only its shape.

    Attributes:
        subgroup: The subgroup whose optimizer state the tensor belongs to.
    """

    file: str
    path: tuple[str | int, ...]
    subgroup: int
    index: int


class AnnouncedStep(Protocol):
    """The version of optimizer state on drives that a checkpoint in progress will commit.

    The version is the state after all updates that were launched before the checkpoint began. Later updates do not
    overwrite this state until `settle` is called.
    """

    def describe(self, tensors: Sequence[StoredTensor]) -> bytes:
        """Return a JSON text that tells where a checkpoint's optimizer state is on the drives."""
        # The checkpoint stores this text, so that a later load finds the state.
        ...

    def prepare(self) -> None:
        """Wait until this step's optimizer state has been written to the drive, and flush it to the drive (fsync)."""
        ...

    def settle(self, *, committed: bool) -> None:
        """Free the drive space of optimizer state that is no longer needed after a checkpoint has ended."""
        # If the checkpoint was committed, the state of the oldest steps is freed, beyond the number of steps to keep.
        # Otherwise the state that was written for the checkpoint is freed.
        ...


class StoredState(Protocol):
    """The interface that checkpoints use to protect, commit and read optimizer state on drives.

    The state stays on the drives. A checkpoint does not copy it.
    """

    def subgroups(self) -> Collection[int]:
        """Return the subgroups that have their optimizer state on a drive at the time of the call."""
        ...

    def committed_apart(self) -> AbstractContextManager[None]:
        """Return a context where state dicts do not wait for drives, because the checkpoint commits that state."""
        ...

    def announce(self, target: Path, nonce: str, step: int) -> AnnouncedStep:
        """Protect the present optimizer state on a drive from being overwritten. This never blocks."""
        ...

    def problem(self, page: bytes) -> str:
        """Return the reason why a checkpoint's optimizer state on a drive cannot be loaded, or an empty string."""
        ...

    def adopt(self, page: bytes) -> Collection[int]:
        """Let training use a checkpoint's optimizer state on the drive where it was left, without a copy."""
        ...

    def read(
        self, page: bytes, adopted: Collection[int]
    ) -> AbstractContextManager[Mapping[tuple[Any, ...], torch.Tensor]]:
        """Return a context manager that gives the tensors of a checkpoint's optimizer state on drives."""
        # The caller must copy the tensors inside the ``with`` block.
        ...


class LiveState:
    """A registry of host tensors with optimizer state, which stay unchanged between two updates.

    The executor of the plan registers tensors, and calls `before_update` from its worker threads. The
    checkpoint engine reads the registry from the training thread and attaches a checkpoint in progress. The
    registry holds references to the tensors, so that their memory outlives the checkpoint.

    Attributes:
        stored: The optimizer state on drives. None if all state is in memory.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tensors: dict[int, tuple[torch.Tensor, ...]] = {}
        self._starts: list[int] = []  # sorted addresses
        self._ranges: list[tuple[int, int, int]] = []  # (start, end, subgroup), in the same order
        self._release: Callable[[int], None] | None = None
        self.stored: StoredState | None = None

    def register_all(self, tensors: Mapping[int, Sequence[torch.Tensor]]) -> None:
        """Register the tensors of subgroups' state, which are the flat fp32 masters and moments.

        A checkpoint can then write them directly from their memory, and an update waits before it overwrites them. They
        replace the tensors that were registered for the same subgroups before.

        Args:
            tensors: The tensors of each subgroup, in the order of the subgroups' next updates. The method `turns`
                returns the subgroups in this order.
        """
        with self._lock:
            for number in tensors:
                self._tensors.pop(number, None)
            self._tensors.update({number: tuple(held) for number, held in tensors.items()})
            self._ranges = sorted(
                (t.data_ptr(), t.data_ptr() + t.numel() * t.element_size(), number)
                for number, held in self._tensors.items()
                for t in held
                if t.numel()
            )
            self._starts = [start for start, _, _ in self._ranges]

    def runs(self, address: int, size_bytes: int) -> list[tuple[int, int]] | None:
        """Return the subgroups with optimizer state in a host address range, as pairs (subgroup, number of bytes).

        The pairs are in the order of addresses. Return None if part of the range is not registered as optimizer state.
        """
        result: list[tuple[int, int]] = []
        position, end = address, address + size_bytes
        with self._lock:
            at = bisect_right(self._starts, position) - 1
            while position < end:
                if not 0 <= at < len(self._ranges):
                    return None
                start, stop, subgroup = self._ranges[at]
                if not start <= position < stop:
                    return None
                result.append((subgroup, min(stop, end) - position))
                position += result[-1][1]
                at += 1
        return result

    def stored_at(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        """Return the subgroup and the index of a state tensor on a drive. None if the tensor is in memory."""
        if self.stored is None or tensor.device.type != "cpu" or not tensor.numel():
            return None
        runs = self.runs(tensor.data_ptr(), tensor.numel() * tensor.element_size())
        if not runs or len(runs) > 1 or runs[0][0] not in self.stored.subgroups():
            return None
        held = self._tensors[runs[0][0]]
        addresses = [t.data_ptr() for t in held]
        return runs[0][0], addresses.index(tensor.data_ptr())

    @property
    def turns(self) -> list[int]:
        """Return the subgroups whose optimizer state is registered, in the order of their next updates."""
        with self._lock:
            return list(self._tensors)

    def attach(self, release: Callable[[int], None] | None) -> None:
        """Set the checkpoint in progress that updates must wait for. None if no checkpoint reads optimizer state."""
        self._release = release

    def before_update(self, subgroup: int) -> None:
        """Wait until an update may overwrite a subgroup's state. Call this directly before the update.

        A checkpoint's unwritten bytes are first copied to reserved host memory or, if it is full, written to disk.

        Raises:
            CheckpointError: The disk made no progress within the deadline.
        """
        release = self._release
        if release is not None:
            release(subgroup)
            release(EVERY_SUBGROUP)
