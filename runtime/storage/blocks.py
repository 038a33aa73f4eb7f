"""A class that reads and writes optimizer state in the files on the drives, with several threads per drive.

State is moved in blocks. A block is a contiguous part of one tensor on one drive.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial

import torch
from ebbtide.runtime.checkpoint.format.manifest import block_hash
from ebbtide.runtime.checkpoint.format.memory import ALIGNMENT, padded, view_at
from ebbtide.runtime.storage.errors import StorageError
from ebbtide.runtime.storage.extent_file import ExtentFile
from ebbtide.runtime.storage.layout import Layout, Stripe
from ebbtide.runtime.storage.waiting import late_wait_logged
from ebbtide.runtime.storage.workers import Bounce, Transfer, Workers

# A function that moves a block between memory (by address) and its file (by offset), and returns the block's hash.
Move = Callable[[Stripe, int, int, Bounce], str]


class BlockMover:
    """The open files of a store, one per drive, with the threads that read and write them. It is thread-safe.

    Attributes:
        files: The files, in the order of the drives.
    """

    def __init__(self, layout: Layout, files: Sequence[ExtentFile], depth: int, deadline_s: float) -> None:
        self.layout, self.files, self._deadline_s = layout, files, deadline_s
        self._readers = [Workers("storage read", depth, layout.block_bytes) for _ in files]
        self._writers = [Workers("storage write", depth, layout.block_bytes) for _ in files]

    def __str__(self) -> str:
        return ", ".join(str(file.path) for file in self.files)

    def read(self, subgroup: int, extent: int, into: Sequence[torch.Tensor], *, check: bool) -> list[str]:
        """Read a subgroup's state from an extent (a region of the files on the drives) into the tensors ``into``."""
        return self._move(subgroup, extent, into, self._readers, partial(self._read_block, check))

    def write(self, subgroup: int, extent: int, source: Sequence[torch.Tensor], *, own: bool) -> list[str]:
        """Write a subgroup's tensors to an extent (a region of the drives' files). Return the hash of each tensor."""
        return self._move(subgroup, extent, source, self._writers, partial(self._write_block, own))

    def _move(
        self, subgroup: int, extent: int, tensors: Sequence[torch.Tensor], workers: Sequence[Workers], move: Move
    ) -> list[str]:
        layout = self.layout
        sizes = tuple(t.nbytes for t in tensors)
        if sizes != layout.sizes[subgroup]:
            raise StorageError(
                f"the tensors of subgroup {subgroup} must have {layout.sizes[subgroup]} bytes, but got {sizes}"
            )
        blocks = list(layout.blocks(subgroup))
        hashes = [""] * len(blocks)
        transfer = Transfer(len(blocks))

        def one(number: int, block: Stripe, bounce: Bounce) -> None:
            start = layout.start(block.drive, subgroup, extent) + block.offset
            hashes[number] = move(block, tensors[block.tensor].data_ptr() + block.begin, start, bounce)

        for number, block in enumerate(blocks):
            workers[block.drive].submit(transfer, partial(one, number, block))
        transfer.wait(f"subgroup {subgroup} in {self}", self._deadline_s)
        return hashes_of_tensors(blocks, hashes)

    def _write_block(self, own: bool, block: Stripe, address: int, start: int, bounce: Bounce) -> str:
        if own or not _straight(block, address):
            ctypes.memset(bounce.address(), 0, padded(block.size_bytes))
            ctypes.memmove(bounce.address(), address, block.size_bytes)
            data = bounce.view(padded(block.size_bytes))
        else:
            data = view_at(address, block.size_bytes)
        hashed = block_hash(data[: block.size_bytes])
        self.files[block.drive].write(data, start)
        return hashed

    def _read_block(self, check: bool, block: Stripe, address: int, start: int, bounce: Bounce) -> str:
        straight = _straight(block, address)
        data = bounce.view(padded(block.size_bytes))
        if straight:
            data = view_at(address, block.size_bytes)
        self.files[block.drive].read(data, start)
        hashed = block_hash(data[: block.size_bytes]) if check else ""
        if not straight:
            ctypes.memmove(address, bounce.address(), block.size_bytes)
        return hashed

    def sync(self) -> None:
        """Wait until all written blocks are on the drives."""
        for file in self.files:
            with late_wait_logged(f"syncing {file.path}"):
                file.sync()

    def close(self) -> None:
        """Stop the threads, and close the files unless a thread is stuck in one."""
        idle = [workers.close() for workers in (*self._readers, *self._writers)]
        if all(idle):  # a thread that is stuck in the kernel still uses its file
            for file in self.files:
                file.close()


def hashes_of_tensors(blocks: Sequence[Stripe], hashes: Sequence[str]) -> list[str]:
    """Return one hash for each tensor of a subgroup on the drives, in order, from the hashes of the tensor's blocks."""
    parts: dict[int, list[str]] = {}
    for block, hashed in zip(blocks, hashes, strict=True):
        parts.setdefault(block.tensor, []).append(hashed)
    return [block_hash("".join(part).encode()) for part in parts.values()]


def _straight(block: Stripe, address: int) -> bool:
    return address % ALIGNMENT == 0 and block.size_bytes % ALIGNMENT == 0
