"""A plan as it can be executed: with the buffers that were allocated, and the number of CPU threads."""

from __future__ import annotations

import torch
from ebbtide.runtime.devices.base import Device
from ebbtide.runtime.execution.subgroup_state import SubgroupState
from ebbtide.runtime.hardware.launcher import local_ranks
from ebbtide.runtime.hardware.usable import usable
from ebbtide.simulator.plan import Plan


def as_allocated(plan: Plan, states: list[SubgroupState], slots: int) -> Plan:
    """Return a plan as it was realized: with the placements and parameter locations that the subgroups have got, and
    with ``slots`` staging buffers.

    Args:
        slots: Number of staging buffers that were allocated. It is less than planned if GPU memory was short.
    """
    pairs = zip(plan.ways, states, strict=True)
    ways = [way._replace(placement=s.placement, parameters=s.parameter_location).fitted() for way, s in pairs]
    return plan.with_ways(ways, staging_slots=slots, prefetch=min(plan.prefetch, slots))


def threads_of(plan: Plan, device: Device) -> int:
    """Return the number of threads of the optimizer update on the CPU: the plan's, or the number of
    available cores.
    """
    if plan.threads:
        return plan.threads
    if device.cores:
        return len(device.cores)
    share = max(1, usable().cores // local_ranks())
    return max(1, min(share, torch.get_num_threads())) if device.unified else share
