"""A class that counts the bytes of all CPU tensors after each torch operation that returns a new tensor."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class HeldBytes(TorchDispatchMode):
    """A dispatch mode that tracks CPU tensors until they are freed: the tensors that exist when it is created, and
    every tensor returned by an operation of this thread.

    Attributes:
        peak: Largest number of bytes that all tracked tensors together have held so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        for thing in gc.get_objects():
            if issubclass(type(thing), torch.Tensor):
                self._meet(thing)
        self.peak = self.now()

    def _meet(self, tensor: torch.Tensor) -> bool:
        if tensor.layout != torch.strided or tensor.device.type != "cpu":
            return False
        storage = tensor.untyped_storage()
        known = self._storages.get(storage._cdata)
        if known is not None and not known[0].expired() and known[1] == storage.nbytes():
            return False
        self._storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return True

    def now(self) -> int:
        """Return the total bytes that tracked tensors hold now."""
        alive = {k: held for k, held in self._storages.items() if not held[0].expired()}
        self._storages = alive
        return sum(size for _, size in alive.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if sum(self._meet(t) for t in tree_leaves(result) if type(t) is torch.Tensor):
            self.peak = max(self.peak, self.now())
        return result
