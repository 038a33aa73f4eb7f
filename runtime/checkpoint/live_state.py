"""The memory of each subgroup's state, and the time from which it may be overwritten."""

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
    """The interface of a running checkpoint for the update."""

    def release(self, subgroup: int) -> None:
        """Return once the subgroup's live bytes are not needed any more."""
        ...


@dataclass(frozen=True)
class StoredTensor:
    """A tensor without bytes in a checkpoint's file: its bytes are committed where they are on storage.

    Attributes:
        file, path: the file in the checkpoint, and the tensor's place in its tree.
        index: position among the subgroup's tensors.
    """

    file: str
    path: tuple[Any, ...]
    subgroup: int
    index: int


class AnnouncedStep(Protocol):
    """The state on storage as it is after what was launched so far; it stays so until `settle`."""

    def describe(self, tensors: Sequence[StoredTensor]) -> bytes:
        """Return the checkpoint's page about this step."""
        ...

    def prepare(self) -> None:
        """Make the step durable, without replacing earlier steps. Waits for its writes, on any thread."""
        ...

    def settle(self, *, committed: bool) -> None:
        """The checkpoint was committed: older steps may go. Or it was not: this one goes."""
        ...


class StoredState(Protocol):
    """State on storage, which a checkpoint commits in place. Called by the training thread."""

    @property
    def subgroups(self) -> Callable[[], Collection[int]]:
        """Return the subgroups with state on storage now."""
        ...

    def committed_apart(self) -> AbstractContextManager[None]:
        """Make state dicts for files that hold no stored state, without waiting for writes in flight."""
        ...

    def announce(self, target: Path, nonce: str, step: int) -> AnnouncedStep:
        """Called with no write under way that was launched later than the step; never blocks.

        Args:
            target, nonce: of the checkpoint.
        """
        ...

    def problem(self, page: bytes) -> str:
        """Return the reason why the page's stored state cannot be loaded, or an empty string."""
        ...

    def adopt(self, page: bytes) -> Collection[int]:
        """Adopt the state in place, and return the subgroups that could be adopted."""
        ...

    def read(
        self, page: bytes, adopted: Collection[int]
    ) -> AbstractContextManager[Mapping[tuple[Any, ...], torch.Tensor]]:
        """Return the tensors of the subgroups that were not adopted, by their path in their file; inside,
        to be copied from. Raises at the end if they were written over meanwhile.
        """
        ...


class LiveState:
    """Host tensors that stay unchanged from the end of an update to the next one.

    The executor registers and calls `before_update` from its worker threads; the checkpoint engine
    reads the registry from the training thread and attaches a running persist. It holds references
    to the tensors, so their memory outlives a running checkpoint.

    Attributes:
        stored: what lives on storage, if anything does.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tensors: dict[int, tuple[torch.Tensor, ...]] = {}
        self._starts: list[int] = []  # sorted addresses
        self._ranges: list[tuple[int, int, int]] = []  # (start, end, subgroup), same order
        self._persist: Persist | None = None
        self.stored: StoredState | None = None

    def register(self, subgroup: int, tensors: Sequence[torch.Tensor]) -> None:
        """Replace what is known of a subgroup (fp32 master and both moments, flat)."""
        self.register_all({subgroup: tensors})

    def register_all(self, tensors: Mapping[int, Sequence[torch.Tensor]]) -> None:
        """`register` of many subgroups at once: sorted once, not once for each of thousands.

        Their order is that in which updates come due (`turns`).
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
        """(subgroup, bytes of it) in order, for bytes that may span several subgroups' state.

        None: not registered as a whole.
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
        """Return subgroup and number of a tensor with bytes on storage, or None."""
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
        """The running checkpoint, or None when nothing reads the live bytes any more."""
        self._persist = persist

    def before_update(self, subgroup: int) -> None:
        """Called right before a subgroup's state is overwritten; returns once that is safe.

        At once where no checkpoint runs or the subgroup is on disk already; else after the bytes
        that are still needed were copied to the reserved budget, or written where the budget is
        used up.

        Raises:
            CheckpointError: storage made no progress within the deadline.
        """
        persist = self._persist
        if persist is not None:
            persist.release(subgroup)
            persist.release(EVERY_SUBGROUP)
