"""Digests of parts of a tensor: a few numbers per part that can be added up over all parts of the tensor.

`digest.cpp` defines the numbers and computes them as fast as memory is read. GPU tensors are copied to the
host in chunks and are digested there.
"""

import ctypes
import functools
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from ebbtide.runtime.kernels import host

LANES, TABLE = 16, 1024
LAYOUT = f"<Qq{1 + LANES}d"
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
        not_finite: The number of infinities and NaNs, which count as 0 in the fields below.
        sketch: Several sums of the elements with random signs.
    """

    hash: int
    not_finite: int
    squares: float
    sketch: tuple[float, ...]

    def packed(self) -> str:
        """Return this digest of a tensor as one text for a file. `ebbtide.tuner.verify.run` reads the text."""
        return struct.pack(LAYOUT, self.hash, self.not_finite, self.squares, *self.sketch).hex()


class _DigestInC(ctypes.Structure):
    _fields_ = (
        ("hash", ctypes.c_uint64),
        ("not_finite", ctypes.c_int64),
        ("squares", ctypes.c_double),
        ("sketch", ctypes.c_double * LANES),
    )


@functools.cache
def _library() -> Any:
    library = ctypes.CDLL(str(host.build(Path(__file__).with_name("digest.cpp"))))
    library.ebbtide_digest.argtypes = [
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_int,
        ctypes.POINTER(_DigestInC),
    ]
    return library


def digest(piece: torch.Tensor, start: int = 0, threads: int = 1) -> Digest:
    """Return the digest of a flat part of a tensor, which begins at element ``start`` of the tensor.

    Args:
        piece: Contiguous fp32, bf16 or fp16 part. A part in GPU memory is copied to the host in chunks of
            `PIECE_BYTES`.

    Raises:
        ValueError: The dtype or the strides cannot be hashed.
    """
    if piece.dtype not in host.DTYPES or not piece.is_contiguous():
        raise ValueError(
            f"a hashed tensor must be contiguous and of one of the dtypes {tuple(host.DTYPES)}, but got "
            f"{piece.dtype} with strides {piece.stride()}"
        )
    if piece.device.type != "cpu":
        return by_pieces(piece.detach().view(-1), start, threads)
    out = _DigestInC()
    error = _library().ebbtide_digest(
        piece.data_ptr(),
        host.DTYPES[piece.dtype],
        piece.numel(),
        start,
        threads if piece.numel() > SMALL else 1,
        ctypes.byref(out),
    )
    assert error == 0, f"digest.cpp must know {piece.dtype}"
    return Digest(out.hash, out.not_finite, out.squares, tuple(out.sketch))


def by_pieces(piece: torch.Tensor, start: int = 0, threads: int = 1) -> Digest:
    """Return the digest of a flat part of a tensor on a GPU. One chunk is hashed while the next one is copied."""
    on_cuda = piece.is_cuda
    size = max(1, min(piece.numel(), PIECE_BYTES // piece.element_size()))
    parts = piece.split(size)
    buffers = [torch.empty(size, dtype=piece.dtype, pin_memory=on_cuda) for _ in parts[:2]]
    total = Digest(0, 0, 0.0, (0.0,) * LANES)

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
        total = added(total, digest(buffers[number % 2][: part.numel()], start + number * size, threads))
    return total


def added(one: Digest, other: Digest) -> Digest:
    """Return the digest of two parts of a tensor together, from the digests of the two parts."""
    return Digest(
        (one.hash + other.hash) & _MASK,
        one.not_finite + other.not_finite,
        one.squares + other.squares,
        tuple(a + b for a, b in zip(one.sketch, other.sketch, strict=True)),
    )
