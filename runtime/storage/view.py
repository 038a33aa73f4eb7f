"""Tensors that are memory-mapped from files on drives and contain a subgroup's optimizer state.

When newer state is in another region of the files, this region is mapped to the same memory address, so that the
tensors stay valid.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from ebbtide.runtime.checkpoint.format.memory import padded
from ebbtide.runtime.kernels import host
from ebbtide.runtime.storage.extent_file import ExtentFile
from ebbtide.runtime.storage.layout import Layout

_MAP_PRIVATE, _MAP_FIXED = 0x02, 0x10


class View:
    """Tensors (fp32) that show a subgroup's latest state on a drive, mapped into memory.

    The mapping is private: changes to the tensors go to no file until they are passed to `ExtentStore.write`,
    so that no committed state changes.
    """

    def __init__(self, layout: Layout, subgroup: int) -> None:
        self._layout, self._subgroup = layout, subgroup
        sizes = layout.sizes[subgroup]
        self._memory = mmap.mmap(-1, max(1, sum(map(padded, sizes))))
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        tensors, at = [], 0
        for size_bytes in sizes:
            tensors.append(_tensor(self._memory, at, size_bytes))
            at += padded(size_bytes)
        self.tensors = tuple(tensors)
        self._explained = False

    def show(self, extent: int, files: Sequence[ExtentFile]) -> None:
        """Make this view's tensors show their subgroup's state in another extent.

        An extent is a region of the drives that holds the state of one subgroup after one step.
        """
        if not self._explained:
            self._explained = True
            _explain(self._memory, self._address, [str(file.path) for file in files])
        cuts = self._layout.cuts(self._subgroup)
        for drive, size_bytes in enumerate(self._layout.shares(self._subgroup)):
            if size_bytes:
                start = self._layout.start(drive, self._subgroup, extent)
                _map(self._address + cuts[drive], size_bytes, files[drive].descriptor, start)


def page_aligned(elements: int) -> torch.Tensor:
    """Allocate a page-aligned fp32 tensor in host memory, which direct I/O can use without a copy."""
    size_bytes = elements * torch.float32.itemsize
    return _tensor(mmap.mmap(-1, max(1, padded(size_bytes))), 0, size_bytes)


def _tensor(memory: mmap.mmap, at: int, size_bytes: int) -> torch.Tensor:
    if not size_bytes:
        return torch.empty(0)
    count = size_bytes // torch.float32.itemsize
    return torch.frombuffer(memory, dtype=torch.float32, count=count, offset=at)


def _explain(memory: mmap.mmap, address: int, paths: Sequence[str]) -> None:
    text = (
        f"ebbtide: state on storage could not be read from {', '.join(paths)}: the drive failed "
        "(see dmesg), or the file was truncated. This process ends by SIGBUS. The last checkpoint "
        "is intact. Check the drive, then resume.\n"
    )
    with contextlib.suppress(host.MissingCompilerError):  # a process that only reads steps needs no compiler
        number = _library().ebbtide_explain(address, len(memory), text.encode())
        weakref.finalize(memory, _library().ebbtide_forget, number)


@functools.cache
def _library() -> Any:
    library = ctypes.CDLL(str(host.build(Path(__file__).with_name("bus_error.cpp"))))
    library.ebbtide_explain.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_char_p]
    library.ebbtide_forget.argtypes = [ctypes.c_int]
    library.ebbtide_forget.restype = None
    return library


def _map(address: int, size_bytes: int, descriptor: int, offset: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    flags = _MAP_PRIVATE | _MAP_FIXED
    got = libc.mmap(address, size_bytes, protection, flags, descriptor, offset)
    if got != address:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
