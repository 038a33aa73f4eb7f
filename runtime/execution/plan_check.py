"""A check that a plan was made for the subgroups that the training engine has."""

from __future__ import annotations

from ebbtide.simulator.plan import Plan, PlanError
from ebbtide.simulator.schedules.ebbtide import check_locations


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
    return (
        "the order or the groups of the parameters differ (for example no weight decay for some). "
        "Profile the script (`tune profile --train-script`), and plan for the profiled workload "
        "(`tune plan --workload`)"
    )


def _summary(subgroups: tuple[int, ...]) -> str:
    return f"{len(subgroups)} subgroups of {sum(subgroups)} elements in all"
