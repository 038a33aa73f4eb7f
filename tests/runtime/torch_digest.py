"""A second implementation of the tensor digest, by torch operations, with which `digest.cpp` must agree."""

import numpy as np
import torch
from ebbtide.runtime.kernels.digest import LANES, TABLE, Digest, added

_CHUNK = 1 << 20
_MASK = (1 << 64) - 1


def by_torch(piece: torch.Tensor, start: int = 0) -> Digest:
    """Return the digest of a flat tensor, computed by torch operations."""
    total = Digest(0, 0, 0.0, (0.0,) * LANES)
    at = 0
    while at < piece.numel():
        # Chunks end at the end of a row of the table.
        size = min(piece.numel() - at, _CHUNK - (start + at) % TABLE)
        total = added(total, _chunk(piece[at : at + size], start + at))
        at += size
    return total


def _chunk(piece: torch.Tensor, start: int) -> Digest:
    keys, signs = _keys(start, piece.numel(), piece.device)
    words = _words(piece)
    finite = torch.isfinite(piece)
    wide = torch.where(finite, piece, torch.zeros_like(piece)).double()
    lanes = (torch.arange(piece.numel(), device=piece.device) + start) % LANES
    sketch = torch.zeros(LANES, dtype=torch.float64, device=piece.device)
    sketch.index_add_(0, lanes, wide * signs)
    return Digest(
        int((words * keys).sum()) & _MASK, int((~finite).sum()), float((wide * wide).sum()), tuple(sketch.tolist())
    )


def _words(piece: torch.Tensor) -> torch.Tensor:
    if piece.dtype == torch.float32:
        return piece.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    return piece.view(torch.int16).to(torch.int64) & 0xFFFF


def _keys(start: int, count: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
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
