"""The layout of optimizer state on drives: the file and the offset of each byte of a subgroup's state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from ebbtide.runtime.checkpoint.format.memory import ALIGNMENT, padded


@dataclass(frozen=True, slots=True)
class Stripe:
    """A contiguous part of one tensor's state on one drive. The part starts at byte ``begin`` of the tensor.

    Attributes:
        offset: Offset of the part from the start of its subgroup's bytes in the drive's file.
    """

    tensor: int
    begin: int
    size_bytes: int
    drive: int
    offset: int


class Layout:
    """The layout of subgroups' optimizer state in the files of one or more drives.

    Each subgroup has several extents, so that its state after several steps can be stored at once. All extents of the
    first subgroup come first, then those of the next. An extent has the subgroup's tensors one after the other, each
    padded to `ALIGNMENT` bytes. These bytes are divided among the drives in proportion to ``weights``.

    Args:
        extents: Number of extents per subgroup.
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
        """Return a layout with further subgroups, placed after the subgroups of this layout."""
        return Layout({**self.sizes, **sizes}, self._weights, self.block_bytes, self.extents)

    def cuts(self, subgroup: int) -> list[int]:
        """Return the byte offsets at which each drive's part of a subgroup's state begins, and the length of the state.

        They count from the start of the subgroup's tensors, one after the other, each `padded` to whole sectors.
        """
        row = sum(map(padded, self.sizes[subgroup]))
        total = sum(self._weights)
        inner = [round(row * weight / total / ALIGNMENT) * ALIGNMENT for weight in accumulate(self._weights[:-1])]
        return [0, *inner, row]

    def shares(self, subgroup: int) -> list[int]:
        """Return the number of bytes that one copy of a subgroup's state takes on each drive: one number per drive."""
        return [end - begin for begin, end in pairwise(self.cuts(subgroup))]

    def start(self, drive: int, subgroup: int, extent: int) -> int:
        """Return the byte offset in a drive's file at which the drive's part of an extent begins."""
        return self._starts[subgroup][drive] + extent * self.shares(subgroup)[drive]

    def blocks(self, subgroup: int) -> Iterator[Stripe]:
        """Yield the contiguous parts of a subgroup's state on the drives, in the order of its tensors."""
        cuts, at = self.cuts(subgroup), 0
        for tensor, size_bytes in enumerate(self.sizes[subgroup]):
            edges = {0, *range(0, size_bytes, self.block_bytes), size_bytes}
            edges |= {cut - at for cut in cuts if 0 < cut - at < size_bytes}
            for begin, end in pairwise(sorted(edges)):
                drive = max(d for d, cut in enumerate(cuts[:-1]) if cut <= at + begin)
                yield Stripe(tensor, begin, end - begin, drive, at + begin - cuts[drive])
            at += padded(size_bytes)
