"""The place of each byte of each subgroup's extents: the drive's file and the offset."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from ebbtide.runtime.checkpoint.format.memory import ALIGNMENT


def padded(size_bytes: int) -> int:
    """Direct I/O moves whole sectors."""
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class Block:
    """``size_bytes`` of one tensor from ``begin`` on, in one piece on one drive.

    Attributes:
        offset: from the begin of the extent's share in the drive's file.
    """

    tensor: int
    begin: int
    size_bytes: int
    drive: int
    offset: int


class Layout:
    """A subgroup's tensors lie in a row, each padded to `ALIGNMENT`; the drives share the row by
    weight. A file holds all extents of the first subgroup, then of the next.

    Args:
        sizes: bytes of each tensor, by subgroup.
        weights: of the drives: their bandwidths, in any unit.
        extents: per subgroup.
    """

    def __init__(
        self, sizes: Mapping[int, Sequence[int]], weights: Sequence[float], block_bytes: int, extents: int
    ) -> None:
        self.sizes = {subgroup: tuple(tensors) for subgroup, tensors in sizes.items()}
        self.extents = extents
        self.block_bytes = block_bytes
        self._weights = tuple(weights)
        self._starts: dict[int, tuple[int, ...]] = {}
        ends = [0] * len(self._weights)
        for subgroup in self.sizes:
            self._starts[subgroup] = tuple(ends)
            for drive, share in enumerate(self.shares(subgroup)):
                ends[drive] += share * extents
        self.file_bytes = tuple(ends)

    def with_more(self, sizes: Mapping[int, Sequence[int]]) -> Layout:
        """Return the layout with further subgroups after the present ones, which keep their places."""
        return Layout({**self.sizes, **sizes}, self._weights, self.block_bytes, self.extents)

    def cuts(self, subgroup: int) -> list[int]:
        """Return the offsets in the subgroup's row at which each drive's part begins, and the end."""
        row = sum(map(padded, self.sizes[subgroup]))
        total = sum(self._weights)
        inner = [round(row * weight / total / ALIGNMENT) * ALIGNMENT for weight in accumulate(self._weights[:-1])]
        return [0, *inner, row]

    def shares(self, subgroup: int) -> list[int]:
        """Bytes of one extent on each drive."""
        return [end - begin for begin, end in pairwise(self.cuts(subgroup))]

    def start(self, drive: int, subgroup: int, extent: int) -> int:
        """Offset of the extent's share in the drive's file."""
        return self._starts[subgroup][drive] + extent * self.shares(subgroup)[drive]

    def blocks(self, subgroup: int) -> Iterator[Block]:
        """Yield the subgroup's blocks in the order of its row."""
        cuts, at = self.cuts(subgroup), 0
        for tensor, size_bytes in enumerate(self.sizes[subgroup]):
            edges = {0, *range(0, size_bytes, self.block_bytes), size_bytes}
            edges |= {cut - at for cut in cuts if 0 < cut - at < size_bytes}
            for begin, end in pairwise(sorted(edges)):
                drive = max(d for d, cut in enumerate(cuts[:-1]) if cut <= at + begin)
                yield Block(tensor, begin, end - begin, drive, at + begin - cuts[drive])
            at += padded(size_bytes)


def needed_bytes(sizes: Mapping[int, Sequence[int]], weights: Sequence[float], keep: int = 1) -> tuple[int, ...]:
    """Per drive, of one rank that keeps so many finished steps."""
    return Layout(sizes, weights, ALIGNMENT, keep + 1).file_bytes
