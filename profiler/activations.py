"""The memory that each part of a model keeps from its forward pass for its backward pass."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any, Protocol

import torch


class Activations(Protocol):
    """A counter of activation memory: the bytes that a forward pass keeps for its backward pass.

    Hooks on the model's modules call the counter during a forward pass, on the training thread.

    Attributes:
        bytes_by_unit: Activation bytes by part of the model.
        costly: True if counting slows down the forward pass, which is timed at the same time.
    """

    bytes_by_unit: dict[str, int]
    costly: bool

    def begin(self) -> None: ...
    def enter(self, unit: str) -> None: ...
    def leave(self, unit: str) -> None: ...
    def end(self) -> None: ...


class SavedTensors:
    """A counter of activation memory that adds up the bytes of the tensors that autograd saves for backward.

    Tensors that share memory (a torch storage) count once, and parameters do not count, since ZeRO-3 releases
    them. Tensors saved between two parts of the model (such as added embeddings, or the loss) count for the
    earlier part. This counter needs no statistics of a GPU allocator, so it works on a CPU too.
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
        if start not in self._seen and not any(start <= p.data_ptr() < start + size for p in self._parameters):
            # Addresses identify storages, because a storage that is freed and reused within the pass is not saved.
            self._seen.add(start)
            self.bytes_by_unit[self._unit] += size
        return saved


class AllocatorDeltas:
    """A counter of activation memory that measures how allocated GPU memory grows in each part of a model's forward.

    Growth by parameters that ZeRO-3 has gathered in the meantime does not count.

    Args:
        in_use: Function that returns the allocated GPU memory in bytes.
        gathered: Function that returns the bytes of the parameters that are gathered now.
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
    """Return the bytes of GPU memory that the gathered parameters of a ZeRO-3 model take now.

    The rank's own partitions are not included.
    """
    total = 0
    for p in model.parameters():
        shard = getattr(p, "ds_tensor", None)
        if shard is not None and p.data.numel() and p.data.data_ptr() != shard.data_ptr():
            total += p.data.nbytes
    return total


def activations_of(model: torch.nn.Module) -> Activations:
    """Return a counter of a model's activation memory, the bytes that forward keeps for backward."""
    if torch.cuda.is_available():
        return AllocatorDeltas(torch.cuda.memory_allocated, lambda: gathered_bytes(model))
    return SavedTensors(model)
