"""A plan as the search moves it: the one set of moves, which knows recipes and queues only."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from random import Random
from typing import Self

import numpy as np
from ebbtide.simulator.machine import Machine
from ebbtide.simulator.plan import Placement
from ebbtide.simulator.update.order import FORWARD, UpdateOrder
from ebbtide.simulator.update.recipes import HOST_SLOTS, RECIPES, Queue, Recipe, Slot
from numpy.typing import NDArray

PLACEMENTS: tuple[Placement, ...] = tuple(RECIPES)
# What a search may choose where all state is in memory.
CHOICES: tuple[Placement, ...] = tuple(p for p in RECIPES if RECIPES[p].state != "storage")
QUEUES = tuple(Queue)
NEAR = 4  # positions apart
_QUEUE_OF = [QUEUES.index(recipe.queue) for recipe in RECIPES.values()]


def is_staged(recipe: Recipe) -> bool:
    """Return whether the state is staged to the device for the update."""
    return any(step.takes == Slot.STAGING for step in recipe.steps)


def choices(machine: Machine, *, storage: bool) -> tuple[Placement, ...]:
    """Placements that a search may choose.

    Where memory is unified, state that moves to the device stays where it was.

    Args:
        storage: state may go there.
    """
    found = tuple(RECIPES) if storage else CHOICES
    return tuple(p for p in found if RECIPES[p].queue == Queue.HOST or not machine.unified_memory)


STAGED = frozenset(placement for placement, recipe in RECIPES.items() if is_staged(recipe))
# Their state comes to a slot first, of whichever memory.
AWAITED = frozenset(p for p, r in RECIPES.items() if any(slot.holds_state for slot in r.slots))
STORED = frozenset(p for p, recipe in RECIPES.items() if recipe.state == "storage")
HOST = next(p for p, recipe in RECIPES.items() if recipe.queue == Queue.HOST)  # nothing moves
_STAGED_CODES = [code for code, placement in enumerate(PLACEMENTS) if placement in STAGED]


@dataclass
class Moved:
    """The sequences hold the subgroups of each queue in the order of their updates.

    Attributes:
        codes: by subgroup, the number of its placement in PLACEMENTS.
        choices: what a subgroup may become.
        guesses: `Candidate.early_updates`; None: they stay.
    """

    codes: list[int]
    sequences: list[list[int]]
    slots: int
    prefetch: int
    choices: tuple[Placement, ...] = CHOICES
    host_slots: int = HOST_SLOTS
    early_updates: tuple[int, ...] | None = None

    @classmethod
    def of(
        cls,
        placements: Iterable[Placement],
        order: UpdateOrder | None,
        slots: int,
        prefetch: int,
        choices: tuple[Placement, ...] = CHOICES,
        host_slots: int = HOST_SLOTS,
    ) -> Self:
        """``order`` None: that of the layers."""
        codes = [PLACEMENTS.index(p) for p in placements]
        sequences = [
            (order or FORWARD).of(queue, [s for s, code in enumerate(codes) if _QUEUE_OF[code] == number])
            for number, queue in enumerate(QUEUES)
        ]
        return cls(codes, sequences, slots, prefetch, choices, host_slots)

    def moved(self, rng: Random) -> Self:
        """Return a neighbour of this candidate."""
        if not STORED.isdisjoint(self.choices) and rng.random() < 0.1:
            return replace(self, host_slots=max(1, self.host_slots + rng.choice((-1, 1))))
        if self.early_updates is not None and rng.random() < 0.15:
            new, which = list(self.early_updates), rng.choice(self._early_positions)
            new[which] = max(0, new[which] + rng.choice((-1, 1)))
            return replace(self, early_updates=tuple(new))
        kind = rng.random()
        if kind < 0.3:
            return self._with(lambda new: new._swap(rng))
        if kind < 0.5:
            return self._with(lambda new: new._place(rng))
        if kind < 0.9:
            return self.reordered(rng)
        step = rng.choice((-1, 1))
        if kind < 0.95:
            return replace(self, slots=self.slots + step)._limited()
        return replace(self, prefetch=self.prefetch + step)._limited()

    @property
    def _early_positions(self) -> list[int]:
        """Return the positions of ``early_updates`` that count."""
        return [0, 1, *([2] if self.staged else [])]

    @property
    def staged(self) -> int:
        """Return the number of staged subgroups."""
        return sum(self.codes.count(code) for code in _STAGED_CODES)

    def reordered(self, rng: Random) -> Self:
        """Return the same placements with other sequences."""
        return self._with(lambda new: new._reorder(rng))

    def _with(self, change: Callable[[Self], None]) -> Self:
        copies = [list(sequence) for sequence in self.sequences]
        new = replace(self, codes=list(self.codes), sequences=copies)
        change(new)
        return new._limited()

    def _limited(self) -> Self:
        """Limit the slots to the staged subgroups, and the prefetched ones to the slots."""
        self.slots = max(1, min(self.slots, self.staged))
        self.prefetch = max(0, min(self.prefetch, self.slots))
        return self

    def _sequence(self, subgroup: int) -> list[int]:
        return self.sequences[_QUEUE_OF[self.codes[subgroup]]]

    def _swap(self, rng: Random) -> None:
        """Two subgroups take each other's placement and place in the order."""
        one, other = rng.randrange(len(self.codes)), rng.randrange(len(self.codes))
        first, second = self._sequence(one), self._sequence(other)
        i, j = first.index(one), second.index(other)
        first[i], second[j] = other, one
        self.codes[one], self.codes[other] = self.codes[other], self.codes[one]

    def _place(self, rng: Random) -> None:
        """One subgroup gets another placement; in another queue, mostly where its layer is."""
        subgroup = rng.randrange(len(self.codes))
        before = self._sequence(subgroup)
        self.codes[subgroup] = PLACEMENTS.index(self.choices[rng.randrange(len(self.choices))])
        after = self._sequence(subgroup)
        if after is not before:
            before.remove(subgroup)
            behind = (i for i, other in enumerate(after) if other > subgroup)
            place = next(behind, len(after)) if rng.random() < 0.7 else rng.randint(0, len(after))
            after.insert(place, subgroup)

    def _reorder(self, rng: Random) -> None:
        """A part of a sequence goes elsewhere, turned round or not."""
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

    @property
    def placements(self) -> tuple[Placement, ...]:
        return tuple(PLACEMENTS[code] for code in self.codes)

    @property
    def order(self) -> UpdateOrder:
        by_queue = dict(zip(QUEUES, self.sequences, strict=True))
        return UpdateOrder.from_sequences(by_queue[Queue.HOST], by_queue[Queue.DEVICE])

    def arrays(self) -> tuple[NDArray[np.int8], NDArray[np.int64]]:
        """Codes and the order of issue, as `PlanSweep.evaluate` takes them."""
        heads = [iter(sequence) for sequence in self.sequences]
        issue = np.array([next(heads[_QUEUE_OF[code]]) for code in self.codes], dtype=np.int64)
        return np.array(self.codes, dtype=np.int8), issue
