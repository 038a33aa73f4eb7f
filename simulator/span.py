"""The data type of an op's start and end. A timeline consists of such spans.

Each span belongs to a lane, a queue of ops that run one after the other, such as a copy direction.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ebbtide.simulator.schedule import Lane, OpKind, op_label


@dataclass(frozen=True, slots=True)
class Span:
    """The start and the end of one op on its lane (such as a copy direction), in seconds from the timeline's origin."""

    kind: OpKind
    lane: Lane
    start_s: float
    end_s: float
    subgroup: int = -1
    layer: int = -1
    iteration: int = 0

    @property
    def label(self) -> str:
        return op_label(self.kind, self.subgroup, self.layer)


def makespan_s(spans: Sequence[Span]) -> float:
    """Return the seconds from the first start to the last end of the given spans (ops of a timeline), or 0 if
    there are none.
    """
    if not spans:
        return 0.0
    return max(s.end_s for s in spans) - min(s.start_s for s in spans)
