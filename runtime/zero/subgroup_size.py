"""The number of elements of a plan's subgroups on a DeepSpeed engine, and whether DeepSpeed's own can be divided."""

from typing import Any

from ebbtide.runtime.kernels.rule import UpdateRule
from ebbtide.runtime.zero.flat_partitions import subgroups_of
from ebbtide.runtime.zero.stage3_buffers import swapped
from ebbtide.simulator.plan import Plan, PlanError

# For "auto": DeepSpeed's own subgroups (1e9 elements by default) are few, and each has one placement. More than about
# 30 parts gain nothing, and for much smaller parts the latency of copies matters.
DEEPSPEEDS_SUBGROUP = 10**9  # elements: DeepSpeed's default sub_group_size
PIECES, PIECE, LEAST_PIECE = 32, 100_000_000, 20_000_000


def automatic_size(engine: Any, rule: UpdateRule, *, stores: bool) -> int:
    """Return the number of elements of a subgroup under ``plan="auto"``.

    Args:
        stores: True if the plan may keep optimizer state on a drive.
    """
    optimizer, size = engine.optimizer, max(1, int(engine.zero_sub_group_size()))
    if rule.own_step:
        return max([size, *partitions(optimizer)])
    elements = sum(subgroups_of(optimizer, size))
    return min(size, max(piece_elements(elements), _finest(optimizer, rule, stores=stores)))


def piece_elements(elements: int) -> int:
    """Return the minimum number of elements of a subgroup when an automatic plan divides a rank's optimizer state."""
    return max(LEAST_PIECE, min(PIECE, elements // PIECES))


def _finest(optimizer: Any, rule: UpdateRule, *, stores: bool) -> int:
    whole = _why_whole(optimizer, rule, stores=stores)
    return getattr(optimizer, "sub_group_size", 1) if whole else 1


def _why_whole(optimizer: Any, rule: UpdateRule, *, stores: bool) -> str:
    if stores:
        return "the plan keeps optimizer state on a drive"
    if rule.own_step:
        return "ebbtide has no kernel for the optimizer"
    return "DeepSpeed keeps parameters on a drive" if swapped(optimizer) else ""


def planned_size(plan: Plan, optimizer: Any, rule: UpdateRule) -> int:
    """Return the number of elements of a plan's subgroup on an engine. It is a subgroup of DeepSpeed's, or a part.

    Raises:
        PlanError: The plan divides DeepSpeed's subgroups, but the engine has others, or they cannot be divided.
    """
    whole = getattr(optimizer, "sub_group_size", plan.subgroup_size)
    if plan.deepspeed_subgroup_size:
        check_own_size(plan, whole)
        _check_can_be_cut(plan, optimizer, rule)
        return plan.subgroup_size
    sizes = subgroups_of(optimizer, whole)
    if plan.subgroups == sizes or (not plan.subgroups and plan.subgroup_count == len(sizes)):
        return int(whole)
    return max(plan.subgroup_size, _finest(optimizer, rule, stores=plan.stores))


def check_own_size(plan: Plan, sub_group_size: Any) -> None:
    """Check that DeepSpeed's subgroups have the size that a plan which divides them was made for.

    Raises:
        PlanError: They have another size.
    """
    if sub_group_size != plan.deepspeed_subgroup_size:
        raise PlanError(
            "zero_optimization.sub_group_size in the DeepSpeed config must equal plan.deepspeed_subgroup_size, which "
            f"is {plan.deepspeed_subgroup_size}, but got {sub_group_size}. Set sub_group_size to "
            f"{plan.deepspeed_subgroup_size}, or plan again with `tune plan --subgroup-size pieces` for this config",
            key="deepspeed_subgroup_size",
        )


def _check_can_be_cut(plan: Plan, optimizer: Any, rule: UpdateRule) -> None:
    if _finest(optimizer, rule, stores=plan.stores) > plan.subgroup_size:
        raise PlanError(
            "plan.deepspeed_subgroup_size must be absent for this engine: DeepSpeed's subgroups cannot be divided, "
            f"because {_why_whole(optimizer, rule, stores=plan.stores)}. Plan again with "
            "`tune plan --subgroup-size auto`",
            key="deepspeed_subgroup_size",
        )


def partitions(optimizer: Any) -> list[int]:
    """Return the numbers of elements of the partitions that ZeRO-1 and 2 keep whole. The list is empty under ZeRO-3."""
    return [p.numel() for p in getattr(optimizer, "single_partition_of_fp32_groups", [])]
