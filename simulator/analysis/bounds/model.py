"""Facts about a workload on a machine from which the lower bound of an iteration's time is computed.

They hold for every plan. The bound is a linear program that minimizes one part of the iteration, the
*window*: from the gradient norm to the end of the next forward (of its first micro-batch). Only there can
updates overlap a forward. The other passes follow one another on the GPU.
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
    """The subgroups for which an op of the update (such as a copy) must run in the lower bound's time window.

    The window begins when the gradient norm is known, and ends with the next forward.
    """

    ALL = "all"
    TAKERS = "of those that begin behind the slots' first visitors, at the norm or before"
    GIVERS = "of those whose slot is taken again"
    NONE = "none"


@dataclass(frozen=True, eq=False)
class Part:
    """A step of a subgroup's update, such as a copy, with its least duration, for the lower bound.

    Arrays have one entry for each group of similar subgroups. It is the value for one subgroup of the group.

    Attributes:
        way: Number of the way of updating (placement, parameter location, flags) to which the step belongs.
        times: Number of runs of the step in an iteration.
        slot: Kind of buffer, such as a staging buffer, that the update uses.
        seconds, alone_s, taken_s: See `Least`. ``taken_s`` is by shared capacity, such as DRAM bandwidth.
        least_s: Seconds of the step for the group's smallest subgroup.
        head_s: Least time in seconds from the gradient norm to the start of the step.
        tail_s: Least seconds from the end of the step until the new parameters are in GPU memory. If the step
            frees a buffer, these are the parameters of the subgroup that uses the buffer next.
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
        """Return True if the op's kind of buffer may be taken for the next optimizer step as soon as it is free."""
        return self.slot is not None and self.slot.ahead


class Model:
    """The facts about a workload on a machine that the lower bound of an iteration's time is computed from.

    Attributes:
        ways: Ways in which subgroups may be updated: placement, parameter location, and whether the update is
            early or gradients are accumulated on the GPU.
        parts: Steps of a subgroup's update, for each way.
        gradients: Steps that copy gradients to host memory, for each way.
        rest_s: Seconds of an iteration outside the time from the gradient norm to the end of the next forward.
        first_s: Seconds of backward until the first gradient is complete.
        early_s: Seconds of the last backward during which state may be copied to the GPU for updates there.
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
        """Collect the facts about a workload on a machine for a lower bound of the iteration time.

        Args:
            ways: Ways in which a subgroup may be updated: placement of its state, and location of its parameters.
            most_pieces: Largest number of blocks of neighboring subgroups, see `Pieces.of`.
            locations: Memory that holds each subgroup's parameters. Empty: host or GPU memory.
            early_updates: If True, subgroups may also be updated before the gradient norm is known. Each way whose
                placement allows such updates is added once more.
            sums: If True, gradients may also be accumulated on the GPU. Each way whose placement allows this
                accumulation is added once more.
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
        """Return the elements of the smallest subgroup to which the lower bound's rules about bandwidth apply.

        These rules (`Sharing`) leave out smaller subgroups, because their copies take little more than their latency
        and share no bandwidth.
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
        """Return the step of a subgroup's update that takes the buffer which the given later step uses."""
        same = (p for p in self.parts if p.way == part.way)
        return next(p for p in same if p.step.takes is not None and p.step.takes == part.slot)

    def on(self, lane: Lane) -> list[Part]:
        """Return the steps of updates that run on a lane between the gradient norm and the end of the next forward.

        A lane is a queue of ops that run one after the other, such as a copy direction.
        """
        return [p for p in self.parts if p.step.lane == lane and p.inside != Inside.NONE]

    @property
    def lanes(self) -> list[Lane]:
        """Return the lanes (such as copy directions) that run steps of updates after the gradient norm."""
        return list(dict.fromkeys(p.step.lane for p in self.parts if p.inside != Inside.NONE))

    @cached_property
    def modes(self) -> list[Modes]:
        """Return the possible combinations of speeds of the lanes that run updates and of the GPU's compute.

        A lane is a queue of ops, such as a copy direction. Lanes slow each other because they share the node.
        """
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
    """Return the positions of the ops in a subgroup's update that take and free its buffer, or -1 for both.

    Only a buffer counts that is taken before the gradient norm, or freed after the parameters are new.
    """
    new = next(i for i, step in enumerate(recipe.steps) if step.publishes)
    for takes, step in enumerate(recipe.steps):
        if step.takes is not None:
            gives = next(i for i, s in enumerate(recipe.steps) if s.gives_back == step.takes)
            if step.early or gives > new:
                return takes, gives
    return -1, -1
