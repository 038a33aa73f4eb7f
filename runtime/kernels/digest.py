"""Digests of tensor pieces: a few numbers that add up over pieces, whichever rank holds them.

`digest.cpp` defines the numbers. Host tensors go through it, at the speed of memory. Other tensors
go through torch on their device: the hashes are the same.
"""

import ctypes
import functools
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ebbtide.runtime.kernels import host

LANES, TABLE = 16, 1024
LAYOUT = f"<QQQq{2 + LANES}d"
SMALL = 1 << 17  # elements: below, a second thread costs more than it brings
_CHUNK = 1 << 20  # elements that torch widens at once: 8 MiB
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class Digest:
    """The digest of the elements ``start`` to ``start + count`` of a tensor.

    Attributes:
        hash: equal for equal bits; one changed bit always changes it. Pieces' hashes are added
            modulo 2^64, and so are ``narrow`` ones.
        narrow: the hash of the elements rounded to 16 bits, to nearest even. 0: not requested.
        bits: all words, or-ed.
        not_finite: the number of infinities and NaNs, which count as 0 below.
        squares: the sum of the elements' squares.
        largest: the largest absolute value.
        sketch: sums of the elements with random signs. Pieces' sketches are added.
    """

    hash: int
    narrow: int
    bits: int
    not_finite: int
    squares: float
    largest: float
    sketch: tuple[float, ...]

    def packed(self) -> str:
        """Return the digest as text for a file. `unpacked` reads it."""
        return struct.pack(
            LAYOUT, self.hash, self.narrow, self.bits, self.not_finite, self.squares, self.largest, *self.sketch
        ).hex()


def unpacked(text: str) -> Digest:
    """Return the digest that `Digest.packed` made this text of."""
    first = struct.unpack(LAYOUT, bytes.fromhex(text))
    whole, narrow, bits, not_finite, squares, largest = first[:6]
    return Digest(whole, narrow, bits, not_finite, squares, largest, first[6:])


class _Digest(ctypes.Structure):
    _fields_ = (
        ("hash", ctypes.c_uint64),
        ("narrow", ctypes.c_uint64),
        ("bits", ctypes.c_uint64),
        ("not_finite", ctypes.c_int64),
        ("squares", ctypes.c_double),
        ("largest", ctypes.c_double),
        ("sketch", ctypes.c_double * LANES),
    )


@functools.cache
def _library() -> Any:
    library = ctypes.CDLL(str(host.build(Path(__file__).with_name("digest.cpp"))))
    library.ebbtide_digest.argtypes = [
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_int,
        ctypes.POINTER(_Digest),
    ]
    return library


def digest(piece: torch.Tensor, start: int = 0, narrow: torch.dtype | None = None, threads: int = 1) -> Digest:
    """Return the digest of a flat piece that begins at element ``start`` of its tensor.

    Args:
        piece: fp32, bf16 or fp16, contiguous; not copied (on a device: 8 MiB at once, widened).
        narrow: the elements of an fp32 piece are also hashed as rounded to it (bf16, fp16, fp32).
        threads: of the host kernel.

    Raises:
        ValueError: a dtype or strides that cannot be hashed.
    """
    if piece.dtype not in _KINDS or not piece.is_contiguous():
        raise ValueError(
            f"a piece must be contiguous and of one of the dtypes {tuple(_KINDS)}, but got "
            f"{piece.dtype} with strides {piece.stride()}"
        )
    if piece.dtype != torch.float32:
        narrow = None
    if narrow == torch.float32:
        whole = digest(piece, start, None, threads)
        return replace(whole, narrow=whole.hash)
    if piece.device.type != "cpu":
        return by_torch(piece.detach().view(-1), start, narrow)
    out = _Digest()
    error = _library().ebbtide_digest(
        piece.data_ptr(),
        _KINDS[piece.dtype],
        -1 if narrow is None else _KINDS[narrow],
        piece.numel(),
        start,
        threads if piece.numel() > SMALL else 1,
        ctypes.byref(out),
    )
    assert error == 0, f"digest.cpp must know {piece.dtype} and {narrow}"
    return Digest(out.hash, out.narrow, out.bits, out.not_finite, out.squares, out.largest, tuple(out.sketch))


def by_torch(piece: torch.Tensor, start: int = 0, narrow: torch.dtype | None = None) -> Digest:
    """Return the same by torch's operations, on whatever device; flat pieces."""
    total = Digest(0, 0, 0, 0, 0.0, 0.0, (0.0,) * LANES)
    at = 0
    while at < piece.numel():
        # Chunks end where a row of the table does.
        size = min(piece.numel() - at, _CHUNK - (start + at) % TABLE)
        total = added(total, _chunk(piece[at : at + size], start + at, narrow))
        at += size
    return total


def added(one: Digest, other: Digest) -> Digest:
    """Return the digest of two pieces of one tensor."""
    return Digest(
        (one.hash + other.hash) & _MASK,
        (one.narrow + other.narrow) & _MASK,
        one.bits | other.bits,
        one.not_finite + other.not_finite,
        one.squares + other.squares,
        max(one.largest, other.largest),
        tuple(a + b for a, b in zip(one.sketch, other.sketch, strict=True)),
    )


def _chunk(piece: torch.Tensor, start: int, narrow: torch.dtype | None) -> Digest:
    keys, signs = _keys(start, piece.numel(), piece.device)
    words = _words(piece)
    rounded = 0 if narrow is None else int((_words(piece.to(narrow)) * keys).sum()) & _MASK
    finite = torch.isfinite(piece)
    wide = torch.where(finite, piece, torch.zeros_like(piece)).double()
    lanes = (torch.arange(piece.numel(), device=piece.device) + start) % LANES
    sketch = torch.zeros(LANES, dtype=torch.float64, device=piece.device)
    sketch.index_add_(0, lanes, wide * signs)
    return Digest(
        int((words * keys).sum()) & _MASK,
        rounded,
        int(np.bitwise_or.reduce(words.cpu().numpy())),
        int((~finite).sum()),
        float((wide * wide).sum()),
        float(wide.abs().max()),
        tuple(sketch.tolist()),
    )


def _words(piece: torch.Tensor) -> torch.Tensor:
    """Return the elements' bits as int64, none of them negative."""
    if piece.dtype == torch.float32:
        return piece.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    return piece.view(torch.int16).to(torch.int64) & 0xFFFF


def _keys(start: int, count: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Key and sign of each place, as digest.cpp has them; int64 wraps as uint64 does."""
    places = np.arange(start, start + count, dtype=np.uint64)
    inner = _mixed(places % np.uint64(TABLE)) | np.uint64(1)
    outer = _mixed(~(places // np.uint64(TABLE))) | np.uint64(1)
    signs = 1.0 - 2.0 * ((inner >> np.uint64(63)) ^ (outer >> np.uint64(63))).astype(np.float64)
    keys = (inner * outer).view(np.int64)
    return torch.from_numpy(keys).to(device), torch.from_numpy(signs).to(device)


def _mixed(x: np.ndarray) -> np.ndarray:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
