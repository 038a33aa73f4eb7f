"""Builds the executor of a plan around DeepSpeed's buffers."""

from __future__ import annotations

import os
from typing import Any

import torch

from runtime.devices.base import Device
from runtime.execution.executor import Executor
from runtime.execution.step_template import step_template
from runtime.execution.subgroup_state import SubgroupState, allocate, staging_slots
from runtime.kernels.rule import UpdateRule
from runtime.zero import private
from simulator.plan import Plan

# Every vector width that DeepSpeed has for x86 and NEON divides it: a plan fits all of them.
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


def build_executor(
    optimizer: Any,
    plan: Plan,
    device: Device,
    masters: list[torch.Tensor],
    moments: list[tuple[torch.Tensor, ...]],
    gradients: list[torch.Tensor],
    rule: UpdateRule,
) -> tuple[Plan, Executor]:
    """Moves the state to where ``plan`` wants it; the plan returned is what memory allowed.

    DeepSpeed's own references (fp32 groups, Adam's state, gradient views) follow the buffers.
    """
    sizes = [int(n) for n in optimizer.fp16_partitioned_groups_flat_numel]
    placements = list(plan.placements)
    visiting = [n for n, p in zip(sizes, placements, strict=True) if p == "device"]
    slots = staging_slots(device, plan.staging_slots, visiting, 1 + len(rule.moments))
    if not slots:
        placements = ["host" if p == "device" else p for p in placements]
    wires = list(optimizer.fp16_partitioned_groups_flat)
    states = allocate(device, placements, masters, moments, wires, gradients)
    _repoint(optimizer, states, rule)
    plan = as_allocated(plan, states, len(slots))
    wire = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(optimizer.dtype, "fp32")
    template = step_template(tuple(sizes), wire, plan)
    return plan, Executor(device, states, slots, template, threads_of(plan, device), rule)


def rebuild(optimizer: Any, plan: Plan, before: list[SubgroupState]) -> tuple[Plan, Executor]:
    """`build_executor` around the state of an executor that has ended."""
    return build_executor(
        optimizer, plan, optimizer._ebbtide.executor.device, [s.p for s in before],
        [s.moments for s in before], [s.gradient for s in before], optimizer._ebbtide.rule,
    )  # fmt: skip


def _repoint(optimizer: Any, states: list[SubgroupState], rule: UpdateRule) -> None:
    inner = optimizer.optimizer
    for master, own in zip(optimizer.fp32_partitioned_groups_flat, states, strict=True):
        master.data = own.p
        inner.state[master].update(zip(rule.moments, own.moments, strict=True))
    _repoint_gradients(optimizer, states)


def _repoint_gradients(optimizer: Any, states: list[SubgroupState]) -> None:
    """Parameters' gradient views follow their subgroup's home; the flat buffer goes if unused."""
    views = private.gradient_partitions(optimizer)
    flat = optimizer.grad_partitions_flat_buffer
    for index, group in enumerate(optimizer.fp16_groups):
        for param in group:
            _, offset, elements = optimizer.grad_position[optimizer.get_param_id(param)]
            views[param.ds_id] = states[index].gradient.narrow(0, offset, elements)
    if all(s.gradient.untyped_storage() is not flat.untyped_storage() for s in states):
        optimizer.grad_partitions_flat_buffer = flat.new_empty(0)


def as_allocated(plan: Plan, states: list[SubgroupState], slots: int) -> Plan:
    """The plan with the placements and slots that memory allowed."""
    return plan.placed(
        [s.placement for s in states], staging_slots=slots, prefetch=min(plan.prefetch, slots)
    )


def threads_of(plan: Plan, device: Device) -> int:
    """Threads of the host update: the plan's, else as many as there are cores for it."""
    if plan.threads:
        return plan.threads
    if device.cores:
        return len(device.cores)
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:
        cores = os.cpu_count() or 1
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or 1)
    share = max(1, cores // max(1, ranks))
    return max(1, min(share, torch.get_num_threads())) if device.unified else share
