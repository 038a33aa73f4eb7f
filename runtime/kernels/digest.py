"""Digests of parts of a tensor: a few numbers per part that can be added up over all parts of the tensor.

`digest.cpp` defines the numbers and computes them as fast as memory is read. GPU tensors are copied to the
host in chunks and are digested there.
"""

import ctypes
import functools
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from ebbtide.runtime.kernels import host

LANES, TABLE = 16, 1024
LAYOUT = f"<QQQq{2 + LANES}d"
SMALL = 1 << 17  # elements. For smaller tensors, starting a second thread takes longer than it saves
PIECE_BYTES = 1 << 24  # bytes that are copied to the host at a time
_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class Digest:
    """The digest of the elements ``start`` to ``start + count`` of a tensor.

    The digest of two parts together follows from the digests of the parts (see `added`). Hashes are added modulo 2^64,
    and sketches are added element by element.

    Attributes:
        hash: A hash of the elements' bits. One changed bit always changes it.
        narrow: The hash of the fp32 elements after rounding to another dtype, such as bf16, to nearest even. 0 if no
            such hash was requested.
        bits: The bitwise or of all the elements' bit patterns.
        not_finite: The number of infinities and NaNs, which count as 0 in the fields below.
        squares: The sum of the elements' squares.
        largest: The largest absolute value of an element.
        sketch: Several sums of the elements with random signs.
    """

    hash: int
    narrow: int
    bits: int
    not_finite: int
    squares: float
    largest: float
    sketch: tuple[float, ...]

    def packed(self) -> str:
        """Return this digest of a tensor as one text for a file. `ebbtide.tuner.verify.run` reads the text."""
        return struct.pack(
            LAYOUT, self.hash, self.narrow, self.bits, self.not_finite, self.squares, self.largest, *self.sketch
        ).hex()


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
    """Return the digest of a flat part of a tensor, which begins at element ``start`` of the tensor.

    Args:
        piece: Contiguous fp32, bf16 or fp16 part. A part in GPU memory is copied to the host in chunks of
            `PIECE_BYTES`.
        narrow: If given, the digest of an fp32 part has a second hash: that of the elements after rounding to this
            dtype (bf16, fp16 or fp32). The digest of an fp32 master can thus be compared with that of the 16-bit
            parameter.

    Raises:
        ValueError: The dtype or the strides cannot be hashed.
    """
    if piece.dtype not in host.DTYPES or not piece.is_contiguous():
        raise ValueError(
            f"a hashed tensor must be contiguous and of one of the dtypes {tuple(host.DTYPES)}, but got "
            f"{piece.dtype} with strides {piece.stride()}"
        )
    if piece.dtype != torch.float32:
        narrow = None
    if narrow == torch.float32:
        whole = digest(piece, start, None, threads)
        return replace(whole, narrow=whole.hash)
    if piece.device.type != "cpu":
        return by_pieces(piece.detach().view(-1), start, narrow, threads)
    out = _Digest()
    error = _library().ebbtide_digest(
        piece.data_ptr(),
        host.DTYPES[piece.dtype],
        -1 if narrow is None else host.DTYPES[narrow],
        piece.numel(),
        start,
        threads if piece.numel() > SMALL else 1,
        ctypes.byref(out),
    )
    assert error == 0, f"digest.cpp must know {piece.dtype} and {narrow}"
    return Digest(out.hash, out.narrow, out.bits, out.not_finite, out.squares, out.largest, tuple(out.sketch))


def by_pieces(piece: torch.Tensor, start: int = 0, narrow: torch.dtype | None = None, threads: int = 1) -> Digest:
    """Return the digest of a flat part of a tensor on a GPU. One chunk is hashed while the next one is copied."""
    on_cuda = piece.is_cuda
    size = max(1, min(piece.numel(), PIECE_BYTES // piece.element_size()))
    parts = piece.split(size)
    buffers = [torch.empty(size, dtype=piece.dtype, pin_memory=on_cuda) for _ in parts[:2]]
    total = Digest(0, 0, 0, 0, 0.0, 0.0, (0.0,) * LANES)

    def bring(number: int) -> Callable[[], object]:
        buffers[number % 2][: parts[number].numel()].copy_(parts[number], non_blocking=on_cuda)
        if not on_cuda:
            return lambda: None
        arrived = torch.cuda.Event()
        arrived.record(torch.cuda.current_stream(piece.device))
        return arrived.synchronize  # type: ignore[no-any-return]

    arrives = bring(0)
    for number, part in enumerate(parts):
        arrives()
        if number + 1 < len(parts):  # copy to the other buffer, whose part has already been hashed
            arrives = bring(number + 1)
        total = added(total, digest(buffers[number % 2][: part.numel()], start + number * size, narrow, threads))
    return total


def added(one: Digest, other: Digest) -> Digest:
    """Return the digest of two parts of a tensor together, from the digests of the two parts."""
    return Digest(
        (one.hash + other.hash) & _MASK,
        (one.narrow + other.narrow) & _MASK,
        one.bits | other.bits,
        one.not_finite + other.not_finite,
        one.squares + other.squares,
        max(one.largest, other.largest),
        tuple(a + b for a, b in zip(one.sketch, other.sketch, strict=True)),
    )
