"""Facts for the lower bound that hold for every plan of one workload on one machine.

The *window* is the time from the gradient norm until the next forward (of its first micro-batch) has
ended. The rest of an iteration is sequential on the device. The linear program minimizes the window's
length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

import numpy as np
from ebbtide.simulator.analysis.bounds.modes import Modes, modes
from ebbtide.simulator.analysis.bounds.pieces import Pieces
from ebbtide.simulator.analysis.bounds.work import Work
from ebbtide.simulator.engines.reference import alone_s
from ebbtide.simulator.machine import Machine
from ebbtide.simulator.schedule import Lane, Op, OpKind
from ebbtide.simulator.update.recipes import Recipe, Slot, Step, Wait
from ebbtide.simulator.update.tiers import Memory
from ebbtide.simulator.update.way import Way
from ebbtide.simulator.workload import Workload
from numpy.typing import NDArray

Floats = NDArray[np.float64]
TINY = 0.5  # times the median


class Inside(Enum):
    """The subgroups with a step that must run between the gradient norm and the end of the next forward."""

    ALL = "all"
    TAKERS = "of those that begin behind the slots' first visitors, at the norm or before"
    GIVERS = "of those whose slot is taken again"
    NONE = "none"


@dataclass(frozen=True, eq=False)
class Part:
    """A step of a subgroup's update, with its least work for each group of similar subgroups.

    Arrays have one entry for each group, for one subgroup of it.

    Attributes:
        way: Number of the way of updating.
        times: Number of runs of the step in an iteration.
        slot: Kind of buffer, for TAKERS and GIVERS.
        seconds, alone_s, taken_s: See `Least`. ``taken_s`` is by capacity.
        least_s: Seconds for the group's smallest subgroup.
        head_s: Lower limit of the seconds from the gradient norm to the step: the duration of the steps
            before it. For TAKERS, which follow another subgroup's update and copy back, the duration of
            these.
        tail_s: Seconds from the step's end until its subgroup's parameters are new. For GIVERS, whose buffer
            another subgroup takes, until that subgroup's are.
    """

    way: int
    step: Step
    inside: Inside
    times: int
    slot: Slot | None
    seconds: Floats
    least_s: Floats
    alone_s: Floats
    taken_s: dict[str, Floats]
    head_s: Floats
    tail_s: Floats

    @property
    def ahead(self) -> bool:
        """Return whether a step's early copies can already run during the previous optimizer step."""
        return self.slot is not None and self.slot.ahead


class Model:
    """The facts about a workload's passes, groups of subgroups and steps that the lower bound uses.

    Attributes:
        ways: Ways in which subgroups may be updated: placement, parameter location, and whether the update is
            early or gradients are accumulated on the GPU.
        parts: Steps of updates.
        gradients: Steps that bring gradients to the host.
        rest_s: Seconds of an iteration without its window.
        first_s: Seconds of backward until the first gradient is complete.
        early_s: Seconds of the last backward during which staged subgroups may be copied to the GPU.
    """

    def __init__(
        self,
        workload: Workload,
        machine: Machine,
        ways: Sequence[Way],
        most_pieces: int,
        locations: Sequence[Memory] = (),
        *,
        early_updates: bool = False,
        sums: bool = False,
    ) -> None:
        """Collect the facts about a workload on a machine for a lower bound.

        Args:
            early_updates: True if ``ways`` that allow it may begin before the gradient norm. These are listed
                once more, after the others.
            sums: True if gradients may be accumulated on the GPU. Such ways are listed once more, at the end.
        """
        self.workload = w = workload.serial
        some = [*ways, *(way._replace(early=True) for way in ways if early_updates and way.can_be_early)]
        some += [way._replace(sum_on_device=True) for way in some if sums and way.can_sum_on_device]
        self.machine, self.ways = machine, tuple(some)
        self.work, self.pieces = Work(w, machine), Pieces.of(w, most_pieces, locations)
        self.largest = max(w.subgroups)
        self.micro = w.gradient_accumulation_steps
        backward = np.array([layer.backward_s for layer in w.layers])
        self.forward_s = w.forward_s / self.micro
        self.rest_s = w.backward_s + w.forward_s - self.forward_s
        self.first_s, self.early_s = float(backward[-1]), float(backward[:-1].sum())
        self.recipes = tuple(way.recipe for way in some)
        self.parts = [p for n, r in enumerate(self.recipes) for p in self._parts(n, r)]
        self.gradients = [
            self._part(n, step, times=self._times(step))
            for n, recipe in enumerate(self.recipes)
            for step in recipe.gradient_steps
        ]

    @cached_property
    def least_size(self) -> int:
        """Return the smallest number of elements of a subgroup that counts for shared lanes.

        The ops of smaller subgroups consist of latency, and share nothing.
        """
        sizes = sorted(self.workload.subgroups)
        return min(n for n in sizes if n >= TINY * sizes[len(sizes) // 2])

    def _times(self, step: Step) -> int:
        return 1 if Wait.LAST in step.waits else self.micro - (Wait.SUM in step.waits)

    def _parts(self, way: int, recipe: Recipe) -> list[Part]:
        steps = recipe.steps
        new = next(i for i, step in enumerate(steps) if step.publishes)
        takes, gives = slot_steps(recipe)
        begin = takes + 1 if takes >= 0 and steps[takes].early else 0  # what follows the norm
        begin = recipe.before_norm or begin  # as backward goes on
        seconds = np.array([self._part(way, step).least_s for step in steps])

        def between(first: int, last: int) -> Floats:
            total: Floats = seconds[first:last].sum(axis=0)
            return total

        parts = []
        for i, step in enumerate(steps):
            if i < recipe.before_norm:
                inside, head, tail = Inside.NONE, between(i, i), between(i + 1, new + 1)
            elif i < begin:
                inside, head, tail = (Inside.TAKERS, between(begin, gives + 1), between(i + 1, new + 1))
            elif i <= new:
                inside, head, tail = Inside.ALL, between(begin, i), between(i + 1, new + 1)
            elif i <= gives and not recipe.before_norm:
                inside, head = Inside.GIVERS, between(begin, i)
                tail = between(takes, new + 1)
            else:
                inside, head, tail = Inside.NONE, between(begin, i), between(i, i)
            # EarlyUpdates take slots in backward, of which nothing is said.
            slot = steps[takes].takes if takes >= 0 and not recipe.before_norm else None
            parts.append(self._part(way, step, inside, head, tail, slot=slot))
        return parts

    def _part(
        self,
        way: int,
        step: Step,
        inside: Inside = Inside.NONE,
        head_s: Floats | None = None,
        tail_s: Floats | None = None,
        *,
        times: int = 1,
        slot: Slot | None = None,
    ) -> Part:
        least = [self.work.least(step, int(size)) for size in self.pieces.size]
        nothing = np.zeros(len(least))
        return Part(
            way,
            step,
            inside,
            times,
            slot,
            np.array([each.seconds for each in least]),
            np.array([self.work.least(step, int(size)).seconds for size in self.pieces.least]),
            np.array([each.alone_s for each in least]),
            {name: np.array([each.taken_s[name] for each in least]) for name in self.work.limits},
            nothing if head_s is None else head_s,
            nothing if tail_s is None else tail_s,
        )

    def taker(self, part: Part) -> Part:
        """Return the step of an update that takes the buffer that a given later step uses."""
        same = (p for p in self.parts if p.way == part.way)
        return next(p for p in same if p.step.takes is not None and p.step.takes == part.slot)

    def on(self, lane: Lane) -> list[Part]:
        """Return the steps that a lane must run between the gradient norm and the end of the next forward."""
        return [p for p in self.parts if p.step.lane == lane and p.inside != Inside.NONE]

    @property
    def lanes(self) -> list[Lane]:
        """Return the lanes that run steps of updates after the gradient norm."""
        return list(dict.fromkeys(p.step.lane for p in self.parts if p.inside != Inside.NONE))

    @cached_property
    def modes(self) -> list[Modes]:
        """Return the possible speeds at which the lanes of updates and the device's compute share the node."""
        sizes = sorted({self.least_size, max(self.workload.subgroups)})
        ops: dict[Lane, list[Op]] = {Lane.COMPUTE: [Op(0, OpKind.FORWARD, Lane.COMPUTE, 1.0, device_share=1.0)]}
        updates = (p for p in self.parts if p.inside != Inside.NONE)
        for part in [*updates, *self.gradients]:
            lane, step = part.step.lane, part.step
            if lane in self.lanes:
                some = [
                    op
                    for n in (sizes[-1:] if step.threads else sizes)
                    for op in self.work.ops(step, n)
                    if alone_s(op, self.machine)
                ]
                ops[lane] = [*ops.get(lane, []), *some]
        for lane, some in ops.items():
            if not some[0].cores:
                some.sort(key=lambda op: op.work)
                ops[lane] = some[:: max(1, len(some) - 1)]
        return modes({lane: some for lane, some in ops.items() if some}, self.machine, self.work.limits)


def slot_steps(recipe: Recipe) -> tuple[int, int]:
    """Return the positions of the ops in a subgroup's update that take and free a buffer, or -1.

    Only buffers count that are freed after the parameters are new, or that are taken early.
    """
    new = next(i for i, step in enumerate(recipe.steps) if step.publishes)
    for takes, step in enumerate(recipe.steps):
        if step.takes is not None:
            gives = next(i for i, s in enumerate(recipe.steps) if s.gives_back == step.takes)
            if step.early or gives > new:
                return takes, gives
    return -1, -1
