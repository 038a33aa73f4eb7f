"""The division of a rank's parameters into subgroups of optimizer state, as DeepSpeed and plans divide them."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Protocol

# Every vector width of DeepSpeed's kernels for x86 and NEON divides this number, so a plan is valid for all of them.
ALIGNMENT = 16


class Cut(Protocol):
    """The interface of objects that say how a workload's parameters are divided into subgroups, such as plans."""

    @property
    def subgroups(self) -> Sequence[int]:
        """Return the number of elements of each subgroup of optimizer state under a plan. Empty if unknown."""
        ...

    @property
    def subgroup_size(self) -> int:
        """Return the least number of elements of a complete subgroup under a plan."""
        ...

    @property
    def deepspeed_subgroup_size(self) -> int:
        """Return DeepSpeed's own subgroup size if a plan's subgroups are parts of DeepSpeed's, otherwise 0."""
        ...


def cut(partitions: Iterable[int], subgroup_size: int) -> list[int]:
    """Return the number of elements of each subgroup that DeepSpeed's ZeRO-3 forms from one parameter group.

    A subgroup ends with the parameter that fills it. Source: ``DeepSpeedZeroOptimizer_Stage3._create_fp16_sub_groups``.
    """
    return [sum(held) for held in grouped(partitions, subgroup_size)]


def grouped(partitions: Iterable[int], subgroup_size: int) -> list[list[int]]:
    """Return the subgroups that DeepSpeed's ZeRO-3 forms, each as a list of the numbers of elements of its
    parameters.
    """
    result, held, size = list[list[int]](), list[int](), 0
    for elements in partitions:
        held.append(elements)
        size += elements
        if size >= subgroup_size:
            result.append(held)
            held, size = [], 0
    return [*result, held] if size else result


def pieces_of(parameters: Iterable[int], least: int) -> list[int]:
    """Return the sizes of the parts into which a subgroup is divided.

    A part grows parameter by parameter. It is complete when it has at least ``least`` elements and ends at a multiple
    of the vector length (see `cut_flat`). The elements after the last complete part are added to that part if they are
    fewer than half of ``least``. Otherwise they form a smaller part.

    Args:
        least: Smallest number of elements of a complete part.
    """
    found, size = list[int](), 0
    for elements in parameters:
        size += elements
        if size >= least and not size % ALIGNMENT:  # so each part begins at a multiple of ALIGNMENT
            found.append(size)
            size = 0
    if size and found and 2 * size < least:
        size += found.pop()
    return [*found, size] if size or not found else found


def cut_flat(partitions: Sequence[int], subgroup_size: int) -> list[int]:
    """Return the sizes of the subgroups into which a flat partition of ZeRO-1 or 2 is divided."""
    # Each has ``subgroup_size`` elements, rounded up to a multiple of 16, and the last one has the rest. A parameter
    # may lie in two subgroups. The rounding keeps results bit-identical to those of the undivided partition:
    # DeepSpeedCPUAdam computes the elements after a tensor's last whole vector in another way, and only the last
    # subgroup has such elements.
    size = max(1, -(-subgroup_size // ALIGNMENT)) * ALIGNMENT
    return [min(size, elements - offset) for elements in partitions for offset in range(0, elements, size)]


LEAST_GATHERED = 1 << 20  # elements
GATHERS = 32  # so many all-gathers, if each has that many elements


def exchanged_pieces(sizes: Sequence[int], most: int | None = None) -> list[tuple[int, int, range]]:
    """Divide a rank's partition under ZeRO-1 or 2 into the pieces that all ranks exchange, in this order, after their
    updates.

    First elements and sizes of the pieces depend on nothing that may differ between ranks, such as their subgroups.

    Args:
        sizes: The number of elements of each subgroup of the partition, in order.
        most: Largest number of elements of a piece.

    Returns:
        For each piece, its first element, its number of elements, and the subgroups that hold a part of it.
    """
    ends = list(accumulate(sizes))
    elements = ends[-1] if ends else 0
    size = max(-(-elements // GATHERS), LEAST_GATHERED)
    size = size if most is None else min(size, most)
    begins = [*range(0, elements, size), elements]
    return [(a, b - a, range(bisect_right(ends, a), bisect_left(ends, b) + 1)) for a, b in pairwise(begins)]
