"""Write and read bandwidth of the folder that checkpoints go to."""

from __future__ import annotations

import mmap
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from profiler.sampling import repeat_s
from simulator.quantity import Quantity

BLOCK_BYTES = 4 * 2**20
_O_DIRECT = getattr(os, "O_DIRECT", 0)


@dataclass(frozen=True)
class StorageRates:
    """Bytes/s with the data on the medium (fsync included), and the cost of an fsync alone."""

    write: Quantity
    read: Quantity
    fsync_s: float
    direct: bool


def measure_storage(folder: Path, size_bytes: int, budget_s: float) -> StorageRates:
    """Writes and reads a file of ``size_bytes`` in ``folder``; removes it, also on error.

    O_DIRECT where the filesystem takes it, so that the page cache does not pose as a disk.

    Raises:
        OSError: the folder cannot be written to.
    """
    size_bytes = max(BLOCK_BYTES, size_bytes // BLOCK_BYTES * BLOCK_BYTES)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f".ebbtide-storage-{uuid.uuid4().hex}"
    block = mmap.mmap(-1, BLOCK_BYTES)  # page-aligned, as O_DIRECT wants it
    block.write(os.urandom(BLOCK_BYTES))
    try:
        direct = _takes_direct(path)
        detail = f"{size_bytes} bytes, fsync, {'O_DIRECT' if direct else 'buffered'}, {folder}"
        writes = repeat_s(lambda: _write(path, block, size_bytes, direct), budget_s * 0.6)
        reads = repeat_s(lambda: _read(path, block, direct), budget_s * 0.3)
        fsyncs = repeat_s(lambda: _touch_and_sync(path), budget_s * 0.1)
    finally:
        path.unlink(missing_ok=True)
        block.close()
    return StorageRates(
        write=Quantity.from_samples([size_bytes / s for s in writes], "measured", detail),
        read=Quantity.from_samples([size_bytes / s for s in reads], "measured", detail),
        fsync_s=sorted(fsyncs)[len(fsyncs) // 2],
        direct=direct,
    )


def _takes_direct(path: Path) -> bool:
    if not _O_DIRECT:
        return False
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | _O_DIRECT, 0o600))
    except OSError:
        return False
    return True


@contextmanager
def _opened(path: Path, flags: int, direct: bool) -> Iterator[int]:
    descriptor = os.open(path, flags | (_O_DIRECT if direct else 0), 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _write(path: Path, block: mmap.mmap, size_bytes: int, direct: bool) -> None:
    with _opened(path, os.O_WRONLY | os.O_CREAT, direct) as descriptor:
        for offset in range(0, size_bytes, BLOCK_BYTES):
            os.pwrite(descriptor, block, offset)
        os.fsync(descriptor)


def _read(path: Path, block: mmap.mmap, direct: bool) -> None:
    with _opened(path, os.O_RDONLY, direct) as descriptor:
        if not direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        offset = 0
        while got := os.preadv(descriptor, [block], offset):
            offset += got


def _touch_and_sync(path: Path) -> None:
    with _opened(path, os.O_WRONLY, direct=False) as descriptor:
        os.pwrite(descriptor, str(time.time_ns()).encode(), 0)
        os.fsync(descriptor)
