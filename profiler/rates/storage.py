"""Measurements of write and read bandwidth in the folders for checkpoints and for optimizer state on drives, and of the
time that a save takes for each tensor.
"""

import ctypes
import mmap
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import torch
import xxhash
from ebbtide.profiler.rates.sampling import Part, doubts, rate, repeat_s, timed_s
from ebbtide.simulator.machine import StorageRates
from ebbtide.simulator.plan import BLOCK_BYTES
from ebbtide.simulator.quantity import Quantity

PLANNED_WRITERS = 2  # writers of the runtime's checkpoints (`ebbtide.simulator.plan.CheckpointPlan.writers`)
DEPTH = 4  # blocks of stored state in flight, in each direction: `ebbtide.runtime.storage.store.DEPTH`
PARTS = 16  # parts of the file with which a drive is measured. Each part is measured separately
MOST_CPU_SAMPLES = 20
LEAST_FILES = 8  # least number of files to write within the time budget. For a slow disk, the files are smaller
# The blocks of a checkpoint are gathered from memory that is in no cache.
GATHERED_BYTES = 128 * 2**20
_O_DIRECT = getattr(os, "O_DIRECT", 0)


def measure_storage(folder: Path, size_bytes: int, budget_s: float) -> Part:
    """Measure how fast checkpoints can be written to and read from a folder, with a temporary file there.

    O_DIRECT is used if the filesystem accepts it, so that the disk is measured and not the page cache. The file
    of up to ``size_bytes`` is always removed, also after an error. Writes include fsync, which forces data to disk.

    Returns:
        Fields of a `Machine`, and sentences that name unstable measurements.

    Raises:
        OSError: The folder cannot be written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f".ebbtide-storage-{uuid.uuid4().hex}"
    share_s = budget_s / 6
    with file_to_write(path, affordable_bytes(path, size_bytes, share_s)) as file:
        detail = f"{file.size_bytes} bytes, fsync, {file.mode}, {folder}"
        writes = repeat_s(lambda: file.write(PLANNED_WRITERS), share_s)
        reads = repeat_s(file.read, share_s)
        at_once = repeat_s(lambda: _at_once(file.read, lambda: file.write(PLANNED_WRITERS)), share_s)
        fsyncs = repeat_s(file.touch_and_sync, share_s)
        cpu_s = _cpu_seconds(file, share_s)
    rates = {
        "storage_write_bytes_per_s": rate(file.size_bytes, writes, "measured", f"{PLANNED_WRITERS} writers, {detail}"),
        "storage_read_bytes_per_s": rate(file.size_bytes, reads, "measured", detail),
        "storage_duplex_factor": Quantity.from_samples(
            [duplex_factor(s, writes, reads) for s in at_once], "measured", f"read and written at once, {detail}"
        ),
        "storage_fsync_s": sorted(fsyncs)[len(fsyncs) // 2],
        "writer_s_per_byte": Quantity.from_samples(
            [s / file.size_bytes for s in cpu_s],
            "measured",
            f"CPU time of one thread that gathers, hashes and writes {detail}",
        ),
    }
    return rates, [*doubts("storage write", writes), *doubts("storage read", reads)]


def measure_drive(folder: Path, size_bytes: int, budget_s: float) -> StorageRates:
    """Measure the read and write speed of a drive that would hold optimizer state during training.

    The number of concurrent reads or writes is the same as in ebbtide's runtime. Written blocks come from different
    places in host memory, so that the CPU's cache does not hold them. Reads and writes go through consecutive parts of
    a file of up to ``size_bytes``, so that no block is read right after it was written.

    Raises:
        OSError: The folder cannot be written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f".ebbtide-storage-{uuid.uuid4().hex}"
    share_s = budget_s / 4
    room = shutil.disk_usage(folder).free // LEAST_FILES
    size = min(room, affordable_bytes(path, size_bytes, share_s * LEAST_FILES))
    with file_to_write(path, size) as file:
        file.write(DEPTH)
        parts = _Parts(file)
        writes = repeat_s(parts.write, share_s)
        reads = repeat_s(parts.read, share_s)
        at_once = repeat_s(parts.both, share_s)
        detail = f"{DEPTH} blocks under way, of {file.size_bytes} bytes, fsync, {file.mode}"
    return StorageRates(
        write_bytes_per_s=rate(parts.size_bytes, writes, "measured", detail),
        read_bytes_per_s=rate(parts.size_bytes, reads, "measured", detail),
        duplex_factor=Quantity.from_samples([duplex_factor(s, writes, reads) for s in at_once], "measured", detail),
    )


class _Parts:
    def __init__(self, file: "FileToWrite") -> None:
        blocks = file.size_bytes // BLOCK_BYTES
        self._file, self._blocks = file, max(1, blocks // PARTS)
        self._count = blocks // self._blocks
        self._written, self._read = 0, self._count // 2
        self.size_bytes = self._blocks * BLOCK_BYTES

    def write(self) -> None:
        self._file.write(DEPTH, blocks=self._part(self._written), from_memory=True)
        self._written += 1

    def read(self) -> None:
        self._file.read(DEPTH, blocks=self._part(self._read))
        self._read += 1

    def both(self) -> None:
        _at_once(self.read, self.write)

    def _part(self, number: int) -> range:
        first = number % self._count * self._blocks
        return range(first, first + self._blocks)


def _at_once(read: Callable[[], None], write: Callable[[], None]) -> None:
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read)
        write()
        reading.result()


def duplex_factor(at_once_s: float, writes_s: Sequence[float], reads_s: Sequence[float]) -> float:
    """Return the total rate of a concurrent read and write, divided by the sum of both rates alone, at most 1."""
    shorter, longer = sorted(sorted(s)[len(s) // 2] for s in (writes_s, reads_s))
    return min(1.0, shorter / max(shorter, at_once_s - longer + shorter))


def affordable_bytes(path: Path, size_bytes: int, share_s: float) -> int:
    """Return the size in bytes of a test file that a disk can write `LEAST_FILES` times within ``share_s`` seconds.

    The size is at most ``size_bytes``.
    """
    with file_to_write(path, BLOCK_BYTES) as probe:
        probe.write()
        block_s = timed_s(probe.write)
    blocks = int(min(size_bytes // BLOCK_BYTES, share_s / LEAST_FILES / block_s))
    return max(1, blocks) * BLOCK_BYTES


def _cpu_seconds(file: "FileToWrite", share_s: float) -> list[float]:
    result: list[float] = []
    end = time.perf_counter() + share_s
    while not result or (time.perf_counter() < end and len(result) < MOST_CPU_SAMPLES):
        begin = time.thread_time()
        file.write(as_checkpoints=True)
        result.append(max(1e-9, time.thread_time() - begin))
    return result


class FileToWrite:
    """A file that is written repeatedly, block by block, to measure a disk. One caller at a time may use it."""

    def __init__(self, path: Path, size_bytes: int, block: mmap.mmap) -> None:
        self.size_bytes = max(BLOCK_BYTES, size_bytes // BLOCK_BYTES * BLOCK_BYTES)
        self.direct = _takes_direct(path)
        self._path, self._block = path, block
        self._memory: mmap.mmap | None = None
        self._buffers: dict[int, mmap.mmap] = {}
        self._lock = threading.Lock()

    @property
    def mode(self) -> str:
        return "O_DIRECT" if self.direct else "buffered"

    def write(
        self, writers: int = 1, *, as_checkpoints: bool = False, from_memory: bool = False, blocks: range | None = None
    ) -> None:
        """Write the temporary file for a measurement of a drive's speed, then force it to disk (fsync).

        Args:
            as_checkpoints: Do what ebbtide's runtime does for checkpoints. Each thread has a buffer of its own, copies
                every block to it, and hashes the block there.
            from_memory: Take the blocks from different places in memory. If False, every block is the same one in
                memory.
            blocks: Numbers of the blocks to write. If None, all blocks of the file.
        """
        flags = os.O_WRONLY | os.O_CREAT
        with _opened(self._path, flags, self.direct) as descriptor:
            numbers = blocks or range(self.size_bytes // BLOCK_BYTES)
            memory = self._much() if from_memory else None

            def some(first: int) -> None:
                block = self._gathering(first) if as_checkpoints else self._block
                for number in numbers[first::writers]:
                    offset = number * BLOCK_BYTES
                    if as_checkpoints:
                        self._gather(block, offset)
                        xxhash.xxh3_128_hexdigest(block)
                    if memory is None:
                        os.pwrite(descriptor, block, offset)
                    else:
                        os.pwrite(descriptor, _at(memory, offset), offset)

            if writers == 1:
                some(0)
            else:
                with ThreadPoolExecutor(writers) as pool:
                    list(pool.map(some, range(writers)))
            os.fsync(descriptor)

    def _much(self) -> mmap.mmap:
        with self._lock:
            if self._memory is None:
                self._memory = mmap.mmap(-1, GATHERED_BYTES)
                # Without this, all pages would be the same zero page.
                ctypes.memset(_address(self._memory), 1, GATHERED_BYTES)
            return self._memory

    def _gathering(self, writer: int) -> mmap.mmap:
        self._much()
        with self._lock:
            if writer not in self._buffers:
                self._buffers[writer] = mmap.mmap(-1, BLOCK_BYTES)
            return self._buffers[writer]

    def _gather(self, block: mmap.mmap, offset: int) -> None:
        assert self._memory is not None
        source = _address(self._memory) + offset % GATHERED_BYTES
        ctypes.memmove(_address(block), source, BLOCK_BYTES)

    def close(self) -> None:
        """Release the host memory that holds the data for a disk measurement's temporary file."""
        for held in (self._memory, *self._buffers.values()):
            if held is not None:
                held.close()

    def read(self, readers: int = 1, blocks: range | None = None) -> None:
        """Read the temporary file of a storage measurement, or some of its blocks, with the given number of threads."""
        with _opened(self._path, os.O_RDONLY, self.direct) as descriptor:
            if not self.direct and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            numbers = blocks or range(self.size_bytes // BLOCK_BYTES)

            def some(first: int) -> None:
                with mmap.mmap(-1, BLOCK_BYTES) as block:
                    for number in numbers[first::readers]:
                        os.preadv(descriptor, [block], number * BLOCK_BYTES)

            with ThreadPoolExecutor(readers) as pool:
                list(pool.map(some, range(readers)))

    def touch_and_sync(self) -> None:
        with _opened(self._path, os.O_WRONLY, direct=False) as descriptor:
            os.pwrite(descriptor, str(time.time_ns()).encode(), 0)
            os.fsync(descriptor)


@contextmanager
def file_to_write(path: Path, size_bytes: int) -> Iterator[FileToWrite]:
    """Yield a temporary file for a measurement of a disk's speed, and delete it afterwards.

    Raises:
        OSError: The file cannot be created.
    """
    block = mmap.mmap(-1, BLOCK_BYTES)  # page-aligned, as O_DIRECT requires
    try:
        block.write(os.urandom(BLOCK_BYTES))
        with closing(FileToWrite(path, size_bytes, block)) as file:
            yield file
    finally:
        path.unlink(missing_ok=True)
        block.close()


def _at(memory: mmap.mmap, offset: int) -> memoryview:
    place = offset % GATHERED_BYTES
    return memoryview(memory)[place : place + BLOCK_BYTES]


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


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


TENSORS = 64


def measure_save(budget_s: float) -> Quantity:
    """Measure how long it takes to save a checkpoint's file without the tensors' data, in seconds per tensor.

    ebbtide saves each file in this way, and writes the tensors' data separately. The measurement includes a load
    without data, which stands for the other work that a save does for each tensor.
    """
    state = {f"layer.{i}.weight": torch.zeros(4) for i in range(TENSORS)}
    descriptor = os.memfd_create("ebbtide-save")
    path = f"/proc/self/fd/{descriptor}"

    def save() -> None:
        with torch.serialization.skip_data():
            torch.save(state, path)
            torch.load(path, map_location="meta", weights_only=True)

    try:
        seconds = repeat_s(save, budget_s)
    finally:
        os.close(descriptor)
    detail = f"torch.save without data and a look at it, {TENSORS} tensors"
    return Quantity.from_samples([s / TENSORS for s in seconds], "measured", detail)
