"""The bytes that training under a plan needs in each memory. Only this module and `holding` compute them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from ebbtide.simulator.plan import Plan
from ebbtide.simulator.schedule import KINDS, Kind, Memory
from ebbtide.simulator.update.holding import ByKind, Footprint, Holding, kept_steps, totals
from ebbtide.simulator.update.way import Way, plain_ways
from ebbtide.simulator.workload import BaseKind, Layer, Workload

# Default number of layers with parameters on the GPU at the same time: the present one and the next one.
PARAMETER_BUFFERS = 2


def footprint(workload: Workload, plan: Plan) -> Footprint:
    """Return the bytes of GPU memory, host memory and storage that one rank uses in an iteration under a plan."""
    return totals(footprint_by_kind(workload, plan))


def footprint_by_kind(workload: Workload, plan: Plan) -> ByKind:
    """Return the bytes that one rank uses throughout an iteration under a plan, by memory and kind.

    They are for parameters, gradient buckets, optimizer state, gradients and buffers, also those of automatic
    checkpoints. Activations, which come and go, are not included. For parameters that are kept in host memory, GPU
    memory counts only the largest number of elements that it holds at one time.
    """
    held = Holding.of_workload(workload, kept_steps(plan.checkpoint.keep))
    locations = plan.parameter_locations
    gone = moved_out(workload, fetched_elements(workload, locations)) * workload.wire_bytes
    taken = held_under(plan, held, workload.subgroups)
    taken["device"] = with_base(workload, taken["device"], gone)
    taken["host"]["staging"] += plan.checkpoint.automatic_bytes
    return taken


def held_under(plan: Plan, held: Holding, sizes: Sequence[int]) -> ByKind:
    """Return the bytes of subgroups and buffers under a plan, by memory and by kind of contents."""
    subgroups = list(zip(sizes, plan.ways, strict=True))
    waiting, early = (tally(one for one in subgroups if one[1].early is flag) for flag in (False, True))
    summed = sum(size for size, way in subgroups if way.sum_on_device)
    return held.by_kind(waiting, plan.staging_slots, plan.host_slots, early, summed)


def with_base(workload: Workload, held: Mapping[Kind, int], gone_bytes: int = 0) -> dict[Kind, int]:
    """Return the bytes of GPU memory by kind: the bytes in ``held`` plus the workload's base memory."""
    base = base_by_kind(workload, gone_bytes)
    return {kind: held.get(kind, 0) + base.get(kind, 0) for kind in KINDS}


def base_by_kind(workload: Workload, gone_bytes: int = 0) -> dict[Kind, int]:
    """Return the bytes of GPU memory that a workload uses throughout an iteration, by kind.

    Parameters that are in host memory, ``gone_bytes`` in all, are not counted.
    """
    left = workload.device_base_bytes
    parts: dict[Kind, int] = {"parameters": 0}
    known: Mapping[BaseKind, int] = workload.device_base_parts
    known = known or {"parameters": workload.params * workload.wire_bytes}
    for kind, size in known.items():
        parts[kind] = min(size, left)
        left -= parts[kind]
    parts["buckets"] = left
    for part in parts:  # if a profile saw less memory than the parameters take, the rest is subtracted from other parts
        taken = min(parts[part], gone_bytes)
        parts[part] -= taken
        gone_bytes -= taken
    return parts


def fetched_elements(workload: Workload, locations: Sequence[Memory]) -> list[int]:
    """Return, for each layer, how many of the layer's parameter elements are kept in host memory."""
    if "host" not in locations:
        return [0] * len(workload.layers)
    return [sum(n for s, n in held if locations[s] == "host") for held in workload.shares()]


def moved_out(workload: Workload, fetched: Sequence[int]) -> int:
    """Return the parameter elements in host memory, minus those on the GPU for layers that run at the same time."""
    live = PARAMETER_BUFFERS * max(fetched)
    if workload.live_params is not None:
        live = math.ceil(sum(fetched) * workload.live_params / max(1, workload.params))
    return max(0, sum(fetched) - live)


def fetched_for(layer: Layer, elements: int, micro_step: int, *, backward: bool) -> int:
    """Return the elements of one layer's parameters that are copied from host memory to the GPU for a pass.

    They are in proportion to the elements that ZeRO-3 gathers: the first forward of a step gathers all, and later ones
    all except `Layer.persistent_params`, which are still gathered. A backward gathers `Layer.regathered_params`.
    """
    gathered = layer.params
    if backward:
        gathered = layer.params if layer.regathered_params is None else layer.regathered_params
    elif micro_step:
        gathered -= layer.persistent_params
    return elements * gathered // layer.params if elements else 0


def fetches_of_a_step(workload: Workload) -> list[float]:
    """Return, for each layer, how often per step a parameter that is kept in host memory is copied to the GPU."""
    micro_batches = range(workload.gradient_accumulation_steps)
    return [
        sum(fetched_for(layer, layer.params, m, backward=backward) for m in micro_batches for backward in (False, True))
        / max(1, layer.params)
        for layer in workload.layers
    ]


def slots_within(left_bytes: float, wanted: int, each_bytes: int) -> int:
    """Return the number of staging buffers that fit into ``left_bytes`` of GPU memory: from 1 to ``wanted``."""
    if wanted * each_bytes <= left_bytes:
        return wanted
    return max(1, int(left_bytes // each_bytes))


def tally(subgroups: Iterable[tuple[int, Way]]) -> tuple[list[int], list[int], list[int]]:
    """Return the number of subgroups, their elements, and the elements of the largest one.

    Each list has a number for each combination of placement and parameter location, in the order of `plain_ways`.
    """
    held: dict[Way, list[int]] = {way: [] for way in plain_ways()}
    for size, way in subgroups:
        held[way.plain].append(size)
    by = held.values()
    return [len(n) for n in by], [sum(n) for n in by], [max(n, default=0) for n in by]
