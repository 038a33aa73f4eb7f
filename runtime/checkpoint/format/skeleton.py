"""The layout of the checkpoint file for a state dict: the place of each tensor's bytes in the file, and the blocks that
are copied, hashed and written as units.

`torch.save` writes the file but leaves gaps for the tensors' bytes (`skip_data`). Any thread can fill the gaps later,
directly from the tensors that training uses, so that large tensors are not copied.
"""

import ctypes
import io
import os
import threading
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from ebbtide.runtime.checkpoint.format.memory import ALIGNMENT, DeviceBytes, HostBytes, Source, memory_at, padded
from ebbtide.runtime.checkpoint.format.plain_data import (
    ON_STORAGE,
    OnStorage,
    WatchingPickler,
    of_the_kind,
    replace_tensors,
)
from ebbtide.runtime.checkpoint.format.safe_load import unreadable
from ebbtide.runtime.checkpoint.live_state import EVERY_SUBGROUP, LiveState
from torch.serialization import get_crc32_options, set_crc32_options, skip_data
from torch.utils.serialization import config as serialization

_torch_save = threading.Lock()  # because the options of torch.save are global


@dataclass(frozen=True)
class Extent:
    """A range of bytes in a checkpoint file, with the source of the bytes, such as a tensor.

    Attributes:
        offset: Position of the range in the file: the number of bytes before it.
        source: Source from which the bytes of the range are written.
    """

    offset: int
    source: Source

    @property
    def end(self) -> int:
        return self.offset + self.source.size_bytes


@dataclass(frozen=True)
class FileLayout:
    """The layout of a checkpoint's file: the file's length and the sources of its bytes in ascending order.

    Sources do not overlap. Bytes of the file without a source are zero.

    Attributes:
        unreadable: Objects in the file that cannot be loaded again, and why. Empty if none.
    """

    size_bytes: int
    extents: tuple[Extent, ...]
    unreadable: str = ""


def lay_out(state: Any, live: LiveState, *, stream_device: bool) -> FileLayout:
    """Return the layout of the file that ``torch.save(state)`` would write.

    Args:
        state: The object to save, as for ``torch.save``.
        live: The registry of optimizer state. Registered tensors are written later from their own memory. Other
            tensors are copied now. A tensor on a drive is represented by its shape alone.
        stream_device: If True, GPU tensors are also written later from their memory, since only updates change
            them. If False, they are copied now.
    """
    stand_ins = _StandIns(live, stream_device=stream_device)
    tree = stand_ins.replace(state)
    if stand_ins.stored:
        tree = {ON_STORAGE: OnStorage(), **tree}
    descriptor = os.memfd_create("ebbtide-skeleton")
    try:
        try:
            offsets, refused = _save_with_holes(tree, descriptor)
        except RuntimeError:  # torch saves a nested tensor only together with its data
            return _whole(state)
        if not stand_ins.cover(offsets):  # a tensor is hidden in an object, so the whole file is written by value
            return _whole(state)
        holes = [extent for key, sources in stand_ins.sources.items() for extent in _in_a_row(offsets[key], sources)]
        holes = sorted((e for e in holes if e.source.size_bytes), key=lambda e: e.offset)
        size = os.fstat(descriptor).st_size
        frame = _frame(descriptor, holes, size)
    finally:
        os.close(descriptor)
    extents = tuple(sorted([*holes, *frame], key=lambda e: e.offset))
    return FileLayout(size, extents, refused)


def plain(data: bytes, unreadable: str = "") -> FileLayout:
    """Return the `FileLayout` of a file of a checkpoint that consists of the given bytes."""
    return FileLayout(len(data), (Extent(0, HostBytes.of_bytes(data)),), unreadable)


def _in_a_row(offset: int, sources: Iterable[Source]) -> Iterator[Extent]:
    for source in sources:
        yield Extent(offset, source)
        offset += source.size_bytes


class _StandIns:
    """An object that replaces the tensors of a state dict by dummies of the same size in bytes. torch.save then writes
    a file with gaps for the tensors' bytes.

    For each dummy, the object records where in memory the bytes of the real tensor are, so that the gaps can be filled
    later.
    """

    def __init__(self, live: LiveState, *, stream_device: bool) -> None:
        self._live = live
        self._stream_device = stream_device
        self._made: dict[tuple[Any, ...], torch.Tensor] = {}
        self._kept: list[torch.Tensor] = []  # keeps tensors alive, so that their addresses are not reused
        self._empty: set[int] = set()
        self.sources: dict[int, tuple[Source, ...]] = {}  # keyed by the dummy's storage
        self.stored = False  # True if some tensors are on drives

    def replace(self, tree: Any) -> Any:
        return replace_tensors(tree, lambda t: of_the_kind(t, self._stand_in(t)))

    def _stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach()
        # Tied tensors stay tied, so that the file is as small as torch.save would make it.
        key = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() == 0:
            return self._nothing(tensor)
        if self._live.stored_at(tensor) is not None:
            self.stored = True
            return torch.empty_like(tensor, device="meta")
        if key not in self._made:
            self._kept.append(tensor)
            self._made[key] = self._make(tensor)
        return self._made[key]

    def _nothing(self, tensor: torch.Tensor) -> torch.Tensor:
        made = torch.empty(tensor.shape, dtype=tensor.dtype)
        self._kept.append(made)
        self._empty.add(made.untyped_storage()._cdata)
        return made

    def cover(self, storages: Iterable[int]) -> bool:
        return set(storages) == set(self.sources) | self._empty

    def _make(self, tensor: torch.Tensor) -> torch.Tensor:
        sources = self._sources(tensor)
        first, size = sources[0], sum(source.size_bytes for source in sources)
        if isinstance(first, HostBytes):
            raw = torch.frombuffer(memory_at(first.start, size), dtype=torch.uint8)
        else:  # the memory is never touched, because skip_data reads no bytes
            raw = torch.empty(size, dtype=torch.uint8)
        made = raw.view(tensor.dtype).view(tensor.shape)
        self.sources[made.untyped_storage()._cdata] = sources
        self._kept.append(made)
        return made

    def _sources(self, tensor: torch.Tensor) -> tuple[Source, ...]:
        size = tensor.numel() * tensor.element_size()
        if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
            runs = self._live.runs(tensor.data_ptr(), size)
            if tensor.device.type == "cpu" and runs is not None:
                return tuple(_host_runs(tensor, runs))
            if tensor.device.type != "cpu" and self._stream_device:
                one = runs[0][0] if runs and len(runs) == 1 else EVERY_SUBGROUP
                return (DeviceBytes(tensor, one),)
        copied = torch.empty(tensor.shape, dtype=tensor.dtype)
        copied.copy_(tensor)
        return (HostBytes.of_tensor(copied),)


def _host_runs(tensor: torch.Tensor, runs: Iterable[tuple[int, int]]) -> Iterator[HostBytes]:
    start = tensor.data_ptr()
    for subgroup, size_bytes in runs:
        yield HostBytes(start, size_bytes, tensor, subgroup)
        start += size_bytes


def _save_with_holes(tree: Any, descriptor: int) -> tuple[dict[int, int], str]:
    pickler = _storage_recorder()
    path = f"/proc/self/fd/{descriptor}"
    with _torch_save:
        alignment, crc = serialization.save.storage_alignment, get_crc32_options()
        serialization.save.storage_alignment = ALIGNMENT
        set_crc32_options(False)  # the manifest has stronger hashes
        try:
            with skip_data(), warnings.catch_warnings():
                # Tensors on drives are written with their shapes only, so torch's warning about that is not needed.
                warnings.filterwarnings("ignore", "Serializing tensors on the meta device")
                torch.save(tree, path, pickle_module=pickler)
        finally:
            serialization.save.storage_alignment = alignment
            set_crc32_options(crc)
    refused = unreadable(path) if any(p.suspicious for p in pickler.made) else ""
    reader: Any = torch._C.PyTorchFileReader(path)
    offsets = {c: reader.get_record_offset(f"data/{key}") for c, key in pickler.keys.items()}
    return offsets, refused


def _storage_recorder() -> Any:
    keys: dict[int, str] = {}
    made: list[WatchingPickler] = []

    class Pickler(WatchingPickler):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            made.append(self)
            name_storage = self.persistent_id

            def record(item: Any) -> Any:
                named = name_storage(item)
                if named is not None:
                    keys[getattr(item, "_untyped_storage", item)._cdata] = named[2]
                return named

            self.persistent_id = record  # type: ignore[method-assign]
            super().__init__(*args, **kwargs)

    return SimpleNamespace(__name__="ebbtide-pickle", Pickler=Pickler, keys=keys, made=made)


def _frame(descriptor: int, holes: list[Extent], size: int) -> list[Extent]:
    edges = [0, *(edge for hole in holes for edge in (hole.offset, hole.end)), size]
    pieces = []
    for start, end in zip(edges[::2], edges[1::2], strict=True):
        if end > start:
            data = os.pread(descriptor, end - start, start)
            pieces.append(Extent(start, HostBytes.of_bytes(data)))
    return pieces


def _whole(state: Any) -> FileLayout:
    pickler = _storage_recorder()
    buffer = io.BytesIO()
    with _torch_save:
        torch.save(state, buffer, pickle_module=pickler)
    refused = unreadable(buffer) if any(p.suspicious for p in pickler.made) else ""
    return plain(buffer.getvalue(), refused)


class State(Enum):
    PENDING = "pending"  # the bytes are still in the live buffers, or in a slot
    COPYING = "copying"  # the bytes are being copied into a slot
    WRITING = "writing"  # a writer reads the bytes
    READY = "ready"  # hashed, and waiting for the disk. The bytes may be copied
    DONE = "done"


@dataclass(frozen=True)
class BlockPiece:
    """A range of bytes of one tensor or buffer, and its position ``at`` in a block of a checkpoint's file."""

    at: int
    source: Source
    offset: int
    size_bytes: int


@dataclass
class FileBlock:
    """One block of one file of a checkpoint in progress. The lock of the checkpoint's writer guards its state.

    Attributes:
        subgroups: Subgroups of optimizer state that have bytes in the block.
        slot: Address of the block's copy in the host memory that is reserved for copies. None if the block
            is not copied.
    """

    file: int
    offset: int
    size_bytes: int
    pieces: tuple[BlockPiece, ...]
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
    layout: FileLayout


def cut(files: Sequence[PlannedFile], block_bytes: int) -> list[FileBlock]:
    """Divide the files of a checkpoint into blocks. Return all blocks in a list, file by file, by position in it."""
    blocks: list[FileBlock] = []
    for number, planned in enumerate(files):
        blocks.extend(_cut_file(number, planned.layout, block_bytes))
    return blocks


def _cut_file(file: int, layout: FileLayout, block_bytes: int) -> Iterable[FileBlock]:
    extents, first = layout.extents, 0
    for start in range(0, layout.size_bytes, block_bytes):
        end = min(start + block_bytes, layout.size_bytes)
        while first < len(extents) and extents[first].end <= start:
            first += 1
        pieces, at = [], first
        while at < len(extents) and extents[at].offset < end:
            extent = extents[at]
            begin, stop = max(start, extent.offset), min(end, extent.end)
            pieces.append(BlockPiece(begin - start, extent.source, begin - extent.offset, stop - begin))
            at += 1
        subgroups = frozenset(p.source.subgroup for p in pieces if p.source.subgroup is not None)
        yield FileBlock(file, start, end - start, tuple(pieces), subgroups)
