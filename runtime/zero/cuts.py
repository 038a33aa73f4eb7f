"""Where DeepSpeed's flat partitions are cut into subgroups."""

from typing import Any

from simulator.workload import cut_flat

Cut = tuple[int, int, int]  # parameter group, offset in its partition, elements


def cuts(partitions: list[int], subgroup_size: int) -> list[Cut]:
    """Every group's partition in pieces, as `simulator.workload.cut_flat` sizes them."""
    found: list[Cut] = []
    for group, elements in enumerate(partitions):
        offset = 0
        for piece in cut_flat([elements], subgroup_size):
            found.append((group, offset, piece))
            offset += piece
    return found


def subgroups_of(optimizer: Any, subgroup_size: int) -> tuple[int, ...]:
    """Elements of each subgroup of a live ZeRO optimizer, as plans list them.

    ZeRO-3 has cut its partitions itself, with ``zero_optimization.sub_group_size``.
    """
    numels = getattr(optimizer, "fp16_partitioned_groups_flat_numel", None)
    if numels is not None:
        return tuple(int(n) for n in numels)
    masters = getattr(optimizer, "single_partition_of_fp32_groups", [])
    return tuple(n for _, _, n in cuts([p.numel() for p in masters], subgroup_size))
