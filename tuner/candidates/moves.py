"""The random changes (moves) that turn a training plan into a similar one during a plan search.

A move changes the placements of subgroups (the memory of their optimizer state), the order of their updates,
or the number of buffers.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from random import Random
from typing import Self

import numpy as np
from ebbtide.simulator.machine import Machine
from ebbtide.simulator.plan import Placement
from ebbtide.simulator.update.order import UpdateOrder
from ebbtide.simulator.update.recipes import RECIPES
from ebbtide.simulator.update.steps import HOST_SLOTS, Queue, Slot
from ebbtide.simulator.update.way import EARLY, PARAMETERS_ON_HOST, PLACEMENT_CODES, SUMMED, plain_ways
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
    """Return a tuple of the placements (memories for a subgroup's optimizer state) that a plan search may choose on a
    machine.
    """
    found = tuple(RECIPES) if storage else CHOICES
    return tuple(p for p in found if RECIPES[p].queue == Queue.HOST or not machine.unified_memory)


STAGED = frozenset(p for p, recipe in RECIPES.items() if any(step.takes == Slot.STAGING for step in recipe.steps))
STORED = frozenset(p for p, recipe in RECIPES.items() if recipe.state == "storage")
HOST = next(p for p, recipe in RECIPES.items() if recipe.queue == Queue.HOST)  # this placement copies no state
_STAGED_CODES = {PLACEMENT_CODES[placement] for placement in STAGED}


def plain(code: int) -> int:
    """Remove the flags for early update and on-device gradient accumulation from a subgroup's code, and return the
    rest.
    """
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
        codes: For each subgroup, the number (`Way.code`) that encodes its placement (memory of the optimizer state),
            its parameter location (memory of the 16-bit parameters), and its flags for an early update and for gradient
            sums on the GPU.
        sequences: For the CPU and for the GPU, the subgroups that it updates, in the order of their updates.
        slots: Number of staging buffers: GPU memory for one staged subgroup each.
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
        return new._limited()

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

    def _limited(self) -> Self:
        self.slots = max(1, min(self.slots, self.staged))
        self.prefetch = max(0, min(self.prefetch, self.slots))
        return self

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
        """Return two arrays with one entry per subgroup: the codes of a plan's subgroups, and the order of their
        updates.
        """
        heads = [iter(sequence) for sequence in self.sequences]
        issue = np.array([next(heads[queue]) for queue in bytes(self.codes).translate(QUEUE_NUMBERS)], dtype=np.int64)
        return np.array(self.codes, dtype=np.int8), issue
