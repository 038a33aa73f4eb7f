"""The memory that each part of a model keeps from its forward pass for its backward pass."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any, Protocol

import torch


class Activations(Protocol):
    """A counter of activation memory, called by hooks during a forward pass on the training thread.

    Attributes:
        bytes_by_unit: Activation bytes by part of the model.
        costly: True if counting slows down the forward pass that is timed at the same time.
    """

    bytes_by_unit: dict[str, int]
    costly: bool

    def begin(self) -> None: ...
    def enter(self, unit: str) -> None: ...
    def leave(self, unit: str) -> None: ...
    def end(self) -> None: ...


class SavedTensors:
    """A counter of the tensors that autograd saves, each storage once. It is exact without allocator statistics.

    Parameters are not counted, since ZeRO-3 releases them. Tensors saved between two parts of the model (such
    as added embeddings, or the loss) count for the earlier part.
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
        """Return whether a model parameter starts in an address range.

        A parameter is asked only for its own address. Asking for its storage's took a third of a small model's
        forward, since this runs for each saved tensor of a pass that is being timed.
        """
        return any(start <= p.data_ptr() < end for p in self._parameters)


class AllocatorDeltas:
    """A counter of the GPU allocator's growth over each part of a model, without gathered parameters.

    Args:
        in_use: Function that returns the allocated bytes.
        gathered: Function that returns the bytes of parameters that are gathered now.
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
    """Return the bytes of a model's ZeRO-3 parameters that are gathered now, without their partitions."""
    total = 0
    for p in model.parameters():
        shard = getattr(p, "ds_tensor", None)
        if shard is not None and p.data.numel() and p.data.data_ptr() != shard.data_ptr():
            total += p.data.nbytes
    return total


def activations_of(model: torch.nn.Module) -> Activations:
    """Return a counter of a model's activation memory: by the allocator on CUDA, by saved tensors elsewhere."""
    if torch.cuda.is_available():
        return AllocatorDeltas(torch.cuda.memory_allocated, lambda: gathered_bytes(model))
    return SavedTensors(model)
