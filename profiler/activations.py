"""Device memory that each unit's forward keeps for its backward."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any, Protocol

import torch


class Activations(Protocol):
    """Told by the watcher's hooks where a forward pass is; training thread only.

    Attributes:
        costly: counting slows the forward pass down that is timed meanwhile.
    """

    bytes_by_unit: dict[str, int]
    costly: bool

    def begin(self) -> None: ...
    def enter(self, unit: str) -> None: ...
    def leave(self, unit: str) -> None: ...
    def end(self) -> None: ...


class SavedTensors:
    """Counts what autograd saves, each storage once: exact where no allocator keeps books.

    Parameters do not count: ZeRO-3 releases them. What is saved between two units (embeddings that
    are added, the loss) belongs to the unit before it.
    """

    costly = True

    def __init__(self, model: torch.nn.Module) -> None:
        self.bytes_by_unit: dict[str, int] = defaultdict(int)
        self._parameters = list(model.parameters())
        self._unit = ""
        self._seen: set[int] = set()
        self._hooks: Any = None

    def begin(self) -> None:
        self._unit, self._seen = "", set()
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._note, lambda kept: kept)
        self._hooks.__enter__()

    def enter(self, unit: str) -> None:
        self._unit = unit

    def leave(self, unit: str) -> None:
        del unit

    def end(self) -> None:
        if self._hooks is not None:
            self._hooks.__exit__(None, None, None)
        self._hooks = None

    def _note(self, saved: torch.Tensor) -> torch.Tensor:
        storage = saved.untyped_storage()
        start, size = storage.data_ptr(), storage.nbytes()
        if start not in self._seen and not self._holds_parameter(start, start + size):
            # A storage that is freed and reused within the pass is not saved, so addresses do.
            self._seen.add(start)
            self.bytes_by_unit[self._unit] += size
        return saved

    def _holds_parameter(self, start: int, end: int) -> bool:
        """Asked for each saved tensor of a pass that is being timed, so a parameter is asked for
        its address alone: for its storage's, the asking took a third of a small model's forward.
        """
        return any(start <= p.data_ptr() < end for p in self._parameters)


class AllocatorDeltas:
    """The growth of the device allocator over each unit, without gathered parameters.

    Args:
        in_use: bytes that the allocator has handed out.
        gathered: bytes of whole parameters that are gathered at the moment.
    """

    costly = False

    def __init__(self, in_use: Callable[[], int], gathered: Callable[[], int]) -> None:
        self.bytes_by_unit: dict[str, int] = defaultdict(int)
        self._held = lambda: in_use() - gathered()
        self._before = 0
        self._unit = ""

    def begin(self) -> None:
        self._before, self._unit = self._held(), ""

    def enter(self, unit: str) -> None:
        self._settle()
        self._unit = unit

    def leave(self, unit: str) -> None:
        del unit
        self._settle()

    def end(self) -> None:
        self._settle()

    def _settle(self) -> None:
        now = self._held()
        self.bytes_by_unit[self._unit] += now - self._before
        self._before = now


def gathered_bytes(model: torch.nn.Module) -> int:
    """Return the bytes of ZeRO-3 parameters that are gathered now, not counting their partitions."""
    total = 0
    for p in model.parameters():
        shard = getattr(p, "ds_tensor", None)
        if shard is not None and p.data.numel() and p.data.data_ptr() != shard.data_ptr():
            total += p.data.nbytes
    return total


def activations_of(model: torch.nn.Module) -> Activations:
    """Allocator statistics on CUDA, saved tensors elsewhere."""
    if torch.cuda.is_available():
        return AllocatorDeltas(torch.cuda.memory_allocated, lambda: gathered_bytes(model))
    return SavedTensors(model)
