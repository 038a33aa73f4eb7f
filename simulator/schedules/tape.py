"""One iteration of the passes as a recording, for an interpreter that adds what a plan decides.

The training loop is run for two iterations without a plan: the second shows each op's waits, for
ops of its own iteration and of the one before. Where a plan's ops belong, there is a marker.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from ebbtide.simulator.schedule import Lane, Op, OpKind
from ebbtide.simulator.schedules.planned_loop import PlannedLoop
from ebbtide.simulator.update.tiers import Memory
from ebbtide.simulator.workload import Workload


class What(IntEnum):
    """What stands at a place of the tape."""

    OP = 0
    GRADIENT = 1  # a subgroup's gradient is reduced, at the op that it waits for
    PREFETCH = 2
    UPDATES = 3
    NEW = 4  # stands for the op after which a subgroup's parameters are new
    END = 5  # and for its last


@dataclass(frozen=True, slots=True)
class Place:
    """One place of the tape.

    Attributes:
        op: None of what is none.
        subgroup: of a gradient.
        added_to: the gradients of earlier micro-batches are there already.
        completes: the gradient is that of the last micro-batch.
        refs: what it waits for: place p as p; behind the places, for each subgroup the op after
            which its parameters are new, and then its last one. A place at or behind this one is of
            the iteration before.
    """

    what: What
    op: Op | None
    refs: tuple[int, ...]
    subgroup: int = -1
    added_to: bool = False
    completes: bool = False


def record(workload: Workload, homes: Sequence[Memory], *, overlaps: bool) -> list[Place]:
    """An iteration's ops that no placement changes.

    Raises:
        ValueError: there are more passes than `TrainingLoop.run` builds.
    """
    loop = _Recorder(workload, homes, overlaps=overlaps)
    loop.run(2)
    return loop.places()


class _Recorder(PlannedLoop):
    def __init__(self, workload: Workload, homes: Sequence[Memory], *, overlaps: bool) -> None:
        super().__init__(workload, homes, overlaps=overlaps)
        self.marks: dict[int, tuple[What, int, int]] = {}

    def gradient_reduced(self, subgroup: int, micro_step: int, after: int) -> None:
        self._mark(What.GRADIENT, [after], subgroup, micro_step)

    def prefetch(self) -> None:
        self._mark(What.PREFETCH, [self.backward_done])

    def updates(self, norm: int) -> tuple[dict[int, int], list[int]]:
        self._mark(What.UPDATES, [norm])
        subgroups = range(len(self.sizes))
        new = {subgroup: self._mark(What.NEW, [], subgroup) for subgroup in subgroups}
        return new, [self._mark(What.END, [], subgroup) for subgroup in subgroups]

    def _mark(self, what: What, after: Sequence[int], subgroup: int = -1, micro_step: int = -1) -> int:
        op = self.out.add(OpKind.NORM, Lane.COMPUTE, 0.0, after=after)
        self.marks[op] = (what, subgroup, micro_step)
        return op

    def places(self) -> list[Place]:
        ops, count = self.out.ops, len(self.out.ops) // 2
        assert [op.kind for op in ops[:count]] == [op.kind for op in ops[count:]]
        stand_ins = (What.NEW, What.END)
        kept = [i for i in range(count) if self._what(i) not in stand_ins]
        place = {i: number for number, i in enumerate(kept)}
        behind = {What.NEW: len(kept), What.END: len(kept) + len(self.sizes)}

        def ref(before: int) -> int:
            what, subgroup, _ = self.marks.get(before, (What.OP, -1, -1))
            return behind[what] + subgroup if what in behind else place[before % count]

        result = []
        for number, i in enumerate(kept):
            op = ops[count + i]
            # The interpreter remembers each place's latest op.
            assert all(place.get(b, number) >= number for b in op.after if b < count)
            what, subgroup, micro_step = self.marks.get(count + i, (What.OP, -1, -1))
            refs = tuple(ref(b) for b in op.after)
            shown, completes = op if what is What.OP else None, micro_step == self.boundary
            result.append(Place(what, shown, refs, subgroup, micro_step > 0, completes))
        return result

    def _what(self, op: int) -> What:
        return self.marks[op][0] if op in self.marks else What.OP
