"""The computation of the bytes that training under a plan needs in each memory. No other module computes them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, compress
from operator import add, mul
from typing import Self

from ebbtide.simulator.layer import Layer
from ebbtide.simulator.plan import Plan
from ebbtide.simulator.schedule import KINDS, Kind
from ebbtide.simulator.update.optimizer import FP32_BYTES, OptimizerState
from ebbtide.simulator.update.recipes import HOST_SLOTS, Placement, Recipe, Slot, slot_limit
from ebbtide.simulator.update.tiers import TIERS, Memory
from ebbtide.simulator.update.way import ParameterLocation, Way, plain_ways
from ebbtide.simulator.workload import BaseKind, Workload, adds_on_device

# Layers whose parameters are on the device at once, where nobody says: this one and the next.
PARAMETER_BUFFERS = 2
# Gradients that leave the device and are not on the host yet: the runtime lets no more be under way. At
# 25 GB/s as much as 10 ms of copies, behind which backward need not wait.
GRADIENTS_UNDER_WAY_BYTES = 2**28
EXTENT_SETS = 2  # of stored state: a step writes to other extents than the last one that is kept
STAGING_ALIGNMENT = 64  # elements: each tensor of a staging slot begins on a 256-byte border

Footprint = Mapping[Memory, int]  # bytes of one rank in each memory of `TIERS`
Amounts = Sequence[Sequence[float]]  # as `tally` gives them
ByKind = dict[str, dict[Kind, int]]  # the same, by memory and kind


def footprint(workload: Workload, plan: Plan) -> Footprint:
    """Return the bytes of GPU memory, host memory and storage that one rank uses in an iteration under a plan."""
    return totals(footprint_by_kind(workload, plan))


def totals(held: ByKind) -> Footprint:
    """Return the bytes in use in each memory, as a dict: the sum over all kinds (parameters, state ...)."""
    return {memory: sum(held[memory].values()) for memory in TIERS}


def footprint_by_kind(workload: Workload, plan: Plan) -> ByKind:
    """Return the bytes that one rank uses throughout an iteration under a plan, by memory and kind.

    They are for parameters, gradient buckets, optimizer state, gradients and buffers. Activations, which come and go,
    and memory reserved for checkpoints are not included. For parameters that are kept in host memory, GPU memory counts
    only the largest number of elements that it holds at one time.
    """
    held = Holding.of_workload(workload, kept_steps(plan.checkpoint.keep))
    locations = plan.parameter_locations
    amounts, updated_early = tallies(workload.subgroups, plan)
    gone = moved_out(workload, fetched_elements(workload, locations)) * workload.wire_bytes
    summed = summed_elements(workload.subgroups, plan)
    taken = held.by_kind(amounts, plan.staging_slots, plan.host_slots, updated_early, summed)
    taken["device"] = with_base(workload, taken["device"], gone)
    return taken


def with_base(workload: Workload, held: Mapping[Kind, int], gone_bytes: int = 0) -> dict[Kind, int]:
    """Return the bytes of GPU memory by kind: the bytes in ``held`` plus the workload's base memory.

    The base memory, such as for parameters and gradient buckets, is in use throughout an iteration.

    Args:
        held: Bytes of GPU memory by kind that a plan or strategy uses in addition to the base memory.
        gone_bytes: Bytes of parameters that are kept in host memory. They are subtracted from the base memory.
    """
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
    for part in parts:  # of a profile that saw less than its parameters, from the others too
        taken = min(parts[part], gone_bytes)
        parts[part] -= taken
        gone_bytes -= taken
    return parts


def fetched_elements(workload: Workload, locations: Sequence[Memory]) -> list[int]:
    """Return, for each layer, how many of the layer's parameter elements are kept in host memory.

    Args:
        locations: For each subgroup, the memory that holds its parameters.
    """
    if "host" not in locations:
        return [0] * len(workload.layers)
    return [sum(n for s, n in held if locations[s] == "host") for held in workload.shares()]


def moved_out(workload: Workload, fetched: Sequence[int]) -> int:
    """Return the number of parameter elements that GPU memory need not hold because parameters are kept in host
    memory.

    These are all elements in host memory, minus those that are copied to the GPU for the layers that run at the same
    time.

    Args:
        fetched: For each layer, the elements of its parameters that are kept in host memory, from `fetched_elements`.
    """
    live = PARAMETER_BUFFERS * max(fetched)
    if workload.live_params is not None:
        live = math.ceil(sum(fetched) * workload.live_params / max(1, workload.params))
    return max(0, sum(fetched) - live)


def fetched_for(layer: Layer, elements: int, micro_step: int, *, backward: bool) -> int:
    """Return the number of one layer's parameter elements that are copied from host memory to the GPU for a forward or
    backward.

    The number is 0 if ``elements`` is 0. Otherwise, it is proportional to the number of the layer's elements that
    ZeRO-3 gathers for this forward or backward:

    - The first forward of a step gathers all elements of the layer.
    - Each later forward of the step gathers all except `Layer.persistent_params` elements, which are still gathered.
    - A backward gathers `Layer.regathered_params` elements, or all if this field is None.

    Args:
        layer: Layer of the workload.
        elements: Number of the layer's parameter elements that are kept in host memory.
        micro_step: Index of the micro-batch in the step, from 0.
        backward: True for the copies before backward, False for the copies before forward.
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


@dataclass(frozen=True)
class Holding:
    """The bytes per parameter that each way of updating a subgroup needs in each memory, and the buffers that it uses.

    A way of updating is a combination of placement and parameter location. `plain_ways` lists all of them.

    Attributes:
        rows: Dict from a pair (memory, kind of data) to a tuple of bytes per parameter, one number for each of
            `plain_ways`. Parameters in GPU memory are not counted, because they are part of the workload's base memory.
        users: Dict from a kind of buffer to two tuples of positions in `plain_ways`. The first tuple has the ways that
            use the buffer for updates after the gradient norm is known. The second has the ways that use it for early
            updates, before the norm is known.
        gradient_bytes: Bytes per parameter of an accumulated gradient.
        sums: True if the gradients of micro-batches are accumulated in host memory. See `keeps_window`.
    """

    optimizer: OptimizerState
    wire_bytes: int
    rows: Mapping[tuple[Memory, Kind], tuple[int, ...]]
    users: Mapping[Slot, tuple[tuple[int, ...], tuple[int, ...]]]
    gradient_bytes: int
    sums: bool = False

    @classmethod
    def of(
        cls,
        optimizer: OptimizerState,
        gradient_bytes: int,
        wire_bytes: int,
        *,
        stage: int = 3,
        micro_batches: int = 1,
        kept: int = 1,
        state_stays: bool = False,
    ) -> Self:
        """Return the bytes per parameter that training with an optimizer needs in each memory, at a precision and ZeRO
        stage.

        Below ZeRO-3, DeepSpeed's flat partitions in host memory have space for all state, even if it is in GPU
        memory.

        Args:
            state_stays: True if there is such space under ZeRO-3 too (`Workload.state_stays`).
            micro_batches: Number of micro-batches per step.
            kept: Number of finished steps whose stored state is kept on the drives.
        """
        keeps = keeps_window(micro_batches, gradient_bytes, wire_bytes, stage)
        rows = []
        recipes = [way.recipe for way in plain_ways()]
        for recipe, way in zip(recipes, plain_ways(), strict=True):
            row: Counter[tuple[Memory, Kind]] = Counter()
            sets = EXTENT_SETS - 1 + kept if recipe.state == "storage" else 1
            row[recipe.state, "state"] += sets * optimizer.state_bytes
            row[recipe.gradient, "gradients"] += gradient_bytes
            if (stage < 3 or state_stays) and recipe.state == "device":
                row["host", "state"] += optimizer.state_bytes
            if way.parameters == "host":
                row["host", "parameters"] += wire_bytes
            if keeps:  # whatever the placement
                row["host", "gradients"] += gradient_bytes
            rows.append(row)
        return cls(
            optimizer,
            wire_bytes,
            {key: tuple(row[key] for row in rows) for key in sorted(set().union(*rows))},
            {s: (_users(s, recipes), _users(s, [r.updated_early for r in recipes])) for s in Slot},
            gradient_bytes,
            keeps,
        )

    @classmethod
    def of_workload(cls, w: Workload, kept: int = 1) -> Self:
        return cls.of(
            w.optimizer_state,
            w.grad_bytes_per_param,
            w.wire_bytes,
            stage=w.zero_stage,
            micro_batches=w.gradient_accumulation_steps,
            kept=kept,
            state_stays=w.state_stays,
        )

    @cached_property
    def per_param(self) -> Mapping[Memory, tuple[int, ...]]:
        """Return the bytes per parameter in each memory, for all kinds of data in ``rows`` together.

        The result is a dict by memory. Each value is a tuple with one number for each of `plain_ways`, the combinations
        of placement and parameter location.
        """
        return {
            memory: tuple(map(sum, zip(*(row for (m, _), row in self.rows.items() if m == memory), strict=True)))
            for memory in TIERS
        }

    def bytes(
        self,
        amounts: Amounts,
        staging_slots: int,
        host_slots: int = HOST_SLOTS,
        updated_early: Amounts | None = None,
        summed: float = 0,
    ) -> Footprint:
        """Return the bytes that subgroups and buffers need, as a dict by memory (GPU, host, storage).

        Memory that training uses under any plan, such as for gradient buckets, is not included. `by_kind` explains the
        arguments, and returns the same bytes by kind of contents.
        """
        return totals(self.by_kind(amounts, staging_slots, host_slots, updated_early, summed))

    def by_kind(
        self,
        amounts: Amounts,
        staging_slots: int,
        host_slots: int = HOST_SLOTS,
        updated_early: Amounts | None = None,
        summed: float = 0,
    ) -> ByKind:
        """Return the bytes that subgroups and buffers need, by memory and by kind of contents.

        Memory that training uses under any plan, such as for gradient buckets, is not included.

        Args:
            amounts: Three lists from `tally`: the numbers of subgroups, their total elements, and the elements of the
                largest one. A list has one number for each combination of placement and parameter location.
            staging_slots: Number of staging buffers (GPU memory for the state of one subgroup).
            host_slots: Number of buffers in host memory for state that is stored on drives.
            updated_early: Three such lists for subgroups with early updates (before the gradient norm is known).
                ``amounts`` does not include these subgroups. None: no update is early.
            summed: Number of elements with gradients that are accumulated in GPU memory. For these elements, host
                memory holds no gradient sum of the present step. It still holds the gradients of the previous step,
                because DeepSpeed may apply them again (see `keeps_window`).

        Returns:
            For each memory (GPU, host, storage), a dict from the kind of contents (state, gradients ...) to bytes.
        """
        both = amounts, updated_early or [[0] * len(amounts[0])] * 3
        early = both[1][1]
        elements = list(map(add, amounts[1], early))
        taken: ByKind = {memory: dict.fromkeys(KINDS, 0) for memory in TIERS}
        for (memory, kind), row in self.rows.items():
            taken[memory][kind] = int(sum(map(mul, elements, row)))
        sent = sum(compress(elements, self._sending))
        stay = int(summed) if self.sums else 0
        taken["device"]["gradients"] += int(self.sending_bytes(sent, stay))
        taken["host"]["gradients"] -= stay * self.gradient_bytes
        taken["host"]["staging"] += int(sum(early)) * self.early_bytes
        for slot, limit in self.slots(both, staging_slots, host_slots).items():
            if limit:
                taken[slot.memory]["staging"] += limit * self.each_bytes(slot, both)
        return taken

    def each_bytes(self, slot: Slot, both: Sequence[Amounts]) -> int:
        """Return the bytes of one buffer of the given kind, which is as large as the largest subgroup that uses it."""
        waiting, early_updates = ([int(n) for n in each] for each in self._of(slot, both, 2))
        return self.slot_bytes(slot, max(*waiting, *early_updates, 0), early_updates=any(early_updates))

    def slots(self, both: Sequence[Amounts], staging_slots: int, host_slots: int = HOST_SLOTS) -> dict[Slot, int]:
        """Return the number of buffers of each kind under a plan, as a dict.

        Args:
            both: Two results of `tally`, which counts subgroups and their elements for each combination of placement
                and parameter location. The first result is for subgroups that are updated after the gradient norm is
                known, the second result for subgroups with early updates.
            staging_slots: Number of staging buffers of the plan (GPU memory for the state of one subgroup).
            host_slots: Number of buffers in host memory for state that is stored on drives.
        """
        waiting, early = both[0][0], both[1][0]
        return {
            slot: slot_limit(
                slot, staging_slots, int(sum([waiting[i] for i in some]) + sum([early[i] for i in others])), host_slots
            )
            for slot, (some, others) in self.users.items()
        }

    def _of(self, slot: Slot, both: Sequence[Amounts], row: int) -> tuple[list[float], ...]:
        return tuple(
            [amounts[row][user] for user in users] for amounts, users in zip(both, self.users[slot], strict=True)
        )

    def sending_bytes(self, sent: float, summed: float) -> float:
        """Return the bytes of GPU memory for gradients that are later copied to the host.

        This memory holds the gradients that are being copied, and the sums that are accumulated on the GPU.

        Args:
            sent: Number of elements of all subgroups whose gradients are copied to the host.
            summed: Number of these elements whose gradients are accumulated on the GPU.
        """
        under_way = min(GRADIENTS_UNDER_WAY_BYTES, (sent - summed) * self.gradient_bytes)
        return under_way + summed * self.gradient_bytes

    def most_sums(self, sizes: Sequence[int], left_bytes: float) -> int:
        """Return how many subgroups can accumulate the gradients of all micro-batches in the free GPU memory.

        Args:
            sizes: Elements of each subgroup with gradients that are otherwise copied to the host. The subgroups get
                GPU memory in this order.
            left_bytes: GPU memory that is free if no gradient is accumulated there.
        """
        if not self.sums:
            return 0
        sent = sum(sizes)
        most = left_bytes + self.sending_bytes(sent, 0)
        return sum(self.sending_bytes(sent, stay) <= most for stay in accumulate(sizes))

    @property
    def early_bytes(self) -> int:
        """Return the bytes of host memory per parameter that an early update needs for new state and new parameters.

        An early update starts before the gradient norm is known, so it keeps the old state.
        """
        return self.optimizer.state_bytes + self.wire_bytes

    @cached_property
    def _sending(self) -> list[bool]:
        return [way.recipe.gradient != "device" for way in plain_ways()]

    def slot_bytes(self, slot: Slot, elements: int, *, early_updates: bool = False) -> int:
        """Return the bytes of one buffer of the given kind that can hold any subgroup of at most ``elements`` elements.

        Args:
            early_updates: True if the buffer is also used by updates before the gradient norm is known. In GPU
                memory it then holds their new parameters too.
        """
        if slot.holds_state:
            each = self.optimizer.tensor_count * FP32_BYTES
            each += self.wire_bytes * (early_updates and slot.memory == "device")
            return slot_elements(elements) * each
        return elements * self.wire_bytes


def _users(slot: Slot, recipes: Sequence[Recipe | None]) -> tuple[int, ...]:
    return tuple(i for i, r in enumerate(recipes) if r is not None and slot in r.slots)


def tallies(sizes: Sequence[int], plan: Plan) -> tuple[Amounts, Amounts]:
    """Return the number and the sizes of a plan's subgroups for each placement and parameter location.

    Returns:
        Two results of `tally`. The first is for the subgroups with updates that wait for the gradient norm, the second
        for those with early updates.
    """
    every = [(size, way.placement, way.parameters, way.early) for size, way in zip(sizes, plan.ways, strict=True)]
    first, second = (
        tally(*map(list, zip(*some, strict=True))) if some else tally((), ())
        for some in ([e[:3] for e in every if e[3] is early] for early in (False, True))
    )
    return first, second


def slots_within(left_bytes: float, wanted: int, each_bytes: int) -> int:
    """Return the number of staging buffers that fit into ``left_bytes`` of GPU memory: from 1 to ``wanted``.

    A staging buffer holds the state of one subgroup during its update on the GPU.
    """
    if wanted * each_bytes <= left_bytes:
        return wanted
    return max(1, int(left_bytes // each_bytes))


def summed_elements(sizes: Sequence[int], plan: Plan) -> int:
    """Return the total number of elements of the subgroups that accumulate gradients on the GPU under a plan.

    The gradients are accumulated over the micro-batches of a step.

    Args:
        sizes: Number of elements of each subgroup.
    """
    return sum(n for n, way in zip(sizes, plan.ways, strict=True) if way.sum_on_device)


def tally(
    sizes: Iterable[int], placements: Sequence[Placement], locations: Sequence[ParameterLocation] = ()
) -> tuple[list[int], list[int], list[int]]:
    """Count subgroups, and their elements, for each combination of placement and parameter location.

    Args:
        sizes, placements: Number of elements, and placement, of each subgroup.
        locations: Memory that holds each subgroup's parameters. Empty: GPU memory for all.

    Returns:
        Three lists: the numbers of subgroups with each combination, their total elements, and the elements of the
        largest one. A list has one number for each combination, in the order of `plain_ways`.
    """
    held: dict[Way, list[int]] = {way: [] for way in plain_ways()}
    everywhere: tuple[ParameterLocation, ...] = ("device",)
    locations = locations or everywhere * len(placements)
    for size, placement, location in zip(sizes, placements, locations, strict=True):
        held[Way(placement, location)].append(size)
    by = held.values()
    return [len(n) for n in by], [sum(n) for n in by], [max(n, default=0) for n in by]


def kept_steps(keep: int) -> int:
    """Return for how many finished steps the drives keep optimizer state, if a plan keeps ``keep`` checkpoints.

    The number is at least 1: even if ``keep`` is 0, the state of the latest checkpoint stays on the drives.
    """
    return max(1, keep)


def keeps_window(micro_batches: int, gradient_bytes: int, wire_bytes: int, stage: int) -> bool:
    """Return True if host memory holds two sets of gradients at once: those of the previous step and those of this
    step.

    That is so if the gradients of micro-batches are accumulated in host memory. The previous step's gradients are kept
    because DeepSpeed applies a parameter's old gradient again if the last micro-batch of a step does not use the
    parameter.
    """
    return micro_batches > 1 and not adds_on_device(stage, gradient_bytes, wire_bytes)


def slot_elements(largest: int) -> int:
    """Return the number of elements of each tensor in a staging buffer for subgroups of at most ``largest`` elements.

    The number is rounded up for alignment.
    """
    return -(-largest // STAGING_ALIGNMENT) * STAGING_ALIGNMENT
