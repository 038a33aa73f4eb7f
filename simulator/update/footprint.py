"""The bytes that a plan takes of each memory. No other code computes them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, compress
from operator import add, mul
from typing import Self

from ebbtide.simulator.plan import Plan
from ebbtide.simulator.schedule import KINDS, Kind
from ebbtide.simulator.update.optimizer import FP32_BYTES, OptimizerState
from ebbtide.simulator.update.recipes import HOST_SLOTS, Placement, Recipe, Slot, slot_limit
from ebbtide.simulator.update.tiers import TIERS, Memory
from ebbtide.simulator.update.way import ParameterLocation, Way, plain_ways
from ebbtide.simulator.workload import BaseKind, Layer, Workload, adds_on_device

# Layers whose parameters are on the device at once, where nobody says: this one and the next.
PARAMETER_BUFFERS = 2
# Gradients that leave the device and are not at home yet: the runtime lets no more be under way. At
# 25 GB/s as much as 10 ms of copies, behind which backward need not wait.
GRADIENTS_UNDER_WAY_BYTES = 2**28
EXTENT_SETS = 2  # of stored state: a step writes to other extents than the last one that is kept
STAGING_ALIGNMENT = 64  # elements: each tensor of a staging slot begins on a 256-byte border

Footprint = Mapping[Memory, int]  # bytes of one rank in each memory of `TIERS`
Amounts = Sequence[Sequence[float]]  # as `tally` gives them
ByKind = dict[str, dict[Kind, int]]  # the same, by memory and kind


def footprint(workload: Workload, plan: Plan) -> Footprint:
    """Bytes of one rank that a plan holds all through an iteration, see `footprint_by_kind`."""
    return totals(footprint_by_kind(workload, plan))


def totals(held: ByKind) -> Footprint:
    """Return the sum of all kinds."""
    return {memory: sum(held[memory].values()) for memory in TIERS}


def footprint_by_kind(workload: Workload, plan: Plan) -> ByKind:
    """Bytes of one rank that a plan holds all through an iteration, by what they are for.

    The workload's base (parameters, buckets), state, gradients, parameters where they live, and the
    slots. Activations, which come and go, and what a checkpoint reserves are not in it. Of the
    parameters that live on the host, as many are on the device as are gathered at once.
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
    """Return the device's bytes including a workload's base."""
    base = base_by_kind(workload, gone_bytes)
    return {kind: held.get(kind, 0) + base.get(kind, 0) for kind in KINDS}


def base_by_kind(workload: Workload, gone_bytes: int = 0) -> dict[Kind, int]:
    """Return the device bytes that a workload holds throughout an iteration, without ``gone_bytes`` of
    its parameters, which live elsewhere.
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
    """Elements of each layer's parameters that live on the host."""
    if "host" not in locations:
        return [0] * len(workload.layers)
    return [sum(n for s, n in held if locations[s] == "host") for held in workload.shares()]


def moved_out(workload: Workload, fetched: Sequence[int]) -> int:
    """Elements that the device does not hold, of what `fetched_elements` gives."""
    live = PARAMETER_BUFFERS * max(fetched)
    if workload.live_params is not None:
        live = math.ceil(sum(fetched) * workload.live_params / max(1, workload.params))
    return max(0, sum(fetched) - live)


def fetched_for(layer: Layer, elements: int, micro_step: int, *, backward: bool) -> int:
    """Return how many of the layer's ``elements`` on the host come in for a pass."""
    gathered = layer.params
    if backward:
        gathered = layer.params if layer.regathered_params is None else layer.regathered_params
    elif micro_step:
        gathered -= layer.persistent_params
    return elements * gathered // layer.params if elements else 0


def fetches_of_a_step(workload: Workload) -> list[float]:
    """Return how often an element of each layer comes in, if it lives on the host."""
    micro_batches = range(workload.gradient_accumulation_steps)
    return [
        sum(fetched_for(layer, layer.params, m, backward=backward) for m in micro_batches for backward in (False, True))
        / max(1, layer.params)
        for layer in workload.layers
    ]


@dataclass(frozen=True)
class Holding:
    """The bytes per element in each memory, by the way in which it is updated, and the slots.

    Attributes:
        rows: by memory and kind, bytes of a parameter of each of `ways`. The device's share of
            the parameters is in the workload's base.
        users: the ways that use each kind of slot, as positions in `ways`: of subgroups that wait
            for the norm, and of those updated early.
        gradient_bytes: bytes of a parameter's gradient as micro-batches are added up.
        sums: micro-batches are added up at home: see `keeps_window`.
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
        """Return the bytes per parameter for this optimizer, precision and ZeRO stage.

        Below ZeRO-3 DeepSpeed's flat partitions keep room for resident state too.

        Args:
            state_stays: they do so under ZeRO-3 (`Workload.state_stays`).
            micro_batches: per step.
            kept: finished steps with retained stored state.
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
        """Return, by memory, the bytes of a parameter of each of `ways`, with its state and gradient."""
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
        """Return the sum of all kinds of `by_kind`."""
        return totals(self.by_kind(amounts, staging_slots, host_slots, updated_early, summed))

    def by_kind(
        self,
        amounts: Amounts,
        staging_slots: int,
        host_slots: int = HOST_SLOTS,
        updated_early: Amounts | None = None,
        summed: float = 0,
    ) -> ByKind:
        """Return the bytes by memory and kind, without the workload's base.

        Args:
            amounts: as `tally` gives them.
            guessed: of the subgroups updated early, out of place; ``amounts`` are then of the others.
            summed: elements with sums of micro-batches on the device. They leave from there,
                and the gradients of the window before stay at home meanwhile.
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
        """Return the bytes of one slot of a kind. It holds the largest of its users; ``both`` as in `slots`."""
        waiting, early_updates = ([int(n) for n in each] for each in self._of(slot, both, 2))
        return self.slot_bytes(slot, max(*waiting, *early_updates, 0), early_updates=any(early_updates))

    def slots(self, both: Sequence[Amounts], staging_slots: int, host_slots: int = HOST_SLOTS) -> dict[Slot, int]:
        """`slot_limits` of subgroups that wait for the norm, and of those that are guessed."""
        waiting, early = both[0][0], both[1][0]
        return {
            slot: slot_limit(
                slot, staging_slots, int(sum([waiting[i] for i in some]) + sum([early[i] for i in others])), host_slots
            )
            for slot, (some, others) in self.users.items()
        }

    def _of(self, slot: Slot, both: Sequence[Amounts], row: int) -> tuple[list[float], ...]:
        """Return a row of both amounts, of those that use a slot."""
        return tuple(
            [amounts[row][user] for user in users] for amounts, users in zip(both, self.users[slot], strict=True)
        )

    def sending_bytes(self, sent: float, summed: float) -> float:
        """Return the device bytes for ``sent`` elements with gradients on their way to host memory.

        These are the gradients in flight, and the sums of ``summed`` of them.
        """
        under_way = min(GRADIENTS_UNDER_WAY_BYTES, (sent - summed) * self.gradient_bytes)
        return under_way + summed * self.gradient_bytes

    def most_sums(self, sizes: Sequence[int], left_bytes: float) -> int:
        """Return how many of these subgroups' sums, the first ones', the device has memory for.

        Args:
            sizes: elements of subgroups with gradients that go to host memory.
            left_bytes: device memory left if no sum stays.
        """
        if not self.sums:
            return 0
        sent = sum(sizes)
        most = left_bytes + self.sending_bytes(sent, 0)
        return sum(self.sending_bytes(sent, stay) <= most for stay in accumulate(sizes))

    @property
    def early_bytes(self) -> int:
        """Bytes of host memory for each element of an early update: new state and new parameters."""
        return self.optimizer.state_bytes + self.wire_bytes

    @cached_property
    def _sending(self) -> list[bool]:
        """Return whether gradients leave the device in each of `ways`."""
        return [way.recipe.gradient != "device" for way in plain_ways()]

    def slot_bytes(self, slot: Slot, elements: int, *, early_updates: bool = False) -> int:
        """Return the bytes of a slot that holds any subgroup of up to so many elements.

        Args:
            guesses: also early ones, with new parameters that leave a device slot with the state.
        """
        if slot.holds_state:
            each = self.optimizer.tensor_count * FP32_BYTES
            each += self.wire_bytes * (early_updates and slot.memory == "device")
            return slot_elements(elements) * each
        return elements * self.wire_bytes


def _users(slot: Slot, recipes: Sequence[Recipe | None]) -> tuple[int, ...]:
    return tuple(i for i, r in enumerate(recipes) if r is not None and slot in r.slots)


def tallies(sizes: Sequence[int], plan: Plan) -> tuple[Amounts, Amounts]:
    """`tally` of the subgroups that wait for the norm, and of those that are guessed."""
    every = [(size, way.placement, way.parameters, way.early) for size, way in zip(sizes, plan.ways, strict=True)]
    first, second = (
        tally(*map(list, zip(*some, strict=True))) if some else tally((), ())
        for some in ([e[:3] for e in every if e[3] is early] for early in (False, True))
    )
    return first, second


def slots_within(left_bytes: float, wanted: int, each_bytes: int) -> int:
    """Return how many of the wanted slots so much memory holds, but one at the least."""
    if wanted * each_bytes <= left_bytes:
        return wanted
    return max(1, int(left_bytes // each_bytes))


def summed_elements(sizes: Sequence[int], plan: Plan) -> int:
    """Return the elements of subgroups with sums of micro-batches on the device."""
    return sum(n for n, way in zip(sizes, plan.ways, strict=True) if way.sum_on_device)


def tally(
    sizes: Iterable[int], placements: Sequence[Placement], locations: Sequence[ParameterLocation] = ()
) -> tuple[list[int], list[int], list[int]]:
    """Return, for each of `ways`: number of subgroups, their elements, elements of the largest.

    Args:
        homes: locations of the parameters. Empty: all on the device.
    """
    held: dict[Way, list[int]] = {way: [] for way in plain_ways()}
    everywhere: tuple[ParameterLocation, ...] = ("device",)
    locations = locations or everywhere * len(placements)
    for size, placement, location in zip(sizes, placements, locations, strict=True):
        held[Way(placement, location)].append(size)
    by = held.values()
    return [len(n) for n in by], [sum(n) for n in by], [max(n, default=0) for n in by]


def kept_steps(keep: int) -> int:
    """Return the number of steps with retained stored state for so many retained checkpoints.

    It is at least one: a step never overwrites a committed one.
    """
    return max(1, keep)


def keeps_window(micro_batches: int, gradient_bytes: int, wire_bytes: int, stage: int) -> bool:
    """Micro-batches are added up at home, and the gradients of the window before are kept while the
    next ones arrive.

    DeepSpeed applies them again to a parameter that the window's last micro-batch does not reach.
    """
    return micro_batches > 1 and not adds_on_device(stage, gradient_bytes, wire_bytes)


def slot_elements(largest: int) -> int:
    """Return the elements of each tensor of a staging slot for subgroups of up to so many elements."""
    return -(-largest // STAGING_ALIGNMENT) * STAGING_ALIGNMENT
