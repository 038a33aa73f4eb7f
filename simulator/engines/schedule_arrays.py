"""The builder of a plan's schedule as arrays, compiled by numba.

It writes the same ops as `ebbtide.simulator.schedules.ebbtide`, but into the arrays that
`ebbtide.simulator.engines.kernel` simulates, without `Op` objects. The ops of forward and backward come from
a recorded iteration (`ebbtide.simulator.schedules.ebbtide`). The ops of gradients and updates come from recipes,
the op sequences for each way of updating a subgroup.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self, get_args

import numpy as np
from ebbtide.simulator.engines import kernel
from ebbtide.simulator.engines.jit import compiled, uncounted
from ebbtide.simulator.engines.kernel import Floats, Ints
from ebbtide.simulator.engines.repeating import repeat
from ebbtide.simulator.quantity import THREADED, RateName
from ebbtide.simulator.schedule import Op, OpKind
from ebbtide.simulator.schedules.ebbtide import GradientPart, Tape, What
from ebbtide.simulator.update.holding import GRADIENTS_UNDER_WAY_BYTES
from ebbtide.simulator.update.steps import Bytes, Slot, Step, Wait, unfused
from ebbtide.simulator.update.way import EARLY, PARAMETERS_ON_HOST, SUMMED, ways
from ebbtide.simulator.workload import Workload

SLOTS = list(Slot)
RATES: tuple[RateName, ...] = get_args(RateName)
_RATE_NUMBERS = {rate: number for number, rate in enumerate(RATES)}
HOST_UPDATES = [RATES.index(name) for name in THREADED]

_PASSES = {kernel.KIND_NUMBERS[OpKind.FORWARD]: "forward_s", kernel.KIND_NUMBERS[OpKind.BACKWARD]: "backward_s"}
_NO_PART = GradientPart(-1, -1, 0, last=False)

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
        """Return a copy of ``rows`` with the ops on CPU threads using ``threads`` cores (0: all cores)."""
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


_WAIT_NORM, _WAIT_GRADIENT, _WAIT_PREVIOUS, _WAIT_SUM, _WAIT_LAST = (
    int(w) for w in (Wait.NORM, Wait.GRADIENT, Wait.PREVIOUS, Wait.SUM, Wait.LAST)
)
_SENT = kernel.KINDS.index(OpKind.GRADIENT_D2H)
_ISSUED = tuple(kernel.KINDS.index(k) for k in (OpKind.FORWARD, OpKind.BACKWARD, OpKind.NORM))
_OP, _GRADIENT, _PREFETCH = int(What.OP), int(What.GRADIENT), int(What.PREFETCH)
# Positions in the array of counters. Ops and waits so far, the present iteration and its gradient norm. Copies of
# gradients to the host: number begun, number of those that a later op waits for, and the latest one of these.
_N_OPS, _N_AFTER, _N_ITERATION, _N_NORM = range(4)
_N_SENT, _N_WAITED, _N_ROOM = range(4, 7)
# Updates that take a buffer before the norm is known: how many are to do so, how many have, and the op that they wait
# for.
_N_COMING, _N_CAME, _N_BEGIN = range(7, 10)
_N_COUNTS = 10


class _Given(NamedTuple):
    rows: Floats
    ways: Ints
    sizes: Floats
    placement: Any
    issue: Ints
    arrival: Ints
    plan: Ints


class _Made(NamedTuple):
    """The state of a plan's schedule while it is built, by appending ops to arrays.

    Ops that do not depend on the plan are made from a recorded training iteration: a list of entries, where an entry is
    an op, or a marker at which ops of the plan are inserted. In these arrays, an op is given by its number, and -1
    means no op.

    Attributes:
        ops, after_first, after: Arrays of the schedule, see `ebbtide.simulator.engines.kernel.run`.
        n: Counters, such as the number of ops so far (`_N_OPS`).
        done: Three lists of ops in one array. First, for each entry of the recorded iteration, the newest op that was
            made from this entry. Second, for each subgroup, the op after which its updated parameters are ready. Third,
            for each subgroup, the last op of its update.
        on_host: For each subgroup, the newest op that copied a part of its gradient to the host.
        early: For each subgroup, the newest op of its update that runs before the gradient norm is known.
        begun: For each subgroup, the number of ops of its update that run before the gradient norm is known.
        sums: For each part of a gradient (from one layer), the newest op that copied the part to the host.
        complete: For each subgroup, 1 if its gradient of the present step is complete, otherwise 0.
        coming: Subgroups with updates that take a buffer before the gradient norm is known, in the order in which they
            take it.
        sent: Ops that copy gradients to the host, in the order in which they were appended.
        free: For each kind of buffer, a queue of free buffers. A buffer is represented by the op that freed it.
        head, tail: For each kind of buffer, the positions in ``free`` at which the queue begins and ends.
        left: For each kind of buffer, how many more buffers may be filled before the gradient norm is known.
            `_add_first` counts this number down.
    """

    ops: Floats
    after_first: Ints
    after: Ints
    n: Ints
    done: Ints
    on_host: Ints
    sums: Ints
    early: Ints
    begun: Ints
    complete: Ints
    coming: Ints
    sent: Ints
    head: Ints
    tail: Ints
    left: Ints
    free: Ints


@uncounted
def _wait(made: _Made, op: int) -> None:
    if op >= 0:
        made.after[made.n[_N_AFTER]] = op
        made.n[_N_AFTER] += 1


@uncounted
def _append(made: _Made, rows: Floats, row: int, size: float) -> int:
    i = made.n[_N_OPS]
    for column in range(kernel.OP_COLUMNS):
        made.ops[i, column] = rows[row, column]
    made.ops[i, kernel.ITERATION] = made.n[_N_ITERATION]
    made.ops[i, kernel.WORK] *= size
    made.ops[i, kernel.DRAM] *= size
    made.n[_N_OPS] = i + 1
    made.after_first[i + 1] = made.n[_N_AFTER]
    return int(i)


@uncounted
def _add(made: _Made, given: _Given, row: int, size: float) -> int:
    slot = int(given.rows[row, T_TAKES])
    if slot >= 0:
        _wait(made, made.free[slot, made.head[slot]])
        made.head[slot] += 1
    i = _append(made, given.rows, row, size)
    slot = int(given.rows[row, T_GIVES])
    if slot >= 0:
        made.free[slot, made.tail[slot]] = i
        made.tail[slot] += 1
    return int(i)


@uncounted
def _add_steps(made: _Made, given: _Given, first: int, last: int, s: int, previous: int) -> int:
    for row in range(first, last):
        waits = int(given.rows[row, T_WAITS])
        if waits & _WAIT_NORM:
            _wait(made, made.n[_N_NORM])
        if waits & _WAIT_GRADIENT:
            _wait(made, made.on_host[s])
        if waits & _WAIT_PREVIOUS:
            _wait(made, previous)
        previous = _add(made, given, row, given.sizes[s])
        if given.rows[row, T_PUBLISHES] > 0:
            made.done[made.done.size - 2 * made.on_host.size + s] = previous
    return int(previous)


@uncounted
def _make_room(made: _Made, op: int, left: float) -> float:
    n, sent = made.n, made.sent
    sent[n[_N_SENT]] = op
    n[_N_SENT] += 1
    left += made.ops[op, kernel.WORK]
    while n[_N_SENT] - n[_N_WAITED] > 1:
        oldest = made.ops[sent[n[_N_WAITED]], kernel.WORK]
        if left - oldest / 2 <= GRADIENTS_UNDER_WAY_BYTES:
            break
        left -= oldest
        n[_N_ROOM] = sent[n[_N_WAITED]]
        n[_N_WAITED] += 1
    return float(left)


@uncounted
def _add_pass(made: _Made, program: Program, place: int) -> None:
    if int(program.rows[place, kernel.KIND]) in _ISSUED:
        _wait(made, made.n[_N_ROOM])
        made.n[_N_ROOM] = -1
    for j in range(program.places[place, X_REFS], program.places[place + 1, X_REFS]):
        _wait(made, made.done[program.refs[j]])
    made.done[place] = _append(made, program.rows, place, 1.0)


@uncounted
def _add_gradient(made: _Made, given: _Given, places: Ints, place: int, behind: int, left: float) -> float:
    s, part = places[place, X_SUBGROUP], places[place, X_PART]
    added_to, boundary = places[place, X_ADDED_TO], places[place, X_BOUNDARY]
    way, op = given.placement[s], behind
    for row in range(given.ways[way, W_GRADIENT_FIRST], given.ways[way, W_GRADIENT_LAST]):
        waits = int(given.rows[row, T_WAITS])
        if (waits & _WAIT_SUM and not added_to) or (waits & _WAIT_LAST and not boundary):
            continue
        if waits & _WAIT_SUM:
            _wait(made, made.sums[part])
        _wait(made, op)
        op = _add(made, given, row, float(places[place, X_ELEMENTS]))
        if int(given.rows[row, kernel.KIND]) == _SENT:
            left = _make_room(made, op, left)
    made.on_host[s] = made.sums[part] = op
    if boundary and places[place, X_LAST]:
        made.complete[s] = 1
        _update_early(made, given, s)
        _come_in(made, given)
    return left


@uncounted
def _update_early(made: _Made, given: _Given, s: int) -> None:
    way = given.placement[s]
    first, before = given.ways[way, W_FIRST], given.ways[way, W_BEFORE]
    begun = made.begun[s]
    if made.complete[s] == 0 or (begun == 0 and given.rows[first, T_TAKES] >= 0):
        return
    if first + begun < before:
        made.early[s] = _add_steps(made, given, first + begun, before, s, made.early[s])
        made.begun[s] = before - first


@uncounted
def _come_in(made: _Made, given: _Given) -> None:
    n = made.n
    while n[_N_CAME] < n[_N_COMING]:
        s = made.coming[n[_N_CAME]]
        slot = int(given.rows[given.ways[given.placement[s], W_FIRST], T_TAKES])
        if made.head[slot] >= made.tail[slot]:
            return
        n[_N_CAME] += 1
        _begin_early(made, given, s, n[_N_BEGIN])
        _update_early(made, given, s)


@uncounted
def _begin_early(made: _Made, given: _Given, s: int, behind: int) -> None:
    _wait(made, behind)
    made.early[s] = _add(made, given, given.ways[given.placement[s], W_FIRST], given.sizes[s])
    made.begun[s] = 1


@uncounted
def _prefetch(made: _Made, given: _Given, behind: int) -> None:
    n = made.n
    n[_N_COMING] = n[_N_CAME] = 0
    n[_N_BEGIN] = behind
    for k in range(given.arrival.size):
        s = given.arrival[k]
        first = given.ways[given.placement[s], W_FIRST]
        early_updates = given.ways[given.placement[s], W_BEFORE] > first
        if early_updates and given.rows[first, T_EARLY] > 0:
            made.coming[n[_N_COMING]] = s
            n[_N_COMING] += 1
    _add_first(made, given, int(np.int64(P_EARLY)))
    _come_in(made, given)


@uncounted
def _begin_ahead(made: _Made, given: _Given, behind: int) -> None:
    n = made.n
    n[_N_COMING] = n[_N_CAME] = 0
    _add_first(made, given, int(np.int64(P_AHEAD)))
    for k in range(n[_N_COMING]):
        _begin_early(made, given, made.coming[k], behind)
    n[_N_COMING] = 0


@uncounted
def _add_first(made: _Made, given: _Given, first: int) -> None:
    left = 0
    for kind in range(made.left.size):
        made.left[kind] = given.plan[first + kind]
        left += made.left[kind]
    for k in range(given.issue.size):
        if left == 0:
            break
        s = given.issue[k]
        row = given.ways[given.placement[s], W_FIRST]
        slot = int(given.rows[row, T_TAKES])
        early_updates = given.ways[given.placement[s], W_BEFORE] > row
        if given.rows[row, T_EARLY] > 0 and not early_updates and made.left[slot] > 0:
            made.left[slot] -= 1
            left -= 1
            made.coming[made.n[_N_COMING]] = s
            made.n[_N_COMING] += 1


@uncounted
def _add_updates(made: _Made, given: _Given, norm: int) -> None:
    made.n[_N_NORM] = norm
    for k in range(given.issue.size):
        _add_update(made, given, given.issue[k])
    _begin_ahead(made, given, norm)


@uncounted
def _add_update(made: _Made, given: _Given, s: int) -> None:
    way, early = given.placement[s], made.early[s]
    first = given.ways[way, W_FIRST] + made.begun[s]
    end = _add_steps(made, given, first, given.ways[way, W_LAST], s, early)
    made.done[made.done.size - made.on_host.size + s] = end
    made.early[s] = -1
    made.begun[s] = made.complete[s] = 0


@uncounted
def _build(made: _Made, given: _Given, program: Program) -> int:
    places, n, left = program.places, made.n, 0.0
    made.after_first[0], n[_N_ROOM] = 0, -1
    _begin_ahead(made, given, int(np.int64(-1)))
    for iteration in range(given.plan[P_ITERATIONS]):
        n[_N_ITERATION] = iteration
        for place in range(places.shape[0] - 1):
            what = places[place, X_WHAT]
            if what == _OP:
                _add_pass(made, program, place)
                continue
            behind = made.done[program.refs[places[place, X_REFS]]]
            if what == _GRADIENT:
                left = _add_gradient(made, given, places, place, behind, left)
            elif what == _PREFETCH:
                _prefetch(made, given, behind)
            else:
                _add_updates(made, given, behind)
    return int(n[_N_OPS])


@compiled
def build(
    program: Program,
    rows: Floats,
    ways: Ints,
    sizes: Floats,
    placement: Any,
    issue: Ints,
    arrival: Ints,
    plan: Ints,
    ops: Floats,
    after_first: Ints,
    after: Ints,
) -> int:
    """Write the ops of training under a plan into arrays, and return the number of ops.

    `build_schedule` builds the same schedule as Python objects.

    Args:
        program: Recorded training iteration, which provides the ops that do not depend on the plan.
        rows: Array `RecipeArrays.rows`: each row describes one op of the gradient or update of a subgroup.
        ways: Array `RecipeArrays.ways`: for each way of updating a subgroup, the positions of its ops in ``rows``.
        sizes, placement: For each subgroup, the number of its elements, and its `Way.code`.
        issue: All subgroups in the order of their updates.
        arrival: All subgroups in the order in which their gradients become complete.
        ops, after_first, after: Output arrays, see `ebbtide.simulator.engines.kernel.run`.
    """
    places, subgroups, kinds = program.rows.shape[0], sizes.size, P_EARLY - P_SLOTS
    iterations = plan[P_ITERATIONS]
    made = _Made(
        ops,
        after_first,
        after,
        np.zeros(_N_COUNTS, np.int64),
        np.full(places + 2 * subgroups, -1),
        np.full(subgroups, -1),
        np.full(program.parts, -1),
        np.full(subgroups, -1),
        np.zeros(subgroups, np.int64),
        np.zeros(subgroups, np.int64),
        np.empty(subgroups, np.int64),
        np.empty(places * iterations, np.int64),
        np.zeros(kinds, np.int64),
        plan[P_SLOTS:P_EARLY].copy(),
        np.zeros(kinds, np.int64),
        np.full((kinds, subgroups * (iterations + 1)), -1),
    )
    return _build(made, _Given(rows, ways, sizes, placement, issue, arrival, plan), program)
