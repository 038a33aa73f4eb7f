"""Arrays of ops, from which compiled code builds the schedules of plans.

One group of ops comes from a recorded training iteration: these ops do not depend on the plan. The other ops come from
recipes. A recipe is the sequence of ops for one way of updating a subgroup. The code that reads the arrays is compiled
by numba.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self, get_args

import numpy as np
from ebbtide.simulator.engines import kernel
from ebbtide.simulator.engines.jit import compiled
from ebbtide.simulator.engines.kernel import Floats, Ints
from ebbtide.simulator.engines.repeating import repeat
from ebbtide.simulator.quantity import THREADED, RateName
from ebbtide.simulator.schedule import Op, OpKind
from ebbtide.simulator.schedules.planned_loop import Part
from ebbtide.simulator.schedules.tape import Tape
from ebbtide.simulator.update.steps import Bytes, Slot, Step, unfused
from ebbtide.simulator.update.way import EARLY, PARAMETERS_ON_HOST, SUMMED, ways
from ebbtide.simulator.workload import Workload

SLOTS = list(Slot)
RATES: tuple[RateName, ...] = get_args(RateName)
_RATE_NUMBERS = {rate: number for number, rate in enumerate(RATES)}
HOST_UPDATES = [RATES.index(name) for name in THREADED]

_PASSES = {kernel.KIND_NUMBERS[OpKind.FORWARD]: "forward_s", kernel.KIND_NUMBERS[OpKind.BACKWARD]: "backward_s"}
_NO_PART = Part(-1, -1, 0, last=False)

# Columns of a recipe's step (after the columns of an op), of a placement, and of an entry of the recorded iteration.
T_WAITS, T_TAKES, T_GIVES, T_EARLY, T_PUBLISHES = range(kernel.OP_COLUMNS, kernel.OP_COLUMNS + 5)
W_FIRST, W_BEFORE, W_LAST, W_GRADIENT_FIRST, W_GRADIENT_LAST = range(5)
X_WHAT, X_SUBGROUP, X_PART, X_ELEMENTS, X_LAST, X_ADDED_TO, X_BOUNDARY, X_REFS = range(8)
X_COLUMNS = 8
# Positions in the vector of the plan: from P_SLOTS on the number of buffers of each kind, then how many of them may be
# taken early, in backward and from the previous step on.
P_ITERATIONS, P_SLOTS = range(2)
P_EARLY = P_SLOTS + len(SLOTS)
P_AHEAD = P_EARLY + len(SLOTS)


@dataclass(frozen=True)
class RecipeArrays:
    """The ops of a subgroup's gradient and update as arrays, for one workload and every way of updating.

    Attributes:
        rows: One row for each op: shape (ops, OP_COLUMNS + 5). The first columns are those of a schedule's ops, with
            WORK and DRAM per parameter. The last five columns (T_WAITS to T_PUBLISHES) hold attributes of the op's
            `Step`: the events that the op waits for, the kind of buffer that it fills, the kind of buffer that it
            frees, whether it may run early, and whether a forward may read the new parameters after it.
        ways: One row for each way of updating, at the index `Way.code`. The row has five columns with positions in
            ``rows``, which are the ends of three ranges of ops. The range from column W_FIRST to column W_BEFORE has
            the update's ops before the gradient norm. W_BEFORE to W_LAST has the update's ops after the norm.
            W_GRADIENT_FIRST to W_GRADIENT_LAST has the gradient's ops.
        threaded: Positions in ``rows`` of the ops that run on the plan's CPU threads.
    """

    rows: Floats
    ways: Ints
    threaded: Ints
    by_threads: dict[int, Floats] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, workload: Workload, *, fused: bool = True) -> Self:
        """Return the ops of every way of updating a subgroup of a workload, as arrays.

        Args:
            fused: False for DeepSpeed's separate CPU passes instead of ebbtide's fused kernel.
        """
        amounts, once = Bytes.of(workload), workload.adds_on_device
        steps: list[Step] = []
        table = np.zeros((2 * PARAMETERS_ON_HOST, 5), np.int64)
        for way in ways():
            recipe = way._replace(sum_on_device=once or way.sum_on_device).recipe
            first, middle = len(steps), len(steps) + len(recipe.steps)
            gradient_last = middle + len(recipe.gradient_steps)
            table[way.code] = first, first + recipe.before_norm, middle, middle, gradient_last
            updates = recipe.steps if fused else map(unfused, recipe.steps)
            steps += [*updates, *recipe.gradient_steps]
        return cls(
            rows=np.array([[*_row(step, step.work(amounts), step.dram(amounts)), *_waits(step)] for step in steps]),
            ways=table,
            threaded=np.flatnonzero([step.threads for step in steps]).astype(np.int64),
        )

    def with_threads(self, threads: int) -> Floats:
        """Return a copy of the array ``rows`` for plans with a given number of CPU threads.

        The array describes the ops for the gradients and updates of subgroups, one op in each row. In the copy, the ops
        that run on CPU threads use this number of CPU cores. The compiled code that builds schedules reads the copy.

        Args:
            threads: Number of CPU threads of the updates. 0: all cores.
        """
        rows = self.by_threads.get(threads)
        if rows is None:
            rows = self.by_threads[threads] = self.rows.copy()
            rows[self.threaded, kernel.CORES] = threads or np.inf
        return rows


def _row(op: Step | Op, work: float, dram_bytes: float) -> list[float]:
    row = [0.0] * kernel.OP_COLUMNS
    row[kernel.LANE], row[kernel.KIND] = kernel.LANE_NUMBERS[op.lane], kernel.KIND_NUMBERS[op.kind]
    row[kernel.RATE], row[kernel.DEVICE_SHARE] = _RATE_NUMBERS[op.rate], op.device_share
    row[kernel.WORK], row[kernel.DRAM] = work, dram_bytes
    return row


def _op_row(op: Op) -> list[float]:
    row = _row(op, op.work, op.dram_bytes)
    row[kernel.DEVICE_ALLOC], row[kernel.DEVICE_FREE] = op.device_alloc_bytes, op.device_free_bytes
    return row


def _waits(step: Step) -> list[int]:
    slots = [-1 if slot is None else SLOTS.index(slot) for slot in (step.takes, step.gives_back)]
    return [int(step.waits), *slots, int(step.early), int(step.publishes)]


class Program(NamedTuple):
    """A simulated training iteration, recorded as arrays from which the schedule of any plan can be built.

    An entry of the recording is an op that does not depend on the plan, or a marker at which ops of the plan are
    inserted. Some markers stand for a part of a gradient: one layer's contribution to one subgroup's gradient.

    Attributes:
        places: One row for each entry, and a last row for the end: shape (entries + 1, X_COLUMNS). A row has the
            entry's kind, the part of a gradient if the entry is a marker for one, and the index in ``refs`` at which
            the entry's dependencies begin.
        refs: Dependencies of all entries, one entry after the other. A number in this array stands for an entry or for
            an op of a subgroup's update, see `Place.refs`.
        rows: Ops of the entries: shape (entries, OP_COLUMNS). The row of a marker contains only zeros.
        layers: Layer of each entry. -1 for markers and for ops of no layer.
    """

    places: Ints
    refs: Ints
    rows: Floats
    parts: int
    layers: Ints

    @classmethod
    def of(cls, tape: Tape) -> Self:
        parts_of = [place.part or _NO_PART for place in tape.places]
        places = np.zeros((len(tape.places) + 1, X_COLUMNS), np.int64)
        places[:-1, :X_REFS] = [
            (place.what, part.subgroup, part.number, part.elements, part.last, place.added_to, place.boundary)
            for place, part in zip(tape.places, parts_of, strict=True)
        ]
        places[1:, X_REFS] = np.cumsum([len(place.refs) for place in tape.places])
        rows = np.zeros((len(tape.places), kernel.OP_COLUMNS))
        ops = {number: place.op for number, place in enumerate(tape.places) if place.op is not None}
        rows[[*ops]] = [_op_row(op) for op in ops.values()]
        refs = np.array([ref for place in tape.places for ref in place.refs], dtype=np.int64)
        parts = 1 + max((part.number for part in parts_of), default=-1)
        layers = np.array([-1 if place.op is None else place.op.layer for place in tape.places], dtype=np.int64)
        once = cls(places, refs, rows, parts, layers)
        return once if tape.times == 1 else once._repeating(tape.first, tape.last, tape.times)

    def _repeating(self, first: int, last: int, times: int) -> Self:
        made = repeat(self.places[:, X_REFS], self.refs, first, last, times)
        places = np.zeros((made.of.size + 1, X_COLUMNS), np.int64)
        places[:-1] = self.places[made.of]
        places[:, X_REFS] = made.after_first
        return self._replace(places=places, refs=made.after, rows=self.rows[made.of], layers=self.layers[made.of])

    def paced(self, workload: Workload) -> Self:
        """Return a copy of the recording with the times of a workload's layers."""
        rows = self.rows.copy()
        for kind, name in _PASSES.items():
            times = np.array([getattr(layer, name) for layer in workload.layers])
            own = (rows[:, kernel.KIND] == kind) & (self.layers >= 0)
            rows[own, kernel.WORK] = times[self.layers[own]]
        return self._replace(rows=rows)


@compiled
def totals(placement: Any, sizes: Floats, kinds: int) -> tuple[Floats, float]:
    """Count a plan's subgroups and their elements, for each combination of placement and parameter location.

    Returns:
        Two results. The first is an array of shape (2, 3, combinations). First index: 0 for subgroups that wait for the
        gradient norm, 1 for early updates. Second index: 0 for the number of subgroups, 1 for their total number of
        elements, 2 for the elements of the largest subgroup. The combinations are in the order of `plain_ways`. The
        second result is the number of elements of all subgroups that accumulate their gradients on the GPU.
    """
    both, summed = np.zeros((2, 3, kinds)), 0.0
    for s in range(sizes.size):
        code = placement[s]
        updated_early = (code // EARLY) % 2
        code -= updated_early * EARLY
        sums = (code // SUMMED) % 2
        code -= sums * SUMMED
        summed += sums * sizes[s]
        result = both[updated_early]
        if code >= PARAMETERS_ON_HOST:
            code = code - PARAMETERS_ON_HOST + kinds // 2
        result[0, code] += 1
        result[1, code] += sizes[s]
        result[2, code] = max(result[2, code], sizes[s])
    return both, summed
