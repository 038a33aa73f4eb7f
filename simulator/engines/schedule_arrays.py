"""The builder of a plan's schedule as arrays, compiled by numba.

It writes the same ops as `ebbtide.simulator.schedules.ebbtide`, but into the arrays that
`ebbtide.simulator.engines.kernel` simulates, without `Op` objects. The ops of forward and backward come from
a recorded iteration (`ebbtide.simulator.schedules.tape`). The ops of gradients and updates come from recipes,
the op sequences for each way of updating a subgroup.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from ebbtide.simulator.engines import kernel
from ebbtide.simulator.engines.jit import compiled, uncounted
from ebbtide.simulator.engines.kernel import Floats, Ints
from ebbtide.simulator.engines.recipe_arrays import (
    P_AHEAD,
    P_EARLY,
    P_ITERATIONS,
    P_SLOTS,
    T_EARLY,
    T_GIVES,
    T_PUBLISHES,
    T_TAKES,
    T_WAITS,
    W_BEFORE,
    W_FIRST,
    W_GRADIENT_FIRST,
    W_GRADIENT_LAST,
    W_LAST,
    X_ADDED_TO,
    X_BOUNDARY,
    X_ELEMENTS,
    X_LAST,
    X_PART,
    X_REFS,
    X_SUBGROUP,
    X_WHAT,
    Program,
)
from ebbtide.simulator.schedule import OpKind
from ebbtide.simulator.schedules.tape import What
from ebbtide.simulator.update.holding import GRADIENTS_UNDER_WAY_BYTES
from ebbtide.simulator.update.steps import Wait

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
    _add_first(made, given, np.int64(P_EARLY))
    _come_in(made, given)


@uncounted
def _begin_ahead(made: _Made, given: _Given, behind: int) -> None:
    n = made.n
    n[_N_COMING] = n[_N_CAME] = 0
    _add_first(made, given, np.int64(P_AHEAD))
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
    _begin_ahead(made, given, np.int64(-1))
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
