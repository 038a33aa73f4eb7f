"""ebbtide's schedule as arrays: a recorded iteration and the recipes, interpreted by numba.

Writes what `simulator.schedules.ebbtide` builds, without an `Op` object in between, into the arrays
that `simulator.engines.kernel` runs. Which passes there are is said by the tape
(`simulator.schedules.tape`), what happens to gradients and state by the recipes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import numpy as np

from simulator.engines import kernel
from simulator.engines.jit import compiled, inlined
from simulator.engines.kernel import Floats, Ints
from simulator.machine import RateName
from simulator.schedule import Op, OpKind
from simulator.schedules.tape import Place, What
from simulator.update.footprint import GRADIENTS_UNDER_WAY_BYTES
from simulator.update.recipes import (
    RECIPES,
    Bytes,
    Placement,
    Slot,
    Step,
    Wait,
    can_be_summed,
    guessed_ways,
    recipe_of,
    ways,
)
from simulator.update.tiers import Memory
from simulator.workload import Workload

# Of a subgroup whose parameters live on the device, and what is added for the host.
PLACEMENT_CODES: dict[Placement, int] = {placement: i for i, placement in enumerate(RECIPES)}
PARAMETERS_ON_HOST = 64  # there are fewer placements
HOME_CODES: dict[Memory, int] = {"device": 0, "host": PARAMETERS_ON_HOST}
GUESSED = 32  # added where `can_be_guessed`, for an update before the norm
SUMMED = 16  # added where `can_be_summed`, for sums that stay on the device
SLOTS = list(Slot)
RATES: tuple[RateName, ...] = (
    "wall_s", "h2d_bytes_per_s", "d2h_bytes_per_s", "host_adam_params_per_s",
    "device_adam_params_per_s", "network_bytes_per_s", "storage_write_bytes_per_s",
    "storage_read_bytes_per_s",
)  # fmt: skip
HOST_UPDATE = RATES.index("host_adam_params_per_s")

_WAIT_NORM, _WAIT_HOME, _WAIT_PREVIOUS, _WAIT_SUM, _WAIT_LAST = (
    int(w) for w in (Wait.NORM, Wait.GRADIENT | Wait.SUM, Wait.PREVIOUS, Wait.SUM, Wait.LAST)
)
_WAIT_GRADIENT, _WAIT_BEGIN = int(Wait.GRADIENT), int(Wait.GRADIENT | Wait.NORM)
_ISSUED = tuple(kernel.KINDS.index(k) for k in (OpKind.FORWARD, OpKind.BACKWARD, OpKind.NORM))
_OP, _GRADIENT, _PREFETCH = int(What.OP), int(What.GRADIENT), int(What.PREFETCH)

# Columns of a step's row behind those of an op, of a placement's row, and of a place of the tape.
T_WAITS, T_TAKES, T_GIVES, T_EARLY, T_PUBLISHES = range(kernel.OP_COLUMNS, kernel.OP_COLUMNS + 5)
W_FIRST, W_LAST, W_GRADIENT_FIRST, W_GRADIENT_LAST = range(4)
X_WHAT, X_SUBGROUP, X_ADDED_TO, X_COMPLETES, X_REFS = range(5)
# Entries of the plan: behind P_SLOTS the buffers of each kind, then how many are taken early, in
# backward and from the step before on.
P_ITERATIONS, P_SLOTS = range(2)
P_EARLY = P_SLOTS + len(SLOTS)
P_AHEAD = P_EARLY + len(SLOTS)
M_ROW, M_SUBGROUP, M_ITERATION = range(3)  # of an op that is made; subgroup -1: a pass
# Entries of the notes: ops and waits so far, and what the next op must know of earlier ones.
_N_OPS, _N_AFTER, _N_ITERATION, _N_NORM, _N_ADDED_TO, _N_COMPLETES, _N_PLACES, _N_NEW = range(8)
# Behind them, for each kind of buffer: how many there are, uses begun, uses ended, and where the
# ops that ended them are noted. In one array, as each array costs every inlined step two counts
# of its references.
_N_SLOTS, _N_TAKEN, _N_GIVEN, _N_GIVERS = (8 + i * len(SLOTS) for i in range(4))
# Then gradients' ways home: how many were begun, how many of them something waits for that comes
# behind, and the latest such one.
_N_SENT, _N_WAITED, _N_ROOM = range(8 + 4 * len(SLOTS), 11 + 4 * len(SLOTS))
_N_HOME = 11 + 4 * len(SLOTS)  # of each subgroup, the op that brought its gradient home


@dataclass(frozen=True)
class RecipeArrays:
    """The recipes for one workload: a row per step.

    Attributes:
        rows: as in ``ops``, with WORK and DRAM per parameter, then what a step waits for, takes and
            gives back (see T_*): shape (steps, OP_COLUMNS + 5).
        ways: by the sum of PLACEMENT_CODES' and HOME_CODES', which rows are the update's steps and
            the gradient's (see W_*): shape (2 * PARAMETERS_ON_HOST, 4).
        threaded: rows whose CORES are the plan's threads.
    """

    rows: Floats
    ways: Ints
    threaded: Ints
    by_threads: dict[int, Floats] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, workload: Workload) -> Self:
        amounts, once = Bytes.of(workload), workload.adds_on_device
        steps: list[Step] = []
        table = np.zeros((2 * PARAMETERS_ON_HOST, 4), np.int64)
        both = [(*way, False) for way in ways()] + [(*way, True) for way in guessed_ways()]
        every = [(*way, False) for way in both]
        every += [(*way, True) for way in both if can_be_summed(way[0])]
        for placement, home, guessed, summed in every:
            recipe = recipe_of(placement, home, guessed=guessed, summed=summed or once)
            code = PLACEMENT_CODES[placement] + HOME_CODES[home]
            code += guessed * GUESSED + summed * SUMMED
            middle = len(steps) + len(recipe.steps)
            table[code] = len(steps), middle, middle, middle + len(recipe.gradient_steps)
            steps += [*recipe.steps, *recipe.gradient_steps]
        return cls(
            rows=np.array([[*_row(step, amounts), *_waits(step)] for step in steps]),
            ways=table,
            threaded=np.flatnonzero([step.threads for step in steps]).astype(np.int64),
        )

    def with_threads(self, threads: int) -> Floats:
        """``rows`` for so many host threads; 0: all cores."""
        rows = self.by_threads.get(threads)
        if rows is None:
            rows = self.by_threads[threads] = self.rows.copy()
            rows[self.threaded, kernel.CORES] = threads or np.inf
        return rows


def _row(step: Step, amounts: Bytes) -> Floats:
    row = np.zeros(kernel.OP_COLUMNS)
    row[kernel.LANE] = kernel.LANES.index(step.lane)
    row[kernel.KIND] = kernel.KINDS.index(step.kind)
    row[kernel.RATE] = RATES.index(step.rate)
    row[kernel.WORK], row[kernel.DRAM] = step.work(amounts), step.dram(amounts)
    row[kernel.DEVICE_SHARE] = step.device_share
    return row


def _waits(step: Step) -> list[int]:
    slots = [-1 if slot is None else SLOTS.index(slot) for slot in (step.takes, step.gives_back)]
    return [int(step.waits), *slots, int(step.early), int(step.publishes)]


class Program(NamedTuple):
    """A tape as arrays.

    Attributes:
        places: shape (places + 1, 5), see X_*; the refs of place p are
            refs[places[p, X_REFS]:places[p + 1, X_REFS]].
        rows: of the ops: shape (places, OP_COLUMNS).
    """

    places: Ints
    refs: Ints
    rows: Floats

    @classmethod
    def of(cls, tape: Sequence[Place]) -> Self:
        places = np.zeros((len(tape) + 1, 5), np.int64)
        rows = np.zeros((len(tape), kernel.OP_COLUMNS))
        for number, place in enumerate(tape):
            places[number, :X_REFS] = (
                place.what, place.subgroup, place.added_to, place.completes
            )  # fmt: skip
            places[number + 1, X_REFS] = places[number, X_REFS] + len(place.refs)
            if place.op is not None:
                rows[number] = _op_row(place.op)
        refs = [ref for place in tape for ref in place.refs]
        return cls(places, np.array(refs, dtype=np.int64), rows)


def _op_row(op: Op) -> Floats:
    row = np.zeros(kernel.OP_COLUMNS)
    row[kernel.LANE], row[kernel.KIND] = kernel.LANES.index(op.lane), kernel.KINDS.index(op.kind)
    row[kernel.RATE] = RATES.index(op.rate)
    row[kernel.WORK], row[kernel.DRAM] = op.work, op.dram_bytes
    row[kernel.DEVICE_SHARE] = op.device_share
    row[kernel.DEVICE_ALLOC], row[kernel.DEVICE_FREE] = op.device_alloc_bytes, op.device_free_bytes
    return row


@compiled
def totals(placement: Any, sizes: Floats, kinds: int) -> Floats:
    """How many subgroups there are of each of `ways`, their elements, and the largest; of those
    that wait for the norm, and of those that are guessed: shape (2, 3, kinds).
    """
    both = np.zeros((2, 3, kinds))
    for s in range(sizes.size):
        code = placement[s]
        guessed = (code // GUESSED) % 2
        code -= guessed * GUESSED
        code -= ((code // SUMMED) % 2) * SUMMED
        result = both[guessed]
        if code >= PARAMETERS_ON_HOST:
            code = code - PARAMETERS_ON_HOST + kinds // 2
        result[0, code] += 1
        result[1, code] += sizes[s]
        result[2, code] = max(result[2, code], sizes[s])
    return both


@inlined
def _add(
    n: Ints, made: Ints, after_first: Ints, after: Ints, rows: Floats, row: int, s: int
) -> int:
    """A subgroup's op, behind the waits noted so far and the op that frees its buffer."""
    slot = int(rows[row, T_TAKES])
    if slot >= 0:
        use = n[_N_TAKEN + slot] - n[_N_SLOTS + slot]
        n[_N_TAKEN + slot] += 1
        if use >= 0:
            after[n[_N_AFTER]] = n[n[_N_GIVERS + slot] + use]
            n[_N_AFTER] += 1
    i = n[_N_OPS]
    made[i, M_ROW] = row
    made[i, M_SUBGROUP] = s
    made[i, M_ITERATION] = n[_N_ITERATION]
    n[_N_OPS] = i + 1
    after_first[i + 1] = n[_N_AFTER]
    slot = int(rows[row, T_GIVES])
    if slot >= 0:
        n[n[_N_GIVERS + slot] + n[_N_GIVEN + slot]] = i
        n[_N_GIVEN + slot] += 1
    return int(i)


@compiled
def _add_steps(
    n: Ints, made: Ints, after_first: Ints, after: Ints, rows: Floats, first: int, last: int,
    s: int, previous: int,
) -> int:  # fmt: skip
    """Steps of a subgroup, one behind the other and behind ``previous``; returns the last op."""
    for row in range(first, last):
        waits = int(rows[row, T_WAITS])
        if waits & _WAIT_SUM and n[_N_ADDED_TO] == 0:
            continue
        if waits & _WAIT_LAST and n[_N_COMPLETES] == 0:
            continue
        at = n[_N_AFTER]
        if waits & _WAIT_NORM:
            after[at] = n[_N_NORM]
            at += 1
        if waits & _WAIT_HOME and n[_N_HOME + s] >= 0:
            after[at] = n[_N_HOME + s]
            at += 1
        if waits & _WAIT_PREVIOUS:
            after[at] = previous
            at += 1
        n[_N_AFTER] = at
        previous = _add(n, made, after_first, after, rows, row, s)
        if rows[row, T_PUBLISHES] > 0:
            n[n[_N_NEW] + s] = previous
    return int(previous)


@inlined
def _make_room(n: Ints, sent: Ints, sent_bytes: Floats, op: int, size: float, left: float) -> float:
    """`EbbtideLoop._make_room`; ``left`` are the bytes under way, before and after."""
    sent[n[_N_SENT]] = op
    sent_bytes[n[_N_SENT]] = size
    n[_N_SENT] += 1
    left += size
    while n[_N_SENT] - n[_N_WAITED] > 1:
        oldest = sent_bytes[n[_N_WAITED]]
        if left - oldest / 2 <= GRADIENTS_UNDER_WAY_BYTES:
            break
        left -= oldest
        n[_N_ROOM] = sent[n[_N_WAITED]]
        n[_N_WAITED] += 1
    return left


@inlined
def _add_pass(
    n: Ints, made: Ints, after_first: Ints, after: Ints, places: Ints, refs: Ints, place: int,
    kind: int,
) -> None:  # fmt: skip
    """An op of the tape itself, behind those of its refs that there are."""
    base, at, i = n[_N_PLACES], n[_N_AFTER], n[_N_OPS]
    if n[_N_ROOM] >= 0 and kind in _ISSUED:
        after[at] = n[_N_ROOM]
        at += 1
        n[_N_ROOM] = -1
    for j in range(places[place, X_REFS], places[place + 1, X_REFS]):
        if n[base + refs[j]] >= 0:
            after[at] = n[base + refs[j]]
            at += 1
    n[_N_AFTER] = at
    made[i, M_ROW] = place
    made[i, M_SUBGROUP] = -1
    made[i, M_ITERATION] = n[_N_ITERATION]
    n[base + place] = i
    n[_N_OPS] = i + 1
    after_first[i + 1] = at


@compiled
def _fill(ops: Floats, count: int, made: Ints, passes: Floats, rows: Floats, sizes: Floats) -> None:
    """Writes the rows of the ops that were made. In one loop without a call or a slice, either of
    which would count references, which costs more than the copy.
    """
    for i in range(count):
        row, s = made[i, M_ROW], made[i, M_SUBGROUP]
        ops[i, kernel.ITERATION] = made[i, M_ITERATION]
        if s < 0:
            ops[i, kernel.LANE] = passes[row, kernel.LANE]
            ops[i, kernel.KIND] = passes[row, kernel.KIND]
            ops[i, kernel.WORK] = passes[row, kernel.WORK]
            ops[i, kernel.RATE] = passes[row, kernel.RATE]
            ops[i, kernel.DRAM] = passes[row, kernel.DRAM]
            ops[i, kernel.CORES] = 0.0
            ops[i, kernel.DEVICE_SHARE] = passes[row, kernel.DEVICE_SHARE]
            ops[i, kernel.DEVICE_ALLOC] = passes[row, kernel.DEVICE_ALLOC]
            ops[i, kernel.DEVICE_FREE] = passes[row, kernel.DEVICE_FREE]
        else:
            ops[i, kernel.LANE] = rows[row, kernel.LANE]
            ops[i, kernel.KIND] = rows[row, kernel.KIND]
            ops[i, kernel.WORK] = sizes[s] * rows[row, kernel.WORK]
            ops[i, kernel.RATE] = rows[row, kernel.RATE]
            ops[i, kernel.DRAM] = sizes[s] * rows[row, kernel.DRAM]
            ops[i, kernel.CORES] = rows[row, kernel.CORES]
            ops[i, kernel.DEVICE_SHARE] = rows[row, kernel.DEVICE_SHARE]
            ops[i, kernel.DEVICE_ALLOC] = 0.0
            ops[i, kernel.DEVICE_FREE] = 0.0


@compiled
def _notes(places: int, subgroups: int, plan: Ints) -> Ints:
    """Nothing has happened yet: see _N_*."""
    uses = subgroups * plan[P_ITERATIONS]
    kinds = P_EARLY - P_SLOTS
    new = _N_HOME + subgroups + places
    givers = new + 2 * subgroups
    n = np.full(givers + kinds * uses, -1, dtype=np.int64)
    n[_N_OPS] = n[_N_AFTER] = n[_N_SENT] = n[_N_WAITED] = 0
    n[_N_PLACES], n[_N_NEW] = _N_HOME + subgroups, new
    for kind in range(kinds):
        n[_N_SLOTS + kind] = plan[P_SLOTS + kind]
        n[_N_TAKEN + kind] = n[_N_GIVEN + kind] = 0
        n[_N_GIVERS + kind] = givers + kind * uses
    return n


@compiled
def _prefetch(
    n: Ints, made: Ints, after_first: Ints, after: Ints, rows: Floats, firsts: Ints, issue: Ints,
    free: Ints, behind: int, early: Ints,
) -> None:  # fmt: skip
    """First steps of subgroups before the norm, into ``free`` buffers; their ops into ``early``."""
    for k in range(issue.size):
        if free.sum() == 0:
            break
        s = issue[k]
        row = firsts[s]
        if rows[row, T_EARLY] > 0 and free[int(rows[row, T_TAKES])] > 0:
            free[int(rows[row, T_TAKES])] -= 1
            if behind >= 0:
                after[n[_N_AFTER]] = behind
                n[_N_AFTER] += 1
            early[s] = _add(n, made, after_first, after, rows, row, s)


@compiled
def _guess(
    n: Ints, made: Ints, after_first: Ints, after: Ints, rows: Floats, first: int, s: int,
    early: Ints,
) -> None:  # fmt: skip
    """An update's first step at its gradient, if it does not wait for the norm; into ``early``."""
    if int(rows[first, T_WAITS]) & _WAIT_BEGIN == _WAIT_GRADIENT:
        early[s] = _add_steps(n, made, after_first, after, rows, first, first + 1, s, -1)


@compiled
def build(
    program: Program, rows: Floats, ways: Ints, sizes: Floats, placement: Any, issue: Ints,
    plan: Ints, ops: Floats, after_first: Ints, after: Ints,
) -> int:  # fmt: skip
    """Writes the schedule of `build_schedule` into the arrays; returns how many ops it has.

    Args:
        rows, ways: of `RecipeArrays`.
        sizes, placement: of the subgroups; issue: all of them, in the plan's order.
        plan: see P_*; ops, after_first, after: written.
    """
    places, refs, passes = program
    count, subgroups = passes.shape[0], sizes.size
    n = _notes(count, subgroups, plan)
    early = np.full(subgroups, -1, dtype=np.int64)
    made = np.empty((ops.shape[0], 3), dtype=np.int64)
    sent, sent_bytes, left = np.empty_like(after_first), np.empty(after_first.size), 0.0
    base, ends = n[_N_PLACES], n[_N_NEW] + subgroups
    after_first[0] = 0
    firsts = ways[placement, W_FIRST]
    _prefetch(n, made, after_first, after, rows, firsts, issue, plan[P_AHEAD:].copy(), -1, early)
    for iteration in range(plan[P_ITERATIONS]):
        n[_N_ITERATION] = iteration
        for place in range(count):
            what, s = places[place, X_WHAT], places[place, X_SUBGROUP]
            if what == _OP:
                kind = int(passes[place, kernel.KIND])
                _add_pass(n, made, after_first, after, places, refs, place, kind)
                continue
            behind = n[base + refs[places[place, X_REFS]]]
            if what == _GRADIENT:
                n[_N_ADDED_TO] = places[place, X_ADDED_TO]
                n[_N_COMPLETES] = places[place, X_COMPLETES]
                way, ops_before = placement[s], n[_N_OPS]
                n[_N_HOME + s] = _add_steps(
                    n, made, after_first, after, rows, ways[way, W_GRADIENT_FIRST],
                    ways[way, W_GRADIENT_LAST], s, behind,
                )  # fmt: skip
                if places[place, X_COMPLETES]:
                    _guess(n, made, after_first, after, rows, firsts[s], s, early)
                if n[_N_HOME + s] >= ops_before:  # the last step sends it home
                    size = sizes[s] * rows[ways[way, W_GRADIENT_LAST] - 1, kernel.WORK]
                    left = _make_room(n, sent, sent_bytes, n[_N_HOME + s], size, left)
            elif what == _PREFETCH:
                free = plan[P_EARLY:P_AHEAD].copy()
                _prefetch(n, made, after_first, after, rows, firsts, issue, free, behind, early)
            else:
                n[_N_NORM] = behind
                for k in range(subgroups):
                    s = issue[k]
                    first = ways[placement[s], W_FIRST] + (early[s] >= 0)
                    n[ends + s] = _add_steps(
                        n, made, after_first, after, rows, first, ways[placement[s], W_LAST], s,
                        early[s],
                    )  # fmt: skip
                    early[s] = -1
                free = plan[P_AHEAD:].copy()
                _prefetch(n, made, after_first, after, rows, firsts, issue, free, behind, early)
    _fill(ops, n[_N_OPS], made, passes, rows, sizes)
    return int(n[_N_OPS])
