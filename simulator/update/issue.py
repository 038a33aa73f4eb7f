"""The state machine that decides which op of an update begins next.

The schedule builder appends an op when the machine says so, the executor submits one. Both report
events (a gradient is complete, the norm is known), and get calls of ``add`` in return.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

from ebbtide.simulator.update.recipes import Recipe, Slot, Step, Wait, early_limits

Op = TypeVar("Op")  # an op's number, or its completion
Add = Callable[[Step, int, list[Op]], Op]


class _Buffer(NamedTuple, Generic[Op]):
    """A buffer that is free behind the op which gave it back, the latest of so many (0: none yet)."""

    number: int
    turn: int
    behind: Op | None


class Issue(Generic[Op]):
    """Issues the steps of all subgroups' recipes in order, and hands out slots.

    A slot is taken from the op that gave it back longest ago, in the order of issue. So nothing depends
    on how long an op takes, and the same events give the same ops everywhere.

    Attributes:
        early: By subgroup, how many of its steps began before the norm, and the latest of them.
        holds: By kind of slot and subgroup, the number of the buffer that the subgroup has.
    """

    def __init__(
        self,
        recipes: Sequence[Recipe],
        order: Sequence[int],
        arrival: Sequence[int],
        slots: Mapping[Slot, int],
        prefetch: int,
        add: Add[Op],
        arrived: Callable[[int], list[Op]],
        redo: Sequence[Recipe] = (),
    ) -> None:
        """Begin without any op.

        Args:
            recipes: The recipes of the plan, by subgroup.
            order: The order of the updates behind the norm.
            arrival: The order in which gradients become complete.
            slots: The number of buffers of each kind.
            prefetch: How many visits that wait for the norm may come in before it.
            add: Issues a step of a subgroup behind some ops, and returns the new op.
            arrived: Returns the ops that brought a subgroup's gradient to where the update reads it.
            redo: The recipes of updates that no early update precedes, or a wrong one. Empty: no update
                is wrong.
        """
        self.recipes, self.order, self.arrival = recipes, order, arrival
        self.redo = redo or recipes
        self.limits, self._add, self._arrived = early_limits(prefetch, slots), add, arrived
        self.early: dict[int, tuple[int, Op]] = {}
        self.holds: dict[tuple[Slot, int], int] = {}
        self._now = recipes  # of this step: `redo` if no update is early
        self._free = {slot: deque(_Buffer[Op](n, 0, None) for n in range(count)) for slot, count in slots.items()}
        self._turn = 0  # how often a slot has been given back
        self._left: dict[tuple[Slot, int], _Buffer[Op]] = {}  # by subgroup, the buffer that it gave back last
        self._begin: Op | None = None  # what comes in early waits for this
        self._in_backward = False
        self._complete: set[int] = set()
        self._coming: deque[int] = deque()

    def ahead(self, behind: Op | None = None) -> None:
        """Issue what begins for the next step already."""
        for subgroup in self._first(ahead=True):
            self._start(subgroup, behind)

    def backward(self, behind: Op | None, *, early: bool = True) -> None:
        """Let visits come in: the last micro-batch's gradients begin to arrive. Early updates are first.

        Further calls for the same step do nothing. A visit that is in its slot since a step that was
        skipped does not come again.

        Args:
            early: False if all updates of this step wait for the norm.
        """
        if self._in_backward:
            return
        self._in_backward, self._begin = True, behind
        self._now = self.recipes if early else self.redo
        staged = (s for s in self.arrival if self._now[s].before_norm and self._now[s].steps[0].early)
        some = [*staged, *self._first(ahead=False)]
        self._coming = deque(s for s in some if s not in self.early)
        self.come_in()

    def gradient(self, subgroup: int) -> None:
        """Begin an early update: the subgroup's gradient of this step is complete."""
        self._complete.add(subgroup)
        self._update_early(subgroup)
        self.come_in()

    def drop(self, subgroup: int) -> None:
        """Forget an early update, which is wrong. What it has begun counts for nothing."""
        self._complete.discard(subgroup)
        before = self._now[subgroup].before_norm
        if before and self.early.get(subgroup, (0,))[0] == before:
            del self.early[subgroup]

    def norm(self, op: Op) -> tuple[dict[int, Op], list[Op]]:
        """Issue everything else of this step behind the norm.

        Returns:
            By subgroup, the op behind which its parameters are new; and each subgroup's last op.
        """
        late = {s for s in self.arrival if self.early.get(s, (0,))[0] < self._now[s].before_norm}
        new: dict[int, Op] = {}
        ends = []
        for subgroup in self._updated(late):
            recipe = self.redo[subgroup] if subgroup in late else self._now[subgroup]
            begun, previous = self.early.pop(subgroup, (0, None))
            for step in recipe.steps[begun:]:
                previous = self._issue(step, subgroup, previous, op)
                if step.publishes:
                    new[subgroup] = previous
            assert previous is not None
            ends.append(previous)
        self._end()
        return new, ends

    def skip(self) -> None:
        """End a step that updates nothing. What has come into a slot stays there for the next one."""
        for subgroup in list(self.early):
            self.drop(subgroup)
        self._end()

    def come_in(self) -> None:
        """Issue the next ones that come in, as far as slots are free: an early update gives its slot back."""
        while self._coming and self._is_free(self._now[self._coming[0]].steps[0]):
            subgroup = self._coming.popleft()
            self._start(subgroup, self._begin)
            self._update_early(subgroup)

    def _end(self) -> None:
        self._in_backward, self._now = False, self.recipes
        self._complete.clear()
        self._coming.clear()

    def _updated(self, late: set[int]) -> list[int]:
        """Return the order of the updates. Where late visits need slots, what has one is first."""
        if not any(self.redo[s].steps[0].takes == Slot.STAGING for s in late):
            return [*self.order]
        held = [s for s in self.order if (Slot.STAGING, s) in self.holds]
        return [*held, *(s for s in self.order if s not in held)]

    def _is_free(self, step: Step) -> bool:
        assert step.takes is not None
        return bool(self._free[step.takes])

    def _update_early(self, subgroup: int) -> None:
        """Issue what needs no norm, if the gradient is complete and a slot has been taken."""
        recipe = self._now[subgroup]
        begun, previous = self.early.get(subgroup, (0, None))
        if subgroup not in self._complete or not (begun or recipe.steps[0].takes is None):
            return
        for step in recipe.steps[begun : recipe.before_norm]:
            previous = self._issue(step, subgroup, previous, None)
            begun += 1
            self.early[subgroup] = begun, previous

    def _first(self, *, ahead: bool) -> Iterator[int]:
        """Yield the subgroups that take a slot early and keep it until the norm is known."""
        left = dict(self.limits)
        for subgroup in self.order:
            recipe = self._now[subgroup]
            slot = recipe.steps[0].takes if recipe.steps[0].early and not recipe.before_norm else None
            if slot is not None and slot.ahead == ahead and left[slot]:
                left[slot] -= 1
                yield subgroup

    def _start(self, subgroup: int, behind: Op | None) -> None:
        waits = [] if behind is None else [behind]
        self.early[subgroup] = 1, self._take(self._now[subgroup].steps[0], subgroup, waits)

    def _issue(self, step: Step, subgroup: int, previous: Op | None, norm: Op | None) -> Op:
        waits = [norm] if norm is not None and Wait.NORM in step.waits else []
        if Wait.GRADIENT in step.waits:
            waits += self._arrived(subgroup)
        if previous is not None and Wait.PREVIOUS in step.waits:
            waits.append(previous)
        return self._take(step, subgroup, waits)

    def _take(self, step: Step, subgroup: int, waits: list[Op]) -> Op:
        """Issue a step. It waits for the op that gave its buffer back, too.

        State comes in behind the way home of its own last visit, if that is the later one: a visit that
        was wrong comes twice in a step, and its slot may be another one, free for long.
        """
        if step.takes is not None:
            buffer = self._free[step.takes].popleft()
            self.holds[step.takes, subgroup] = buffer.number
            own = self._left.get((step.takes, subgroup), buffer) if step.takes.holds_state else buffer
            behind = max(own, buffer, key=lambda one: one.turn).behind
            waits = waits if behind is None else [*waits, behind]
        op = self._add(step, subgroup, waits)
        slot = step.gives_back
        if slot is not None:
            self._turn += 1
            buffer = self._left[slot, subgroup] = _Buffer(self.holds.pop((slot, subgroup)), self._turn, op)
            self._free[slot].append(buffer)
        return op
