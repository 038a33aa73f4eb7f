"""A check that a plan was made for the subgroups that the training engine has, or can be fitted to them."""

from __future__ import annotations

import logging
from bisect import bisect_left
from itertools import accumulate

from ebbtide.simulator.plan import Plan, PlanError
from ebbtide.simulator.schedules.ebbtide import check_locations
from ebbtide.simulator.update.order import order_of

logger = logging.getLogger("ebbtide")
PADDING = 1e-3  # share of the elements by which ZeRO-1 and 2 may pad other parameter groups differently


def fitted(plan: Plan, subgroups: tuple[int, ...], sub_group_size: int, zero_stage: int) -> Plan:
    """Return a plan for an engine that cuts the same elements into other subgroups, because its optimizer has other
    parameter groups.

    A plan that was made from a model's config does not know them. The Trainer, for example, has one group with weight
    decay and one without. Each of the engine's subgroups is updated as the plan's subgroup at its place. A plan for
    another model or ``sub_group_size`` is returned unchanged, and `check_plan` refuses it.
    """
    elements, planned = sum(subgroups), sum(plan.subgroups)
    other_model = abs(elements - planned) > (PADDING * planned if zero_stage < 3 else 0)
    if plan.subgroups in ((), subgroups) or other_model or plan.config_subgroup_size != sub_group_size:
        return plan
    ends, begins = [*accumulate(plan.subgroups)], [0, *accumulate(subgroups)]
    middles = ((begin + size / 2) * planned / elements for begin, size in zip(begins, subgroups, strict=False))
    meant = [bisect_left(ends, middle) for middle in middles]
    ways = [plan.ways[i] for i in meant]
    turn = {subgroup: number for number, subgroup in enumerate(plan.issue_order)}
    issue = sorted(range(len(meant)), key=lambda k: turn[meant[k]])
    order = order_of(issue, [way.placement for way in ways])
    logger.info(
        "the plan's %d subgroups are %d here, because the optimizer has other parameter groups than the plan was made "
        "for. Each is updated as the plan's subgroup at its place",
        plan.subgroup_count,
        len(subgroups),
    )
    return plan.with_ways(ways, subgroups=subgroups, order=order, workload_fingerprint="")


def check_plan(plan: Plan, subgroups: tuple[int, ...], sub_group_size: int, zero_stage: int) -> None:
    """Check that a plan was made for the training engine's subgroups and ZeRO stage.

    Raises:
        PlanError: The plan does not match. The message says what differs and which config key to change.
    """
    if plan.subgroups and plan.subgroups != subgroups:
        raise PlanError(
            "the plan must be made for this model's subgroups, but it has "
            f"{_summary(plan.subgroups)} and the engine has {_summary(subgroups)}: "
            + _way_out(plan, subgroups, sub_group_size)
        )
    if plan.subgroup_count != len(subgroups):
        raise PlanError(
            f"plan.ways must set the placement of the engine's {len(subgroups)} subgroups, but sets the placement of "
            f"{plan.subgroup_count} subgroups. Plan again with `tune plan` for sub_group_size {sub_group_size}"
        )
    check_locations(plan, zero_stage)
    if plan.stores and not plan.drives:
        raise PlanError(
            "plan.storage_dir must name a folder if a subgroup has placement 'stored', but got "
            f"{plan.storage_dir!r}: set it in the plan"
        )


def _way_out(plan: Plan, subgroups: tuple[int, ...], sub_group_size: int) -> str:
    if plan.config_subgroup_size != sub_group_size:
        return (
            f"set zero_optimization.sub_group_size to {plan.config_subgroup_size} (it is "
            f"{sub_group_size}) if the model is the same, else plan again with `tune plan`"
        )
    if sum(plan.subgroups) != sum(subgroups):
        return "the model, its trainable parameters or the number of ranks differ: plan again with `tune plan`"
    return "the groups of the parameters differ: plan again with `tune plan`"


def _summary(subgroups: tuple[int, ...]) -> str:
    return f"{len(subgroups)} subgroups of {sum(subgroups)} elements in all"
