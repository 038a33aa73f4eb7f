"""The division of each rank's flat ZeRO partitions into the subgroups that a plan updates one by one."""

from collections.abc import Iterable
from itertools import accumulate
from typing import Any

from ebbtide.simulator.subgroups import cut_flat, pieces_of

Cut = tuple[int, int, int]  # (parameter group, offset in its partition, number of elements)


def cuts(partitions: list[int], subgroup_size: int) -> list[Cut]:
    """Divide each parameter group's ZeRO partition into subgroups of about ``subgroup_size`` elements."""
    return _in_a_row(cut_flat([elements], subgroup_size) for elements in partitions)


def _in_a_row(groups: Iterable[list[int]]) -> list[Cut]:
    return [
        (group, offset, elements)
        for group, sizes in enumerate(groups)
        for offset, elements in zip(accumulate(sizes, initial=0), sizes, strict=False)
    ]


def cuts_at_parameters(groups: Iterable[Iterable[int]], subgroup_size: int) -> list[Cut]:
    """Divide each group of parameters into subgroups of at least ``subgroup_size`` elements."""
    return _in_a_row(pieces_of(parameters, subgroup_size) for parameters in groups)


def cuts_of(optimizer: Any, subgroup_size: int) -> list[Cut]:
    """Return how the flat partitions of a DeepSpeed ZeRO optimizer are divided into subgroups.

    The result is a list of (index of the flat partition, offset in it, number of elements), with one entry per
    subgroup. Under ZeRO-3, the flat partitions are DeepSpeed's own subgroups. They are divided further if
    ``subgroup_size`` is less than DeepSpeed's ``sub_group_size``.
    """
    numels = getattr(optimizer, "fp16_partitioned_groups_flat_numel", None)
    if numels is None:
        masters = getattr(optimizer, "single_partition_of_fp32_groups", [])
        return cuts([p.numel() for p in masters], subgroup_size)
    if subgroup_size >= optimizer.sub_group_size:
        return [(group, 0, int(n)) for group, n in enumerate(numels)]
    places, key = optimizer.grad_position, optimizer.get_param_id
    sizes = [[places[key(p)][2] for p in group] for group in optimizer.fp16_groups]
    return cuts_at_parameters(sizes, subgroup_size)


def subgroups_of(optimizer: Any, subgroup_size: int) -> tuple[int, ...]:
    """Return the number of elements of each subgroup of a DeepSpeed ZeRO optimizer, as a plan lists them."""
    return tuple(n for _, _, n in cuts_of(optimizer, subgroup_size))
