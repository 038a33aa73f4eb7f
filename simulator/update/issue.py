"""The state machine that decides which op of an update begins next.

The schedule builder appends an op when the machine says so, the executor submits one. Both report
events (a gradient is complete, the norm is known), and get calls of ``add`` in return.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Generic, TypeVar

from ebbtide.simulator.update.recipes import Recipe, Slot, Step, Wait, early_limits

Op = TypeVar("Op")  # an op's number, or its completion
Add = Callable[[Step, int, list[Op]], Op]


class Issue(Generic[Op]):
    """Issues the steps of all subgroups' recipes in order, and hands out slots.

    A slot is taken from the op that gave it back longest ago, in the order of issue. So nothing depends
    on how long an op takes, and the same events give the same ops everywhere.

    Attributes:
        home: By subgroup, the op that brought its gradient to where the update reads it.
        early: By subgroup, how many of its steps began before the norm, and the latest of them.
    """

    def __init__(
        self,
        recipes: Sequence[Recipe],
        order: Sequence[int],
        arrival: Sequence[int],
        slots: Mapping[Slot, int],
        prefetch: int,
        add: Add[Op],
    ) -> None:
        """Begin without any op.

        Args:
            recipes: The recipes of the plan, by subgroup.
            order: The order of the updates behind the norm.
            arrival: The order in which gradients become complete.
            slots: The number of buffers of each kind.
            prefetch: How many visits that wait for the norm may come in before it.
            add: Issues a step of a subgroup behind some ops, and returns the new op.
        """
        self.recipes, self.order, self.arrival = recipes, order, arrival
        self.limits, self._add = early_limits(prefetch, slots), add
        self.home: dict[int, Op] = {}
        self.early: dict[int, tuple[int, Op]] = {}
        self._free: dict[Slot, deque[Op | None]] = {slot: deque([None] * count) for slot, count in slots.items()}
        self._begin: Op | None = None  # what comes in early waits for this
        self._complete: set[int] = set()
        self._coming: deque[int] = deque()

    def ahead(self, behind: Op | None = None) -> None:
        """Issue what begins for the next step already."""
        for subgroup in self._first(ahead=True):
            self._start(subgroup, behind)

    def backward(self, behind: Op | None) -> None:
        """Let visits come in: the last micro-batch's gradients begin to arrive. Early updates are first."""
        visits = (s for s in self.arrival if self.recipes[s].before_norm and self.recipes[s].steps[0].early)
        self._coming = deque([*visits, *self._first(ahead=False)])
        self._begin = behind
        self._come_in()

    def gradient(self, subgroup: int) -> None:
        """Begin an early update: the subgroup's gradient of this step is complete."""
        self._complete.add(subgroup)
        self._guess(subgroup)
        self._come_in()

    def norm(self, op: Op) -> tuple[dict[int, Op], list[Op]]:
        """Issue everything that waits for the norm.

        Returns:
            By subgroup, the op that publishes its parameters; and each subgroup's last op.
        """
        self._complete.clear()
        self._coming.clear()
        new: dict[int, Op] = {}
        ends = []
        for subgroup in self.order:
            begun, previous = self.early.pop(subgroup, (0, None))
            for step in self.recipes[subgroup].steps[begun:]:
                previous = self._issue(step, subgroup, previous, op)
                if step.publishes:
                    new[subgroup] = previous
            assert previous is not None
            ends.append(previous)
        self.ahead(op)
        return new, ends

    def _come_in(self) -> None:
        """Issue the next ones that come in, as far as slots are free: an early update gives its slot back."""
        while self._coming and self._is_free(self.recipes[self._coming[0]].steps[0]):
            subgroup = self._coming.popleft()
            self._start(subgroup, self._begin)
            self._guess(subgroup)

    def _is_free(self, step: Step) -> bool:
        assert step.takes is not None
        return bool(self._free[step.takes])

    def _guess(self, subgroup: int) -> None:
        """Issue what needs no norm, if the gradient is complete and a slot has been taken."""
        recipe = self.recipes[subgroup]
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
            recipe = self.recipes[subgroup]
            slot = recipe.steps[0].takes if recipe.steps[0].early and not recipe.before_norm else None
            if slot is not None and slot.ahead == ahead and left[slot]:
                left[slot] -= 1
                yield subgroup

    def _start(self, subgroup: int, behind: Op | None) -> None:
        waits = [] if behind is None else [behind]
        self.early[subgroup] = 1, self._take(self.recipes[subgroup].steps[0], subgroup, waits)

    def _issue(self, step: Step, subgroup: int, previous: Op | None, norm: Op | None) -> Op:
        waits = [norm] if Wait.NORM in step.waits else []
        if Wait.GRADIENT in step.waits:  # ZeRO-1's first step has none from before
            waits.append(self.home.get(subgroup))
        if Wait.PREVIOUS in step.waits:
            waits.append(previous)
        return self._take(step, subgroup, [op for op in waits if op is not None])

    def _take(self, step: Step, subgroup: int, waits: list[Op]) -> Op:
        """Issue a step. It waits for the op that gave its buffer back, too."""
        if step.takes is not None:
            behind = self._free[step.takes].popleft()
            waits = waits if behind is None else [*waits, behind]
        op = self._add(step, subgroup, waits)
        if step.gives_back is not None:
            self._free[step.gives_back].append(op)
        return op
