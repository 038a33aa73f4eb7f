"""Host memory page by page."""

from __future__ import annotations

import ctypes
import mmap

_MADV_DONTNEED = 4  # Linux; mmap's own constant is there only for its own mappings


def discard(address: int, length_bytes: int) -> None:
    """Gives the whole pages of a range back to the system; what was in them is lost.

    For the parts of a large buffer whose contents have gone elsewhere, when it cannot be freed
    before the last of them has. The range stays mapped: it reads as zeros, or as it was where the
    system takes no such advice. Not for page-locked memory.
    """
    begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (address + length_bytes) // mmap.PAGESIZE * mmap.PAGESIZE - begin
    advise = getattr(ctypes.CDLL(None), "madvise", None)
    if length > 0 and advise is not None:
        advise(ctypes.c_void_p(begin), ctypes.c_size_t(length), _MADV_DONTNEED)
