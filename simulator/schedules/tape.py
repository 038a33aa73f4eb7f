"""The recording of those ops of a training iteration that do not depend on a plan.

The recording is a list of ops and markers. A marker stands at each place where the ops of a plan must be inserted. So
a simulator can build the schedule of any plan without running the training loop again.

To make the recording, the simulated training loop runs for two iterations. The second iteration shows which ops each
of its ops waits for, in the same iteration and in the previous one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

from ebbtide.simulator.schedule import Lane, Memory, Op, OpKind
from ebbtide.simulator.schedules.loop import check_passes
from ebbtide.simulator.schedules.planned_loop import Part, PlannedLoop
from ebbtide.simulator.workload import Workload

RECORDED = 3  # micro-batches that are recorded: the first one, one that may stand for several, and the last one


class What(IntEnum):
    """The kind of an entry in a recorded training iteration: an op, or a marker.

    A marker stands at a place where the ops of a plan must be inserted.
    """

    OP = 0
    GRADIENT = 1  # marks that a part of a subgroup's gradient is reduced, after the op that the marker waits for
    PREFETCH = 2
    UPDATES = 3


@dataclass(frozen=True, slots=True)
class Place:
    """An entry of a recorded training iteration: an op, or a marker that stands for ops which depend on the plan.

    Attributes:
        op: Op of the entry. None for markers.
        added_to: True if gradients of earlier micro-batches are already in host memory.
        boundary: True in the last micro-batch.
        refs: What this entry waits for, as numbers r. If this entry is number i of n entries, and the plan has m
            subgroups, r means:

            - r < i: entry r of the same iteration.
            - i <= r < n: entry r of the previous iteration.
            - n <= r < n + m: the op after which subgroup r - n has new parameters.
            - n + m <= r: the last op of the update of subgroup r - n - m.
    """

    what: What
    op: Op | None
    refs: tuple[int, ...]
    part: Part | None = None
    added_to: bool = False
    boundary: bool = False


@dataclass(frozen=True)
class Tape:
    """A recording of a training iteration. One recorded micro-batch may represent several equal ones.

    Attributes:
        first, last: The entries ``places[first:last]`` are those of the micro-batch that represents several.
    """

    places: Sequence[Place]
    first: int = 0
    last: int = 0
    times: int = 1


def record(workload: Workload, locations: Sequence[Memory], *, overlaps: bool) -> Tape:
    """Record one training iteration as a list of ops, with markers in place of the ops that depend on a plan.

    Only the first micro-batch of a step and its last one differ from the others. So at most `RECORDED` micro-batches
    are recorded, and the second one stands for all that are left out.

    Raises:
        ValueError: The workload has more forward and backward passes of layers than `TrainingLoop.run` can simulate.
    """
    micro = workload.gradient_accumulation_steps
    check_passes(workload, 2)
    few = workload if micro <= RECORDED else workload.model_copy(update={"gradient_accumulation_steps": RECORDED})
    loop = _Recorder(few, locations, overlaps=overlaps)
    loop.run(2)
    return Tape(loop.places(), *loop.repeated(), 1 + micro - few.gradient_accumulation_steps)


class _Recorder(PlannedLoop):
    """A simulated training loop that records its ops, so that the schedule of any plan can be built from them.

    The recording has a marker wherever ops depend on the plan.
    """

    def __init__(self, workload: Workload, locations: Sequence[Memory], *, overlaps: bool) -> None:
        super().__init__(workload, locations, overlaps=overlaps)
        self.marks: dict[int, Place] = {}  # markers without their refs
        self.stand_ins: dict[int, int] = {}  # op -> its number after those of the places
        self.begun: list[int] = []  # the number of the first op of each micro-batch

    def forward(self, micro_step: int) -> None:
        self.begun.append(len(self.out.ops))
        super().forward(micro_step)

    def repeated(self) -> tuple[int, int]:
        last = self.boundary
        return self.begun[max(0, last - 1)], self.begun[last]

    def gradient_reduced(self, part: Part, micro_step: int, after: int) -> None:
        added_to, boundary = micro_step > 0, micro_step == self.boundary
        self._mark(Place(What.GRADIENT, None, (), part, added_to, boundary), after)

    def prefetch(self) -> None:
        self._mark(Place(What.PREFETCH, None, ()), self.backward_done)

    def updates(self, norm: int) -> tuple[dict[int, int], list[int]]:
        self._mark(Place(What.UPDATES, None, ()), norm)
        count = len(self.sizes)
        new, ends = ([self._stand_in(first + s) for s in range(count)] for first in (0, count))
        return dict(enumerate(new)), ends

    def _mark(self, mark: Place, after: int) -> None:
        self.marks[self.out.add(OpKind.NORM, Lane.COMPUTE, 0.0, after=[after])] = mark

    def _stand_in(self, number: int) -> int:
        op = self.out.add(OpKind.NORM, Lane.COMPUTE, 0.0)
        self.stand_ins[op] = number
        return op

    def places(self) -> list[Place]:
        ops, count = self.out.ops, len(self.out.ops) // 2
        assert [op.kind for op in ops[:count]] == [op.kind for op in ops[count:]]
        own = [i for i in range(count) if i not in self.stand_ins]
        numbers = {i: number for number, i in enumerate(own)}
        numbers |= {i: len(own) + number for i, number in self.stand_ins.items() if i < count}
        # The numbers by which other ops refer to an op, by the op's id.
        refs_of = [numbers[i] for i in range(count)] * 2
        result = []
        for number, i in enumerate(own):
            op = ops[count + i]
            refs = tuple([refs_of[before] for before in op.after])
            # The engine that replays the recording keeps only the latest op of each place.
            assert all(ref >= number for ref, before in zip(refs, op.after, strict=True) if before < count)
            mark = self.marks.get(count + i)
            result.append(Place(What.OP, op, refs) if mark is None else replace(mark, refs=refs))
        return result
