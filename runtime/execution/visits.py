"""Which subgroups are in staging slots, and who comes next."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from ebbtide.runtime.devices.lane import Completion
from ebbtide.runtime.execution.guesses import Guess, SubgroupJob
from ebbtide.runtime.execution.subgroup_state import StagingSlot, SubgroupState


@dataclass(slots=True)
class Visit:
    """A subgroup in a slot, until its way home has been submitted.

    Attributes:
        home: its state when it came: where it comes from, and goes to unless it is a guess.
        into: of the slot, for its state.
        wire: of the slot, for a guess's new parameters.
        guess: None: it waits for the norm.
    """

    home: tuple[torch.Tensor, ...]
    into: tuple[torch.Tensor, ...]
    wire: torch.Tensor | None
    guess: Guess | None = None

    @property
    def dropped(self) -> bool:
        """It was a wrong guess: what of it has not begun does nothing."""
        return self.guess is not None and self.guess.dropped


@dataclass(slots=True)
class _Slot:
    """A slot is free from the end of the latest way home on; ``number``: that one's, of all."""

    buffer: StagingSlot
    number: int
    free: Completion


class Visits:
    """Called by the training thread alone.

    Who comes is known when it is submitted, not before: a wrong guess comes twice. So slots are not
    counted, but taken in the order in which they are given back.

    Attributes:
        inside: by subgroup, visits whose way home has not been submitted.
        ready: by subgroup, guesses that begin when they are in a slot, and what completes their
            gradient.
    """

    def __init__(
        self, slots: Sequence[StagingSlot], order: Sequence[int], guessed: Sequence[int], prefetch: int
    ) -> None:
        """``slots``: in device memory; ``order``: of all visits, the plan's;
        ``guessed``: those that the plan guesses, as their gradients arrive; ``prefetch``: of the
        others, how many come in before the norm.
        """
        self.order, self.guessed, self._prefetch = tuple(order), tuple(guessed), prefetch
        self._all = frozenset(order)
        self.inside: dict[int, Visit] = {}
        self.ready: dict[int, tuple[SubgroupJob, Completion]] = {}
        self._taken: dict[int, _Slot] = {}
        self._free = deque(_Slot(slot, -1, Completion.done()) for slot in slots)
        self._home: dict[int, tuple[int, Completion]] = {}  # each one's latest way home
        self._ways_home = 0
        self._coming: deque[int] | None = None  # before the norm; None: backward has not begun

    def __contains__(self, subgroup: int) -> bool:
        return subgroup in self._all

    def begin(self, *, guesses: bool) -> None:
        """Backward of the last micro-batch has begun.

        Args:
            guesses: False: all wait for the norm in this step.
        """
        if self._coming is None:
            first = self.guessed if guesses else ()
            waiting = [s for s in self.order if s not in first]
            coming = [*first, *waiting[: self._prefetch]]
            # Of a step that was skipped some may be there; behind their way home they stay out too.
            self._coming = deque(s for s in coming if s not in self.inside)

    def next(self) -> int | None:
        """Who may come before the norm, into a slot that is free or will be."""
        return self._coming.popleft() if self._coming and self._free else None

    def end(self) -> None:
        """The step goes on behind the norm, or not at all: nobody comes before it any more."""
        self._coming = None
        self.ready.clear()

    def come(self, state: SubgroupState) -> tuple[Visit, list[Completion]]:
        """Takes a slot; and what has to end before its state may come in.

        That is the way home of who was there before, or its own, whichever is the later of the
        lane: order may have changed since.
        """
        slot = self._taken[state.index] = self._free.popleft()
        own = self._home.get(state.index, (-1, slot.free))
        _, end = max((slot.number, slot.free), own, key=lambda end: end[0])
        wire = slot.buffer.wire
        visit = self.inside[state.index] = Visit(
            state.state, slot.buffer.views(state.elements), None if wire is None else wire[: state.elements]
        )
        return visit, [end]

    def leaves(self, subgroup: int, end: Completion) -> None:
        """Its way home has been submitted: ``end`` frees the slot."""
        self.inside.pop(subgroup)
        slot = self._taken.pop(subgroup)
        self._home[subgroup] = slot.number, slot.free = self._ways_home, end
        self._ways_home += 1
        self._free.append(slot)

    def close(self) -> None:
        """Lets the slots go; nothing is under way."""
        self.end()
        for held in (self.inside, self._taken, self._free, self._home):
            held.clear()
