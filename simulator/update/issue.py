"""The state machine that decides which op of the optimizer's updates is issued next, in simulation and training.

The builder of simulated schedules and the runtime's executor report events to it: a gradient is complete,
or the gradient norm is known. The machine then calls their function ``add`` for each op. The builder
appends the op to a schedule, and the executor submits it to run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

from ebbtide.simulator.update.recipes import Recipe, early_limits
from ebbtide.simulator.update.steps import Slot, Step, Wait

Op = TypeVar("Op")  # number of an op, or its completion
Add = Callable[[Step, int, list[Op]], Op]


class _Buffer(NamedTuple, Generic[Op]):
    """A buffer in GPU or host memory for the update of one subgroup at a time.

    Attributes:
        turn: Position of the buffer's latest release among the releases of all buffers, counted from 1. It shows which
            of two buffers was released later. 0: the buffer was never used.
        behind: Op that frees the buffer when it ends. None: the buffer was never used.
    """

    number: int
    turn: int
    behind: Op | None


class Issue(Generic[Op]):
    """The state machine that issues the ops of all subgroups' updates in order, and assigns buffers to subgroups.

    Buffers are reused in the order in which the ops that free them were issued. So the sequence of ops does not depend
    on how long any op takes. The same events give the same ops in the simulator and in the runtime.

    Attributes:
        early: Dict from a subgroup to a pair: the number of ops of its update that were issued before the gradient norm
            was known, and the last one of these ops.
        holds: Dict from a pair (kind of buffer, subgroup) to the number of the buffer that this subgroup uses.
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
        """Set up the state machine for training under a plan: no op of an update is issued, and all buffers are free.

        Args:
            recipes: For each subgroup, the recipe (sequence of ops) of its update under the plan.
            order: Order of the updates after the gradient norm is known.
            arrival: Order in which subgroups' gradients become complete.
            prefetch: Number of subgroups whose state may be copied to the GPU before the gradient norm is known. Early
                updates are not counted.
            add: Function that issues an op of a subgroup after given ops, and returns the new op.
            arrived: Function that returns the ops that bring a subgroup's gradient to the memory from which the update
                reads it.
            redo: For each subgroup, the recipe of its update after the gradient norm. It is used in steps that allow no
                early updates, and to redo an early update that was dropped because the step clipped or overflowed. If
                ``redo`` is empty, ``recipes`` are used.
        """
        self.recipes, self.order, self.arrival = recipes, order, arrival
        self.redo = redo or recipes
        self.limits, self._add, self._arrived = early_limits(prefetch, slots), add, arrived
        self.early: dict[int, tuple[int, Op]] = {}
        self.holds: dict[tuple[Slot, int], int] = {}
        self._now = recipes  # recipes of the present step: `redo` if no update is early
        self._free = {slot: deque(_Buffer[Op](n, 0, None) for n in range(count)) for slot, count in slots.items()}
        self._turn = 0  # number of times that a slot was given back so far
        # For each subgroup and kind of slot, the buffer that it gave back last.
        self._left: dict[tuple[Slot, int], _Buffer[Op]] = {}
        self._begin: Op | None = None  # early copies to the GPU wait for this op
        self._in_backward = False
        self._complete: set[int] = set()
        self._coming: deque[int] = deque()

    def ahead(self, behind: Op | None = None) -> None:
        """Issue those ops of the next optimizer step's updates that may start before its backward, such as reads from
        drives.
        """
        for subgroup in self._first(ahead=True):
            self._start(subgroup, behind)

    def backward(self, behind: Op | None, *, early: bool = True) -> None:
        """Start to copy optimizer state to the GPU for the updates there, before the gradient norm is known.

        Call this method as soon as the first gradient of the last micro-batch is complete. Further calls in the same
        step do nothing. Subgroups that are updated before the norm come first. State that a skipped step has left in
        its staging buffer is not copied again.

        Args:
            early: False if all updates of this step wait for the gradient norm.
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
        """Record that a subgroup's gradient of this step is complete, and start its early update if it has one."""
        self._complete.add(subgroup)
        self._update_early(subgroup)
        self.come_in()

    def drop(self, subgroup: int) -> None:
        """Discard a subgroup's early update because the step clips or overflows, so that its result is not usable.

        The update is issued again after the gradient norm is known.
        """
        self._complete.discard(subgroup)
        before = self._now[subgroup].before_norm
        if before and self.early.get(subgroup, (0,))[0] == before:
            del self.early[subgroup]

    def norm(self, op: Op) -> tuple[dict[int, Op], list[Op]]:
        """Issue all remaining ops of an optimizer step's updates, because the gradient norm is known.

        Returns:
            A dict from each subgroup to the op after which its updated parameters are ready, and a list with the last
            op of each subgroup's update, in the order of the updates.
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
        """End an optimizer step that updates nothing, such as after an overflow."""
        for subgroup in list(self.early):
            self.drop(subgroup)
        self._end()

    def come_in(self) -> None:
        """Issue the next copies of state to the GPU for updates there, until no staging buffer is free."""
        while self._coming and self._is_free(self._now[self._coming[0]].steps[0]):
            subgroup = self._coming.popleft()
            self._start(subgroup, self._begin)
            self._update_early(subgroup)

    def _end(self) -> None:
        self._in_backward, self._now = False, self.recipes
        self._complete.clear()
        self._coming.clear()

    def _updated(self, late: set[int]) -> list[int]:
        # Usually this is the plan's order. If a subgroup in ``late`` needs a staging buffer, the subgroups that already
        # hold a staging buffer come first, because their updates free the buffers.
        if not any(self.redo[s].steps[0].takes == Slot.STAGING for s in late):
            return [*self.order]
        held = [s for s in self.order if (Slot.STAGING, s) in self.holds]
        return [*held, *(s for s in self.order if s not in held)]

    def _is_free(self, step: Step) -> bool:
        assert step.takes is not None
        return bool(self._free[step.takes])

    def _update_early(self, subgroup: int) -> None:
        recipe = self._now[subgroup]
        begun, previous = self.early.get(subgroup, (0, None))
        if subgroup not in self._complete or not (begun or recipe.steps[0].takes is None):
            return
        for step in recipe.steps[begun : recipe.before_norm]:
            previous = self._issue(step, subgroup, previous, None)
            begun += 1
            self.early[subgroup] = begun, previous

    def _first(self, *, ahead: bool) -> Iterator[int]:
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
        # If the op needs a buffer, it waits for the op that freed the buffer. An op that copies state to the GPU also
        # waits until the latest copy of this state back to the host has ended. A free buffer is not enough if the step
        # clips: the subgroup's early update is dropped, and its state is copied to the GPU a second time in the step.
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
