"""Builds the executor of a plan around DeepSpeed's buffers."""

from __future__ import annotations

import os
from typing import Any

import torch

from runtime import deepspeed_private as private
from runtime.device import Device
from runtime.executor import Executor
from runtime.step_template import step_template
from runtime.subgroup_state import SubgroupState, allocate, staging_slots
from simulator.plan import Plan


def build_executor(
    optimizer: Any,
    plan: Plan,
    device: Device,
    masters: list[torch.Tensor],
    moments: list[tuple[torch.Tensor, torch.Tensor]],
    gradients: list[torch.Tensor],
) -> tuple[Plan, Executor]:
    """Moves the state to where ``plan`` wants it; the plan returned is what memory allowed.

    DeepSpeed's own references (fp32 groups, Adam's state, gradient views) follow the buffers.
    """
    sizes = [int(n) for n in optimizer.fp16_partitioned_groups_flat_numel]
    placements = list(plan.placements)
    visiting = [n for n, p in zip(sizes, placements, strict=True) if p == "device"]
    slots = staging_slots(device, plan.staging_slots, visiting)
    if not slots:
        placements = ["host" if p == "device" else p for p in placements]
    wires = list(optimizer.fp16_partitioned_groups_flat)
    states = allocate(device, placements, masters, moments, wires, gradients)
    _repoint(optimizer, states)
    plan = _as_allocated(plan, states, len(slots))
    wire = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(optimizer.dtype, "fp32")
    template = step_template(tuple(sizes), wire, plan)
    return plan, Executor(device, states, slots, template, _threads(plan, device))


def _repoint(optimizer: Any, states: list[SubgroupState]) -> None:
    inner = optimizer.optimizer
    for master, own in zip(optimizer.fp32_partitioned_groups_flat, states, strict=True):
        master.data = own.p
        inner.state[master]["exp_avg"] = own.m
        inner.state[master]["exp_avg_sq"] = own.v
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


def _as_allocated(plan: Plan, states: list[SubgroupState], slots: int) -> Plan:
    """The plan with the placements and slots that memory allowed."""
    return plan.model_copy(
        update={
            "placement": Plan.runs([s.placement for s in states]),
            "staging_slots": slots,
            "prefetch": min(plan.prefetch, slots),
        }
    )


def _threads(plan: Plan, device: Device) -> int:
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
