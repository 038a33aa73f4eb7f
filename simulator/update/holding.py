"""The bytes that a rank's training state, buffers and gradients take in each memory.

The bytes are computed from the number of subgroups with each placement, and from the sizes of these subgroups.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, compress
from operator import add, mul
from typing import Self

from ebbtide.simulator.optimizer import FP32_BYTES, OptimizerState
from ebbtide.simulator.schedule import KINDS, Kind, Memory
from ebbtide.simulator.update.recipes import Recipe, slot_limit
from ebbtide.simulator.update.steps import HOST_SLOTS, Slot
from ebbtide.simulator.update.tiers import TIERS
from ebbtide.simulator.update.way import plain_ways
from ebbtide.simulator.workload import Workload, adds_on_device

# Limit for gradients that are being copied from the GPU to the host, which the runtime enforces. At 25 GB/s this is 10
# ms of copies, which backward need not wait for.
GRADIENTS_UNDER_WAY_BYTES = 2**28
EXTENT_SETS = 2  # copies of stored state: a step writes to other extents than those that hold the last step
STAGING_ALIGNMENT = 64  # elements: each tensor of a staging buffer begins at a multiple of 256 bytes
Footprint = Mapping[Memory, int]  # bytes of one rank in each memory (key of `TIERS`)
Amounts = Sequence[Sequence[float]]  # as `tally` returns them
ByKind = dict[str, dict[Kind, int]]  # bytes by memory and use


def totals(held: ByKind) -> Footprint:
    """Return the bytes in use in each memory, as a dict: the sum over all kinds (parameters, state ...)."""
    return {memory: sum(held[memory].values()) for memory in TIERS}


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

        Below ZeRO-3, DeepSpeed's flat partitions in host memory have space for all state, even if it is in GPU memory.

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
            if keeps:  # with any placement
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
        """Return the bytes per parameter in each memory, added up over the kinds of data in ``rows``.

        Returns:
            A dict by memory. Each value is a tuple with one number for each of `plain_ways`, the combinations of
            placement and parameter location.
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
        elements, beside = self._beside(amounts, staging_slots, host_slots, updated_early, summed)
        taken = {memory: int(sum(map(mul, elements, row))) for memory, row in self.per_param.items()}
        for memory, _, size in beside:
            taken[memory] += size
        return taken

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
            host_slots: Number of buffers in host memory for state that is stored on drives.
            updated_early: Three such lists for subgroups with early updates. ``amounts`` does not include these
                subgroups. None: no update is early.
            summed: Number of elements with gradients that are accumulated in GPU memory. For these elements, host
                memory holds no gradient sum of the present step. It still holds the gradients of the previous step,
                because DeepSpeed may apply them again (see `keeps_window`).

        Returns:
            For each memory (GPU, host, storage), a dict from the kind of contents (state, gradients ...) to bytes.
        """
        elements, beside = self._beside(amounts, staging_slots, host_slots, updated_early, summed)
        taken: ByKind = {memory: dict.fromkeys(KINDS, 0) for memory in TIERS}
        for (memory, kind), row in self.rows.items():
            taken[memory][kind] = int(sum(map(mul, elements, row)))
        for memory, kind, size in beside:
            taken[memory][kind] += size
        return taken

    def _beside(
        self, amounts: Amounts, staging_slots: int, host_slots: int, updated_early: Amounts | None, summed: float
    ) -> tuple[list[float], list[tuple[Memory, Kind, int]]]:
        both = amounts, updated_early or [[0] * len(amounts[0])] * 3
        early = both[1][1]
        elements = list(map(add, amounts[1], early))
        sent = sum(compress(elements, self._sending))
        stay = int(summed) if self.sums else 0
        beside: list[tuple[Memory, Kind, int]] = [
            ("device", "gradients", int(self.sending_bytes(sent, stay))),
            ("host", "gradients", -stay * self.gradient_bytes),
            ("host", "staging", int(sum(early)) * self.early_bytes),
        ]
        for slot, limit in self.slots(both, staging_slots, host_slots).items():
            if limit:
                beside.append((slot.memory, "staging", limit * self.each_bytes(slot, both)))
        return elements, beside

    def each_bytes(self, slot: Slot, both: Sequence[Amounts]) -> int:
        """Return the bytes of one buffer of the given kind, which is as large as the largest subgroup that uses it."""
        (waiting, early), (_, _, waiting_largest), (_, _, early_largest) = self.users[slot], *both
        largest = max([int(waiting_largest[i]) for i in waiting], default=0)
        early_updates = max([int(early_largest[i]) for i in early], default=0)
        return self.slot_bytes(slot, max(largest, early_updates), early_updates=early_updates > 0)

    def slots(self, both: Sequence[Amounts], staging_slots: int, host_slots: int = HOST_SLOTS) -> dict[Slot, int]:
        """Return the number of buffers of each kind under a plan, as a dict.

        Args:
            both: Two results of `tally`, which counts subgroups and their elements for each combination of placement
                and parameter location. The first result is for subgroups that are updated after the gradient norm is
                known, the second result for subgroups with early updates.
            staging_slots: Number of staging buffers of the plan.
            host_slots: Number of buffers in host memory for state that is stored on drives.
        """
        waiting, early = both[0][0], both[1][0]
        return {
            slot: slot_limit(
                slot, staging_slots, int(sum([waiting[i] for i in some]) + sum([early[i] for i in others])), host_slots
            )
            for slot, (some, others) in self.users.items()
        }

    def sending_bytes(self, sent: float, summed: float) -> float:
        """Return the bytes of GPU memory for gradients that are later copied to the host."""
        under_way = min(GRADIENTS_UNDER_WAY_BYTES, (sent - summed) * self.gradient_bytes)
        return under_way + summed * self.gradient_bytes

    def most_sums(self, sizes: Sequence[float], left_bytes: float, sent: float) -> int:
        """Return how many subgroups can accumulate their gradients on the GPU, in the free GPU memory.

        Gradients that are not accumulated on the GPU are copied to the host after each micro-batch.

        Args:
            sizes: Number of elements of each subgroup that may accumulate on the GPU. The first ones get GPU memory
                first.
            left_bytes: GPU memory that is free if no subgroup accumulates there.
            sent: Number of elements of all subgroups whose gradients are copied to the host.
        """
        if not self.sums:
            return 0
        most = left_bytes + self.sending_bytes(sent, 0)
        if self.sending_bytes(sent, sum(sizes)) <= most:  # usually there is room for all sums
            return len(sizes)
        # More sums never take less memory, so bisection finds the largest number.
        return bisect_right(list(accumulate(sizes)), most, key=lambda stay: self.sending_bytes(sent, stay))

    @property
    def early_bytes(self) -> int:
        """Return the bytes of host memory per parameter that an early update needs for new state and new parameters."""
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


def kept_steps(keep: int) -> int:
    """Return for how many finished steps the drives keep optimizer state, if a plan keeps ``keep`` checkpoints."""
    # The number is at least 1: even if ``keep`` is 0, the state of the latest checkpoint stays on the drives.
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
