"""Builds the executor of a plan around the flat partitions of DeepSpeed's ZeRO-1 and ZeRO-2."""

from __future__ import annotations

from typing import Any

import torch

from runtime.devices.base import Device
from runtime.execution.executor import Executor
from runtime.execution.gradients import GradientHomes, ParameterSlice
from runtime.execution.recorder import Recorder
from runtime.execution.step_template import step_template
from runtime.execution.subgroup_state import SubgroupState, allocate, staging_slots
from runtime.kernels.rule import UpdateRule
from runtime.zero.adopt_stage3 import Cut, as_allocated, cuts, threads_of
from runtime.zero.stage12 import EbbtideStage2, PartitionAttachment
from simulator.plan import Plan


def take_over(optimizer: Any, plan: Plan, device: Device, rule: UpdateRule) -> None:
    """Makes DeepSpeed's live optimizer an `EbbtideStage2` that runs ``plan``."""
    plan = plan.model_copy(update={"overlap_forward": False})
    partitions = [p.numel() for p in optimizer.single_partition_of_fp32_groups]
    pieces = cuts(partitions, plan.subgroup_size)
    optimizer._moments = _adopt_flat(optimizer, device, rule)
    gradients = [
        torch.zeros(elements, dtype=_gradient_dtype(optimizer, group))
        for group, _, elements in pieces
    ]
    plan, executor, shadows = _build(optimizer, plan, device, pieces, gradients, rule)
    slices = _slices(optimizer, pieces)
    every = [piece for of_parameter in slices.values() for piece in of_parameter]
    optimizer._ebbtide = PartitionAttachment(
        plan=plan,
        executor=executor,
        homes=GradientHomes(device, executor.states, dict(enumerate(every))),
        rule=rule,
        recorder=Recorder(),
        rebuild=rebuild,
        subgroup_of={},
        cuts=pieces,
        pieces=slices,
        shadows=shadows,
    )
    optimizer.__class__ = EbbtideStage2
    optimizer._link_all_hp_params()
    optimizer.resume_rule()


def rebuild(optimizer: Any, plan: Plan, before: list[SubgroupState]) -> tuple[Plan, Executor]:
    """An executor for another plan, around the state of one that has ended."""
    own = optimizer._ebbtide
    own.publish()
    plan = plan.model_copy(update={"overlap_forward": False})
    device, gradients = own.executor.device, [s.gradient for s in before]
    plan, executor, own.shadows = _build(optimizer, plan, device, own.cuts, gradients, own.rule)
    return plan, executor


def _adopt_flat(optimizer: Any, device: Device, rule: UpdateRule) -> list[tuple[torch.Tensor, ...]]:
    """Brings the flat state to memory the device copies from; returns the moments by group.

    DeepSpeed's fp32 gradients and its 16-bit copies of the parameters on the host (4 and 2 bytes
    per parameter) are given back.
    """
    moments = []
    for master in optimizer.single_partition_of_fp32_groups:
        master.grad = None
        master.data = device.host_adopt(master.data)
        state = optimizer.optimizer.state[master]
        state.setdefault("step", 0)
        for key in rule.unused:
            state.setdefault(key, torch.zeros_like(master.data))
        for key in rule.moments:
            state[key] = device.host_adopt(state.get(key, torch.zeros_like(master.data)))
        moments.append(tuple(state[key] for key in rule.moments))
    buffers = optimizer.param_buffer_of_bit16_for_cpu_offload_groups
    buffers[:] = [buffer.new_empty(0) for buffer in buffers]
    return moments


def _cut(flats: list[torch.Tensor], pieces: list[Cut]) -> list[torch.Tensor]:
    return [flats[group].narrow(0, offset, elements) for group, offset, elements in pieces]


def _build(
    optimizer: Any,
    plan: Plan,
    device: Device,
    pieces: list[Cut],
    gradients: list[torch.Tensor],
    rule: UpdateRule,
) -> tuple[Plan, Executor, dict[int, tuple[torch.Tensor, ...]]]:
    """The plan that memory allowed, its executor, and the host views of what is resident."""
    masters = _cut([p.data for p in optimizer.single_partition_of_fp32_groups], pieces)
    by_key = (_cut(list(flats), pieces) for flats in zip(*optimizer._moments, strict=True))
    moments = list(zip(*by_key, strict=True))
    sizes = tuple(elements for _, _, elements in pieces)
    placements = list(plan.placements)
    visiting = [n for n, p in zip(sizes, placements, strict=True) if p == "device"]
    slots = staging_slots(device, plan.staging_slots, visiting, 1 + len(rule.moments))
    if not slots:
        placements = ["host" if p == "device" else p for p in placements]
    ranks = [torch.distributed.get_rank(group=g) for g in optimizer.real_dp_process_group]
    partitions = optimizer.parallel_partitioned_bit16_groups
    wires = _cut([p[rank].data for p, rank in zip(partitions, ranks, strict=True)], pieces)
    states = allocate(device, placements, masters, moments, wires, gradients)
    plan = as_allocated(plan, states, len(slots))
    wire = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(optimizer.dtype, "fp32")
    template = step_template(sizes, wire, plan)
    executor = Executor(device, states, slots, template, threads_of(plan, device), rule)
    return plan, executor, _shadows(states, masters, moments)


def _gradient_dtype(optimizer: Any, group: int) -> torch.dtype:
    """fp32 where DeepSpeed accumulates in fp32, else the parameters' own."""
    compact = optimizer._use_compact_grad_partition_buffer(group)
    return torch.float32 if compact else optimizer.dtype


def _slices(optimizer: Any, pieces: list[Cut]) -> dict[int, list[ParameterSlice]]:
    """Parameter id -> its part of this rank's partition, cut at the subgroups' borders."""
    found: dict[int, list[ParameterSlice]] = {}
    for key, (group, _, begin, elements) in optimizer.grad_position.items():
        found[key] = [
            ParameterSlice(subgroup, max(begin, offset) - offset, overlap, real=True, summed=False)
            for subgroup, (of, offset, length) in enumerate(pieces)
            if of == group
            and (overlap := min(begin + elements, offset + length) - max(begin, offset)) > 0
        ]
    return found


def _shadows(
    states: list[SubgroupState],
    masters: list[torch.Tensor],
    moments: list[tuple[torch.Tensor, ...]],
) -> dict[int, tuple[torch.Tensor, ...]]:
    return {
        state.index: (masters[state.index], *moments[state.index])
        for state in states
        if state.p.data_ptr() != masters[state.index].data_ptr()
    }
