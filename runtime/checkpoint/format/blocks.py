"""The division of checkpoint files into blocks. Each block is copied, hashed and written as a unit."""

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from ebbtide.runtime.checkpoint.format.memory import ALIGNMENT, Source, padded
from ebbtide.runtime.checkpoint.format.skeleton import Layout


class State(Enum):
    PENDING = "pending"  # the bytes are still in the live buffers, or in a slot
    COPYING = "copying"  # the bytes are being copied into a slot
    WRITING = "writing"  # a writer reads the bytes
    READY = "ready"  # hashed, and waiting for the disk. The bytes may be copied
    DONE = "done"


@dataclass(frozen=True)
class Piece:
    """A range of bytes of one tensor or buffer, and its position ``at`` in a block of a checkpoint's file."""

    at: int
    source: Source
    offset: int
    size_bytes: int


@dataclass
class Block:
    """One block of one file of a checkpoint in progress. The lock of the checkpoint's writer guards its state.

    Attributes:
        subgroups: Subgroups of optimizer state that have bytes in the block.
        slot: Address of the block's copy in the host memory that is reserved for copies. None if the block
            is not copied.
    """

    file: int
    offset: int
    size_bytes: int
    pieces: tuple[Piece, ...]
    subgroups: frozenset[int]
    state: State = State.PENDING
    slot: int | None = None
    hash: str = field(default="", repr=False)

    @property
    def direct_address(self) -> int | None:
        """Return the host address of this block of a checkpoint file if the block can be written without a copy,
        otherwise None.

        O_DIRECT needs aligned and contiguous bytes.
        """
        if self.slot is not None:
            return self.slot
        if len(self.pieces) != 1 or self.size_bytes % ALIGNMENT:
            return None
        piece = self.pieces[0]
        address = piece.source.address(piece.offset)
        whole = piece.at == 0 and piece.size_bytes == self.size_bytes
        return address if whole and address is not None and address % ALIGNMENT == 0 else None

    def gather(self, destination: int) -> None:
        """Copy the bytes of this block of a checkpoint file to a host buffer of `padded_bytes` bytes.

        The block consists of pieces, each from one tensor or buffer. The buffer's bytes between two pieces and after
        the last piece become zero.
        """
        at = 0
        for piece in self.pieces:
            if piece.at > at:
                ctypes.memset(destination + at, 0, piece.at - at)
            piece.source.copy_to(destination + piece.at, piece.offset, piece.size_bytes)
            at = piece.at + piece.size_bytes
        if at < self.padded_bytes:
            ctypes.memset(destination + at, 0, self.padded_bytes - at)

    @property
    def padded_bytes(self) -> int:
        return padded(self.size_bytes)


@dataclass(frozen=True)
class PlannedFile:
    """A file that a checkpoint will write: its path inside the checkpoint and its layout."""

    path: Path
    layout: Layout


def cut(files: Sequence[PlannedFile], block_bytes: int) -> list[Block]:
    """Divide the files of a checkpoint into blocks. Return all blocks in a list, file by file, by position in it."""
    blocks: list[Block] = []
    for number, planned in enumerate(files):
        blocks.extend(_cut_file(number, planned.layout, block_bytes))
    return blocks


def _cut_file(file: int, layout: Layout, block_bytes: int) -> Iterable[Block]:
    extents, first = layout.extents, 0
    for start in range(0, layout.size_bytes, block_bytes):
        end = min(start + block_bytes, layout.size_bytes)
        while first < len(extents) and extents[first].end <= start:
            first += 1
        pieces, at = [], first
        while at < len(extents) and extents[at].offset < end:
            extent = extents[at]
            begin, stop = max(start, extent.offset), min(end, extent.end)
            pieces.append(Piece(begin - start, extent.source, begin - extent.offset, stop - begin))
            at += 1
        subgroups = frozenset(p.source.subgroup for p in pieces if p.source.subgroup is not None)
        yield Block(file, start, end - start, tuple(pieces), subgroups)
