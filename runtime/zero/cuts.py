"""Where DeepSpeed's flat partitions are cut into subgroups."""

from __future__ import annotations

from typing import Any

# Every vector width that DeepSpeed has for x86 and NEON divides this: plans fit all of them.
ALIGNMENT = 16

Cut = tuple[int, int, int]  # parameter group, offset in its partition, elements


def cuts(partitions: list[int], subgroup_size: int) -> list[Cut]:
    """Every group's partition in pieces of ``subgroup_size``, rounded up to a multiple of 16.

    DeepSpeedCPUAdam treats the elements behind a tensor's last whole vector in another way. With
    borders on multiples of the vectors, those of a partition are those of its last piece, and no
    other has any.
    """
    size = max(1, -(-subgroup_size // ALIGNMENT)) * ALIGNMENT
    return [
        (group, offset, min(size, elements - offset))
        for group, elements in enumerate(partitions)
        for offset in range(0, elements, size)
    ]


def subgroups_of(optimizer: Any, subgroup_size: int) -> tuple[int, ...]:
    """Elements of each subgroup of a live ZeRO optimizer, as plans list them.

    ZeRO-3 has cut its partitions itself, with ``zero_optimization.sub_group_size``.
    """
    numels = getattr(optimizer, "fp16_partitioned_groups_flat_numel", None)
    if numels is not None:
        return tuple(int(n) for n in numels)
    masters = getattr(optimizer, "single_partition_of_fp32_groups", [])
    return tuple(n for _, _, n in cuts([p.numel() for p in masters], subgroup_size))
