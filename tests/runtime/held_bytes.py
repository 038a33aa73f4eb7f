"""Counts the bytes that tensors hold, at every operation, as no resident set can in a test."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class HeldBytes(TorchDispatchMode):
    """Inside, every tensor that an operation of this thread returns is known until it is gone.

    Attributes:
        peak: the most that was there at once after some operation, in bytes, with all that was
            there before.
    """

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        for thing in gc.get_objects():
            if issubclass(type(thing), torch.Tensor):
                self._meet(thing)
        self.peak = self.now()

    def _meet(self, tensor: torch.Tensor) -> bool:
        """Whether its memory is new here."""
        if tensor.layout != torch.strided or tensor.device.type != "cpu":
            return False
        storage = tensor.untyped_storage()
        known = self._storages.get(storage._cdata)
        if known is not None and not known[0].expired() and known[1] == storage.nbytes():
            return False
        self._storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return True

    def now(self) -> int:
        """Bytes that are there."""
        alive = {k: held for k, held in self._storages.items() if not held[0].expired()}
        self._storages = alive
        return sum(size for _, size in alive.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if sum(self._meet(t) for t in tree_leaves(result) if type(t) is torch.Tensor):
            self.peak = max(self.peak, self.now())
        return result
