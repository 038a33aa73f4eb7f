"""A registry of the memory of optimizer state, which makes updates wait while a checkpoint reads that state."""

import threading
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

EVERY_SUBGROUP = -2  # device tensors nobody registered: any update may overwrite them


class Persist(Protocol):
    """The interface of a running checkpoint that an optimizer update uses before it overwrites state."""

    def release(self, subgroup: int) -> None:
        """Wait until the running checkpoint does not need the bytes of a subgroup's live state any more."""
        ...


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint that stays on a drive: the checkpoint's file has only its shape.

    Attributes:
        file, path: The file in the checkpoint, and the tensor's path in the file's tree.
        index: Index of the tensor among the subgroup's tensors.
    """

    file: str
    path: tuple[Any, ...]
    subgroup: int
    index: int


class AnnouncedStep(Protocol):
    """The optimizer state on a drive after the updates launched so far. It is not overwritten until `settle`."""

    def describe(self, tensors: Sequence[StoredTensor]) -> bytes:
        """Return the page of a checkpoint that locates optimizer state on a drive."""
        ...

    def prepare(self) -> None:
        """Make a step's optimizer state on a drive durable and keep earlier steps. Wait for the step's writes first."""
        ...

    def settle(self, *, committed: bool) -> None:
        """Drop earlier steps on a drive if the checkpoint was committed, otherwise drop this checkpoint's step."""
        ...


class StoredState(Protocol):
    """The interface of optimizer state on a drive, which a checkpoint commits there without copying it."""

    @property
    def subgroups(self) -> Callable[[], Collection[int]]:
        """Return a function that returns the subgroups with optimizer state on a drive now."""
        ...

    def committed_apart(self) -> AbstractContextManager[None]:
        """Return a context for making state dicts without waiting for writes of optimizer state to a drive."""
        ...

    def announce(self, target: Path, nonce: str, step: int) -> AnnouncedStep:
        """Protect the present optimizer state on a drive from being overwritten, for a checkpoint. This never blocks.

        Call it before any later update launches a write.

        Args:
            target, nonce: Folder and identifier of the checkpoint.
            step: Number of optimizer steps done.
        """
        ...

    def problem(self, page: bytes) -> str:
        """Return the reason why a checkpoint's optimizer state on a drive cannot be loaded, or an empty string."""
        ...

    def adopt(self, page: bytes) -> Collection[int]:
        """Adopt a checkpoint's optimizer state on a drive as live state without a copy. Return the adopted
        subgroups.
        """
        ...

    def read(
        self, page: bytes, adopted: Collection[int]
    ) -> AbstractContextManager[Mapping[tuple[Any, ...], torch.Tensor]]:
        """Return a context with the tensors that a checkpoint has on a drive and that were not adopted in place.

        The tensors can be copied inside the context. It raises at its end if they were overwritten meanwhile.
        """
        ...


class LiveState:
    """A registry of host tensors with optimizer state, which stay unchanged between two updates.

    The executor registers tensors, and calls `before_update` from its worker threads. The checkpoint engine
    reads the registry from the training thread and attaches a running checkpoint. The registry holds
    references to the tensors, so their memory outlives a running checkpoint.

    Attributes:
        stored: The state on storage. None if no state is stored.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tensors: dict[int, tuple[torch.Tensor, ...]] = {}
        self._starts: list[int] = []  # sorted addresses
        self._ranges: list[tuple[int, int, int]] = []  # (start, end, subgroup), same order
        self._persist: Persist | None = None
        self.stored: StoredState | None = None

    def register(self, subgroup: int, tensors: Sequence[torch.Tensor]) -> None:
        """Register the tensors of a subgroup's state (fp32 master and moments, flat) instead of earlier ones."""
        self.register_all({subgroup: tensors})

    def register_all(self, tensors: Mapping[int, Sequence[torch.Tensor]]) -> None:
        """Register the tensors of many subgroups' optimizer state with a single sort of addresses.

        Their order is the order of the next updates (`turns`).
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
        """Return the subgroups with state in a range of host addresses, in order, each with its number of bytes.

        None if part of the range is not registered.
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
        """Return the subgroups in the order of their next updates."""
        with self._lock:
            return list(self._tensors)

    @property
    def subgroups(self) -> list[int]:
        with self._lock:
            return sorted(self._tensors)

    def attach(self, persist: Persist | None) -> None:
        """Set the running checkpoint for which updates must wait. None if no checkpoint reads live state."""
        self._persist = persist

    def before_update(self, subgroup: int) -> None:
        """Wait until a subgroup's state may be overwritten. Called directly before the update.

        It returns immediately if no checkpoint runs or the subgroup is on disk already. Otherwise the bytes
        that are still needed are copied to the reserved budget, or written first if the budget is used up.

        Raises:
            CheckpointError: Storage made no progress within the deadline.
        """
        persist = self._persist
        if persist is not None:
            persist.release(subgroup)
            persist.release(EVERY_SUBGROUP)
