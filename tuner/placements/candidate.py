"""A plan in the form that a plan search scores, as a code for each subgroup, and changes of such a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from random import Random
from typing import Any, Self

import numpy as np
from ebbtide.simulator.analysis.many_plans import PlanSweep
from ebbtide.simulator.machine import Machine
from ebbtide.simulator.plan import ParameterLocation, Placement, Plan
from ebbtide.simulator.update.order import FORWARD, UpdateOrder
from ebbtide.simulator.update.recipes import RECIPES
from ebbtide.simulator.update.steps import HOST_SLOTS, Queue, Slot
from ebbtide.simulator.update.way import (
    EARLY,
    LOCATION_CODES,
    PARAMETERS_ON_HOST,
    PLACEMENT_CODES,
    SUMMED,
    of_codes,
    plain_ways,
)
from ebbtide.simulator.workload import Workload
from numpy.typing import NDArray

Codes = NDArray[np.int8]  # `Way.code` of each subgroup
PLACEMENTS: tuple[Placement, ...] = tuple(RECIPES)
# The placements that a search may choose if all state is in memory.
CHOICES: tuple[Placement, ...] = tuple(p for p in RECIPES if RECIPES[p].state != "storage")
QUEUES = tuple(Queue)
NEAR = 4  # largest distance in positions of a move within the update order
_PLACED = SUMMED - 1  # bits of a code that hold the placement
_QUEUE_OF = [QUEUES.index(recipe.queue) for recipe in RECIPES.values()]
# A search asks for the way of each of its plans, so the ways are kept in a dict.
_PLAIN = {way.code: way for way in plain_ways()}
CAN_BE_EARLY = np.array([code in _PLAIN and _PLAIN[code].can_be_early for code in range(2**7)])
CAN_SUM = np.array([code in _PLAIN and _PLAIN[code].can_sum_on_device for code in range(2**7)])


def choices(machine: Machine, *, storage: bool) -> tuple[Placement, ...]:
    """Return the placements that a plan search may choose on a machine."""
    found = tuple(RECIPES) if storage else CHOICES
    return tuple(p for p in found if RECIPES[p].queue == Queue.HOST or not machine.unified_memory)


STAGED = frozenset(p for p, recipe in RECIPES.items() if any(step.takes == Slot.STAGING for step in recipe.steps))
STORED = frozenset(p for p, recipe in RECIPES.items() if recipe.state == "storage")
HOST = next(p for p, recipe in RECIPES.items() if recipe.queue == Queue.HOST)  # this placement copies no state
_STAGED_CODES = {PLACEMENT_CODES[placement] for placement in STAGED}


def plain(code: int) -> int:
    """Return a subgroup's code without the flags for early update and on-device gradient accumulation."""
    return code & ~(EARLY | SUMMED)


def _allowed(code: int) -> int:
    bits = (EARLY if CAN_BE_EARLY[plain(code)] else 0) | (SUMMED if CAN_SUM[plain(code)] else 0)
    return plain(code) | (code & bits)


PLAIN = bytes(plain(code) for code in range(2**8))  # indexed by code
# For each code, the code without the bits that its placement does not allow.
ALLOWED = bytes(_allowed(code) if code < 2**7 else 0 for code in range(2**8))
# For each code, the position in `QUEUES` of the queue that updates the subgroup.
QUEUE_NUMBERS = bytes(_QUEUE_OF[code & _PLACED] if code & _PLACED < len(RECIPES) else 0 for code in range(2**8))
_PLACEMENT_OF = {code: PLACEMENTS[code & _PLACED] for code in range(2**7) if code & _PLACED < len(RECIPES)}
_STAGED_OR_NOT = bytes(code & _PLACED in _STAGED_CODES for code in range(2**8))


def placements_of(codes: Iterable[int]) -> tuple[Placement, ...]:
    """Return a tuple with the placement of each subgroup of optimizer state, read from the subgroup's code."""
    return tuple(map(_PLACEMENT_OF.__getitem__, codes))


@dataclass(frozen=True)
class Freedom:
    """The changes that a plan search may make, in addition to update orders and numbers of buffers.

    Attributes:
        placements: Placements that a subgroup of optimizer state may get.
        early: True if updates may start before the gradient norm is known.
        sums: True if gradients of micro-batches may be summed on the GPU.
        parameters: True if 16-bit parameters may move between GPU and host memory.
    """

    placements: tuple[Placement, ...] = CHOICES
    early: bool = False
    sums: bool = False
    parameters: bool = False
    threads: tuple[int, ...] = ()


@dataclass
class Moved:
    """A training plan in the form that simulated annealing changes.

    Attributes:
        codes: For each subgroup, the number of its way (`Way.code`).
        sequences: For the CPU and for the GPU, the subgroups that it updates, in the order of their updates.
        slots: Number of staging buffers.
        prefetch: Number of subgroups that are copied to the GPU ahead of time.
        free: Changes that the search may make, such as early updates.
        host_slots: Number of buffers in host memory for subgroups that are stored on a drive.
        threads: Number of CPU threads for updates, or 0 for the default.
    """

    codes: list[int]
    sequences: list[list[int]]
    slots: int
    prefetch: int
    free: Freedom = Freedom()
    host_slots: int = HOST_SLOTS
    threads: int = 0

    def moved(self, rng: Random) -> Self:
        """Return a copy of this training plan with one random change."""
        moves = self._moves()
        (change,) = rng.choices([*moves], [*moves.values()])
        new = replace(self, codes=list(self.codes), sequences=[list(sequence) for sequence in self.sequences])
        change(new, rng)
        new.slots = max(1, min(new.slots, new.staged))
        new.prefetch = max(0, min(new.prefetch, new.slots))
        return new

    def _moves(self) -> dict[Callable[[Self, Random], None], float]:
        kind, free = type(self), self.free
        return {
            kind._swap: 40,
            kind._place: 12 if len(free.placements) > 1 else 0,
            kind._reorder: 35,
            kind._resize: 8 if self.staged else 0,
            kind._turn_early: 15 if free.early else 0,
            kind._shift_early: 15 if free.early else 0,
            kind._turn_sum: 10 if free.sums else 0,
            kind._move_parameters: 1 if free.parameters else 0,
            kind._resize_host: 10 if not STORED.isdisjoint(free.placements) else 0,
            kind._rethread: 3 if len(free.threads) > 1 else 0,
        }

    @property
    def staged(self) -> int:
        """Return the number of subgroups that this plan copies to the GPU for their update."""
        return bytes(self.codes).translate(_STAGED_OR_NOT).count(1)

    def _sequence(self, subgroup: int) -> list[int]:
        return self.sequences[QUEUE_NUMBERS[self.codes[subgroup]]]

    def _swap(self, rng: Random) -> None:
        one, other = rng.randrange(len(self.codes)), rng.randrange(len(self.codes))
        first, second = self._sequence(one), self._sequence(other)
        i, j = first.index(one), second.index(other)
        first[i], second[j] = other, one
        away = (self.codes[one] ^ self.codes[other]) & PARAMETERS_ON_HOST
        self.codes[one], self.codes[other] = ALLOWED[self.codes[other] ^ away], ALLOWED[self.codes[one] ^ away]

    def _place(self, rng: Random) -> None:
        # With a probability of 70%, the update is inserted directly before the first update of a subgroup with a higher
        # index, or at the end of the order if no subgroup has a higher index. Otherwise all positions are equally
        # likely.
        subgroup = rng.randrange(len(self.codes))
        before, code = self._sequence(subgroup), self.codes[subgroup]
        others = [p for p in self.free.placements if PLACEMENT_CODES[p] != code & _PLACED]
        code += PLACEMENT_CODES[rng.choice(others)] - (code & _PLACED)
        if self.free.early and rng.random() < 0.5:
            code ^= EARLY
        self.codes[subgroup] = ALLOWED[code | SUMMED if self.free.sums else code]
        after = self._sequence(subgroup)
        if after is not before:
            before.remove(subgroup)
            behind = (i for i, other in enumerate(after) if other > subgroup)
            place = next(behind, len(after)) if rng.random() < 0.7 else rng.randint(0, len(after))
            after.insert(place, subgroup)

    def _turn(self, bit: int, rng: Random) -> None:
        subgroup = rng.randrange(len(self.codes))
        self.codes[subgroup] = ALLOWED[self.codes[subgroup] ^ bit]

    def _turn_early(self, rng: Random) -> None:
        self._turn(EARLY, rng)

    def _turn_sum(self, rng: Random) -> None:
        self._turn(SUMMED, rng)

    def _move_parameters(self, rng: Random) -> None:
        self._turn(PARAMETERS_ON_HOST, rng)

    def _shift_early(self, rng: Random) -> None:
        early = [s for s, code in enumerate(self.codes) if code & EARLY]
        others = [s for s, code in enumerate(self.codes) if not code & EARLY and CAN_BE_EARLY[plain(code)]]
        if early and others:
            for subgroup in (rng.choice(early), rng.choice(others)):
                self.codes[subgroup] ^= EARLY

    def _reorder(self, rng: Random) -> None:
        sequence = rng.choice(self.sequences)
        if len(sequence) < 2:
            return
        length = min(len(sequence) - 1, int(rng.expovariate(0.5)) + 1)
        first = rng.randrange(len(sequence) - length + 1)
        part = sequence[first : first + length]
        del sequence[first : first + length]
        near = min(len(sequence), max(0, first + rng.randint(-NEAR, NEAR)))
        place = near if rng.random() < 0.5 else rng.randint(0, len(sequence))
        sequence[place:place] = part[::-1] if rng.random() < 0.3 else part

    def _resize(self, rng: Random) -> None:
        if rng.random() < 0.5:
            self.slots += rng.choice((-1, 1))
        else:
            self.prefetch += rng.choice((-1, 1))

    def _resize_host(self, rng: Random) -> None:
        self.host_slots = max(1, self.host_slots + rng.choice((-1, 1)))

    def _rethread(self, rng: Random) -> None:
        self.threads = rng.choice(self.free.threads)

    @property
    def placements(self) -> tuple[Placement, ...]:
        return placements_of(self.codes)

    @property
    def order(self) -> UpdateOrder:
        by_queue = dict(zip(QUEUES, self.sequences, strict=True))
        return UpdateOrder.from_sequences(by_queue[Queue.HOST], by_queue[Queue.DEVICE])

    def arrays(self) -> tuple[Codes, NDArray[np.int64]]:
        """Return the codes of a plan's subgroups, and the order of their updates."""
        heads = [iter(sequence) for sequence in self.sequences]
        issue = np.array([next(heads[queue]) for queue in bytes(self.codes).translate(QUEUE_NUMBERS)], dtype=np.int64)
        return np.array(self.codes, dtype=np.int8), issue


Row = NDArray[np.float64]  # the simulator's results for a plan
_WITHOUT_EARLY = bytes(code & ~EARLY for code in range(2**8))
_SUMMED_CODES = {placement: code + SUMMED for placement, code in PLACEMENT_CODES.items()}
_HAS = {bit: bytes(bool(code & bit) for code in range(2**8)) for bit in (EARLY, SUMMED, PARAMETERS_ON_HOST)}


@dataclass(frozen=True)
class Candidate:
    """A plan in the form that a plan search scores: only the fields of a plan file that the search varies.

    Attributes:
        ways: Code of each subgroup's way (`Way.code`), one byte each. If GPU memory cannot hold all gradient sums that
            the codes ask for, only the subgroups with the lowest numbers keep them on the GPU.
        staging_slots: Number of staging buffers. Fewer are used if memory cannot hold them together with the
            activations.
        prefetch: Number of subgroups that are copied to the GPU ahead of time.
        threads: Number of CPU threads for updates, or 0 for the default.
        overlap_forward: True if updates may overlap the next forward.
        order: Order of the subgroups' updates. If None, the order that `UpdateOrders` proposes.
        host_slots: Number of buffers in host memory for subgroups that are stored on a drive.
    """

    ways: bytes
    staging_slots: int = 2
    prefetch: int = 0
    threads: int = 0
    overlap_forward: bool = True
    order: UpdateOrder | None = None
    host_slots: int = HOST_SLOTS

    @classmethod
    def of(
        cls,
        placements: Sequence[Placement],
        staging_slots: int = 2,
        prefetch: int = 0,
        locations: Sequence[ParameterLocation] = (),
        **fields: Any,
    ) -> Self:
        """Build a plan, in the form that a plan search scores, from the placement of each subgroup.

        The plan has no early updates, and on-device gradient accumulation wherever possible.
        """
        codes = bytes(map(_SUMMED_CODES.__getitem__, placements))
        if locations:
            codes = bytes(code + LOCATION_CODES[where] for code, where in zip(codes, locations, strict=True))
        return cls(codes.translate(ALLOWED), staging_slots, prefetch, **fields)

    @classmethod
    def of_plan(cls, plan: Plan) -> Self:
        return cls(
            bytes(way.code for way in plan.ways),
            max(1, plan.staging_slots),
            plan.prefetch,
            plan.threads,
            plan.overlap_forward,
            plan.order,
            plan.host_slots,
        )

    @property
    def settings(self) -> dict[str, Any]:
        """Return the fields of a plan's file that a search chooses."""
        staged = not STAGED.isdisjoint(self.placements)
        return {
            "ways": of_codes(self.ways),
            "order": self.order or FORWARD,
            "staging_slots": self.staging_slots if staged else 0,
            "prefetch": self.prefetch if staged else 0,
            "threads": self.threads,
            "overlap_forward": self.overlap_forward,
            "host_slots": self.host_slots,
        }

    def plan(self, workload: Workload, **fields: Any) -> Plan:
        """Convert this plan of a plan search into a `Plan`, the contents of a plan file. ``fields`` are
        further fields of the file.
        """
        made = {
            "workload_fingerprint": workload.fingerprint,
            "trained_as": workload.trained_as,
            "subgroup_size": workload.subgroup_size or max(workload.subgroups),
            "deepspeed_subgroup_size": workload.deepspeed_subgroup_size,
            "subgroups": workload.subgroups,
            **self.settings,
        }
        return Plan.model_validate({**made, **fields})

    def movable(self, free: Freedom) -> Moved:
        """Return this plan in the form that simulated annealing changes.

        Args:
            free: Changes that the search may make.
        """
        order = self.order or FORWARD
        sequences = [
            order.of(queue, [s for s, code in enumerate(self.ways) if QUEUE_NUMBERS[code] == number])
            for number, queue in enumerate(QUEUES)
        ]
        slots, prefetch = self.staging_slots, self.prefetch
        return Moved([*self.ways], sequences, slots, prefetch, free, self.host_slots, self.threads)

    def with_placements(self, placements: Sequence[Placement]) -> Self:
        """Return a copy of this plan with other placements, one per subgroup."""
        pairs = zip(self.ways, placements, strict=True)
        codes = bytes(code - code % SUMMED + PLACEMENT_CODES[placement] for code, placement in pairs)
        return replace(self, ways=codes.translate(ALLOWED))

    def count(self, bit: int) -> int:
        """Return the number of subgroups in this plan that have a given flag, such as early update."""
        return self.ways.translate(_HAS[bit]).count(1)

    @cached_property
    def _hash(self) -> int:
        return hash((self.ways, self.order, self.staging_slots, self.prefetch, self.threads))

    def __hash__(self) -> int:  # cached, because a search hashes each plan several times
        return self._hash

    @cached_property
    def codes(self) -> Codes:
        # Writable, because numba would compile a second version for read-only arrays.
        return np.frombuffer(bytearray(self.ways), dtype=np.int8)

    @cached_property
    def placements(self) -> tuple[Placement, ...]:
        return placements_of(self.ways)

    @cached_property
    def issue(self) -> NDArray[np.int64] | None:
        if self.order is None or self.order == FORWARD:
            return None
        queues, issue = np.frombuffer(self.ways.translate(QUEUE_NUMBERS), np.int8), np.empty(len(self.ways), np.int64)
        for number, queue in enumerate(QUEUES):
            own = np.flatnonzero(queues == number)
            issue[own] = self.order.of(queue, own.tolist())
        return issue


def turned(c: Candidate, subgroups: Iterable[int], bit: int) -> Candidate:
    """Return a copy of a plan with one flag, such as early update, inverted for the given subgroups."""
    ways = bytearray(c.ways)
    for subgroup in subgroups:
        ways[subgroup] ^= bit
    return replace(c, ways=bytes(ways))


def waiting(c: Candidate) -> Candidate:
    """Return a copy of a plan without early updates, so that every update waits for the gradient norm."""
    return replace(c, ways=c.ways.translate(_WITHOUT_EARLY))


def able_early(c: Candidate, placement: Placement) -> NDArray[np.int64]:
    """Return the numbers of the subgroups of a placement that can be updated before the gradient norm is known."""
    plain = c.codes & ~(EARLY | SUMMED)
    return np.flatnonzero(CAN_BE_EARLY[plain] & (plain % SUMMED == PLACEMENT_CODES[placement]))


def evenly(
    numbers: Mapping[Placement, int],
    slots: int = 1,
    fixed: Mapping[int, Placement] | None = None,
    locations: Sequence[ParameterLocation] = (),
) -> Candidate:
    """Build a plan that spreads the given number of subgroups per placement evenly over the model.

    Subgroups that stay on the GPU come first. The other placements are interleaved.

    Args:
        slots: Number of staging buffers.
        locations: Location of each subgroup's 16-bit parameters. If empty, all are on the GPU.
    """
    there = [p for p in PLACEMENTS if numbers.get(p)]
    stay = [p for p in there if RECIPES[p].state == "device" for _ in range(numbers[p])]
    moving = [p for p in there if RECIPES[p].state != "device"]
    # Number k of n subgroups with a placement is sorted by (k + 1) / n. Ties are in the order of RECIPES.
    mixed = sorted(((k + 1) / numbers[p], rank, p) for rank, p in enumerate(moving) for k in range(numbers[p]))
    placements = [*stay, *(p for _, _, p in mixed)]
    for subgroup, placement in sorted((fixed or {}).items()):
        placements.insert(subgroup, placement)
    staged = sum(p in STAGED for p in placements)
    slots = max(1, min(slots, staged))
    return Candidate.of(placements, slots, min(slots, staged), locations)


def seconds_of(sweep: PlanSweep, c: Candidate) -> float:
    """Return the predicted seconds of an iteration under a plan, assuming that no early update must be undone."""
    from ebbtide.simulator.engines import summary

    return float(evaluated(sweep, c)[summary.ITERATION_S])


def options_of(c: Candidate) -> tuple[Any, ...]:
    """Return the arguments of `PlanSweep.evaluate` that describe a plan as a whole."""
    return c.staging_slots, c.prefetch, c.threads, c.overlap_forward, c.issue, c.host_slots


def evaluated(sweep: PlanSweep, c: Candidate) -> Row:
    """Return the row of results (times and memory peaks) that the simulator gives for a plan."""
    return sweep.evaluate(c.codes, *options_of(c))
