"""Which subgroups are in staging slots, and who comes next."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from ebbtide.runtime.devices.base import Device
from ebbtide.runtime.devices.lane import Completion
from ebbtide.runtime.execution.guesses import Guess, SubgroupJob
from ebbtide.runtime.execution.subgroup_state import StagingSlot, SubgroupState

logger = logging.getLogger("ebbtide")


@dataclass(slots=True)
class Growing:
    """Slots in memory that activations leave: `Plan.grown`.

    Attributes:
        wanted: how many there are behind each subgroup's gradient; fewer once memory was short.
        make: takes device memory for one.
    """

    wanted: Counter[int] = field(default_factory=Counter)
    make: Callable[[], StagingSlot] | None = None
    warned: bool = False

    def more(self, subgroup: int, device: Device, there: int) -> list[_Slot]:
        """Those that are not there yet, in the memory of the training stream: each is free once
        what was issued there has ended.
        """
        made: list[_Slot] = []
        while there + len(made) < self.wanted[subgroup]:
            assert self.make is not None
            try:
                with device.training_memory():
                    made.append(_Slot(self.make(), -1, Completion.done(device.current_event())))
            except torch.OutOfMemoryError:
                self._short(subgroup, there + len(made))
        return made

    def _short(self, subgroup: int, got: int) -> None:
        """It is not tried again: each time the allocator would give back all that it keeps."""
        wanted, self.wanted[subgroup] = self.wanted[subgroup], got
        if not self.warned:
            self.warned = True
            logger.warning(
                "the device has memory for %d of the plan's %d staging slots that grow behind "
                "subgroup %d (plan.growing_slots): training goes on with fewer. If this stays so, "
                "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, so that free memory in many "
                "pieces serves too, or plan again with a smaller --gpu-memory.",
                got,
                wanted,
                subgroup,
            )


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
        self,
        slots: Sequence[StagingSlot],
        order: Sequence[int],
        guessed: Sequence[int],
        prefetch: int,
        growing: Growing | None = None,
    ) -> None:
        """``slots``: those that are always there; ``order``: of all visits, the plan's;
        ``guessed``: those that the plan guesses, as their gradients arrive; ``prefetch``: of the
        others, how many come in before the norm.
        """
        self.growing = growing or Growing()
        self._grown = Counter[int]()  # slots that are there, by the subgroup behind which they grow
        self.order, self.guessed, self._prefetch = tuple(order), tuple(guessed), prefetch
        self._all = frozenset(order)
        self.inside: dict[int, Visit] = {}
        self.ready: dict[int, tuple[SubgroupJob, Completion]] = {}
        self._taken: dict[int, _Slot] = {}
        self._free = deque(_Slot(slot, -1, Completion.done()) for slot in slots)
        self._home: dict[int, tuple[int, Completion]] = {}  # each one's latest way home
        self._ways_home = 0
        self._met = -1  # the latest of them behind which any visit to come is
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

    def grow(self, subgroup: int, device: Device) -> None:
        """Its gradient is complete, and what its layers' activations took is free."""
        if self.growing.wanted[subgroup] > self._grown[subgroup]:
            some = self.growing.more(subgroup, device, self._grown[subgroup])
            self._grown[subgroup] += len(some)
            self._free.extend(some)

    def grow_all(self, device: Device) -> None:
        """Backward is over.

        Raises:
            torch.OutOfMemoryError: there is no memory for a single slot.
        """
        for subgroup in self.growing.wanted:
            self.grow(subgroup, device)
        if self._all and not (self._free or self._taken):
            raise torch.OutOfMemoryError(
                "the device must have memory for one staging slot where a subgroup visits it "
                "(plan.growing_slots), but has none: plan again with a smaller --gpu-memory"
            )

    def make_room(self, subgroup: int) -> list[_Slot]:
        """The next forward is about to read it: as many slots as grew behind it go. They are to be
        held until the stream that computes waits for their ``free``. Not while updates run before
        the norm.
        """
        if self._coming is not None or not self._grown[subgroup]:
            return []
        count = min(self._grown[subgroup], len(self._free))
        self._grown[subgroup] -= count  # one in use goes next time
        left = [self._free.popleft() for _ in range(count)]
        self._met = max([self._met, *(slot.number for slot in left)])
        return left

    def come(self, state: SubgroupState) -> tuple[Visit, list[Completion]]:
        """Takes a slot; and what has to end before its state may come in.

        That is the way home of who was there before, or its own, whichever is the later of the
        lane: order may have changed since. A new slot's memory was somebody else's, and who takes
        it comes behind what the lane, or the forward that needed room, has waited for.
        """
        slot = self._taken[state.index] = self._free.popleft()
        own = self._home.get(state.index, (-1, slot.free))
        number, end = max((slot.number, slot.free), own, key=lambda end: end[0])
        waits = [slot.free] if slot.number < 0 else []
        if number > self._met or not waits:
            waits.append(end)
        self._met = max(self._met, number)
        wire = slot.buffer.wire
        visit = self.inside[state.index] = Visit(
            state.state, slot.buffer.views(state.elements), None if wire is None else wire[: state.elements]
        )
        return visit, waits

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
