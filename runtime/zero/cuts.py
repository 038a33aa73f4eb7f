"""The cuts of DeepSpeed's flat partitions into subgroups."""

from collections.abc import Iterable
from typing import Any

from ebbtide.simulator.workload import ALIGNMENT, cut_flat

Cut = tuple[int, int, int]  # parameter group, offset in its partition, elements


def cuts(partitions: list[int], subgroup_size: int) -> list[Cut]:
    """Return every group's partition in subgroups, with the sizes of `ebbtide.simulator.workload.cut_flat`."""
    found: list[Cut] = []
    for group, elements in enumerate(partitions):
        offset = 0
        for piece in cut_flat([elements], subgroup_size):
            found.append((group, offset, piece))
            offset += piece
    return found


def cuts_at_parameters(groups: Iterable[Iterable[int]], subgroup_size: int) -> list[Cut]:
    """Cut every group into parts of at least ``subgroup_size`` that end with a parameter.

    The ends are also multiples of the vectors (`ebbtide.simulator.workload.cut_flat`). A small rest joins
    the last part.

    Args:
        groups: elements of each group's parameters, in order.
    """
    found: list[Cut] = []
    for group, parameters in enumerate(groups):
        begin = end = 0
        for elements in parameters:
            end += elements
            if end - begin >= subgroup_size and not end % ALIGNMENT:
                found.append((group, begin, end - begin))
                begin = end
        if end > begin > 0 and 2 * (end - begin) < subgroup_size:
            _, begin, _ = found.pop()
        if end > begin or not end:
            found.append((group, begin, end - begin))
    return found


def cuts_of(optimizer: Any, subgroup_size: int) -> list[Cut]:
    """Return the cuts of a live ZeRO optimizer's partitions.

    ZeRO-3 has cut them with its own ``sub_group_size``. They are cut again if ``subgroup_size`` is less.
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
    """Elements of each subgroup of a live ZeRO optimizer, as plans list them."""
    return tuple(n for _, _, n in cuts_of(optimizer, subgroup_size))
