"""Functions that allocate, release and page-lock host memory in units of whole pages."""

import contextlib
import ctypes
import mmap
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from ebbtide.runtime.hardware.cores import bind

_MOST_THREADS = 8  # more threads do not allocate pages faster
_MADV_DONTNEED = 4  # value on Linux. mmap has the constant only for its own mappings


def own_pages(elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Allocate host memory that shares no page with other memory, so that page-locking affects no other tensor.

    A checkpoint can write it with O_DIRECT without a copy. Huge pages make locking faster, and a CPU update takes 7 to
    10% less time (measured on two cores).

    A forked process, such as a dataloader's worker, gets a SIGSEGV if it accesses this memory. Otherwise Linux would
    copy each page that is written after the fork, and the GPU would go on using the old page. Start workers that save
    or read state by ``spawn``, or use threads.
    """
    memory = mmap.mmap(-1, elements * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in ("MADV_DONTFORK", "MADV_HUGEPAGE"):
        with contextlib.suppress(AttributeError, OSError):  # older kernels do not support it
            memory.madvise(getattr(mmap, advice))
    return torch.frombuffer(memory, dtype=dtype, count=elements)


def discard(address: int, length_bytes: int) -> None:
    """Give the whole pages of an address range, which must not be page-locked, back to the operating system.

    The range stays mapped. Its pages then read as zeros, or keep their content if the system ignores the request.
    """
    begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (address + length_bytes) // mmap.PAGESIZE * mmap.PAGESIZE - begin
    advise = getattr(ctypes.CDLL(None), "madvise", None)
    if length > 0 and advise is not None:
        advise(ctypes.c_void_p(begin), ctypes.c_size_t(length), _MADV_DONTNEED)


def back(address: int, size_bytes: int, cores: Sequence[int]) -> None:
    """Allocate the pages of an address range on the NUMA node of the given cores. The range's old content is lost.

    A page is allocated on the node of the core that touches it first. Temporary threads touch the pages here,
    because OpenMP's threads, which torch would use, stay bound to the cores on which they were started.
    """
    threads = max(1, min(len(cores), _MOST_THREADS))
    share = -(-size_bytes // threads // mmap.PAGESIZE) * mmap.PAGESIZE

    def touch(begin: int) -> None:
        ctypes.memset(address + begin, 0, min(share, size_bytes - begin))  # releases the GIL

    with ThreadPoolExecutor(threads, initializer=bind, initargs=(list(cores),)) as pool:
        list(pool.map(touch, range(0, size_bytes, share)))


def lock(address: int, size_bytes: int) -> int:
    """Page-lock an address range of host memory for the current GPU. Return 0, or CUDA's error number.

    After a failure, the error would remain the thread's last CUDA error, and PyTorch would raise it at its
    next kernel. A small kernel is therefore launched here to clear the error.
    """
    error = int(torch.cuda.cudart().cudaHostRegister(address, size_bytes, 0))
    if error:
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device="cuda")
    return error


def unlock(address: int) -> None:
    """Undo the page lock of an address range. No copy from or to the range may be in progress."""
    torch.cuda.cudart().cudaHostUnregister(address)
