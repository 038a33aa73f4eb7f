"""ebbtide's schedule as arrays: the recipes, interpreted by numba.

Writes what `simulator.schedules.ebbtide` builds, without an `Op` object in between, into the arrays
that `simulator.engines.kernel` runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from simulator.engines import kernel
from simulator.engines.jit import compiled, inlined
from simulator.engines.kernel import Floats, Ints
from simulator.machine import RateName
from simulator.schedule import Lane, OpKind
from simulator.update.recipes import (
    GRADIENT_FETCH,
    GRADIENT_HOME,
    RECIPES,
    Bytes,
    Placement,
    Slot,
    Step,
    Wait,
    recipe_of,
    ways,
)
from simulator.update.tiers import Memory

# Of a subgroup whose parameters live on the device, and what is added for the host.
PLACEMENT_CODES: dict[Placement, int] = {placement: i for i, placement in enumerate(RECIPES)}
PARAMETERS_ON_HOST = 64  # there are fewer placements
HOME_CODES: dict[Memory, int] = {"device": 0, "host": PARAMETERS_ON_HOST}
SLOTS = list(Slot)
RATES: tuple[RateName, ...] = (
    "wall_s", "h2d_bytes_per_s", "d2h_bytes_per_s", "host_adam_params_per_s",
    "device_adam_params_per_s", "network_bytes_per_s", "storage_write_bytes_per_s",
    "storage_read_bytes_per_s",
)  # fmt: skip
WALL, NETWORK = RATES.index("wall_s"), RATES.index("network_bytes_per_s")
HOST_UPDATE = RATES.index("host_adam_params_per_s")

_COMPUTE, _NETWORK_LANE = kernel.LANES.index(Lane.COMPUTE), kernel.LANES.index(Lane.NETWORK)
_FETCH_LANE = kernel.LANES.index(Lane.H2D_FETCH)
_H2D = RATES.index("h2d_bytes_per_s")
_FORWARD, _BACKWARD, _IDLE, _GATHER, _REDUCE, _NORM, _STEP_END, _FETCH = (
    kernel.KINDS.index(kind)
    for kind in (
        OpKind.FORWARD, OpKind.BACKWARD, OpKind.IDLE, OpKind.PARAMETER_GATHER,
        OpKind.GRADIENT_REDUCE, OpKind.NORM, OpKind.STEP_END, OpKind.PARAMETER_FETCH,
    )
)  # fmt: skip
_WAIT_NORM, _WAIT_GRADIENT, _WAIT_PREVIOUS = (
    int(w) for w in (Wait.NORM, Wait.GRADIENT, Wait.PREVIOUS)
)

# Columns of a layer's row, of a step's row behind those of an op, and entries of the plan.
L_FORWARD, L_BACKWARD, L_ACTIVATION, L_GATHER, L_REDUCE, L_REDUCE_BESIDE, L_FETCH = range(7)
T_WAITS, T_TAKES, T_GIVES, T_EARLY, T_PUBLISHES = range(kernel.OP_COLUMNS, kernel.OP_COLUMNS + 5)
P_PREFETCH, P_OVERLAP, P_MICRO_BATCHES, P_ITERATIONS, P_ZERO_STAGE, P_SLOTS = range(6)
# What the training loop does besides its layers, once per iteration.
E_IDLE, E_GATHER, E_NETWORK_GATHER = range(3)
# Entries of the counts: ops and waits so far, and what the next op must know of earlier ones.
_N_OPS, _N_AFTER, _N_ITERATION, _N_BACKWARD, _N_REDUCE, _N_STEP_END = range(6)
_N_PASS, _N_PASS_BEFORE = 6, 7
# Behind them, for each kind of buffer: how many there are, uses begun, uses ended, and where the
# ops that ended them are noted. In one array, as each array costs every inlined step two counts
# of its references.
_N_SLOTS, _N_TAKEN, _N_GIVEN, _N_GIVERS = (8 + i * len(SLOTS) for i in range(4))
_N_COUNT = 8 + 4 * len(SLOTS)


@dataclass(frozen=True)
class RecipeArrays:
    """The recipes for one workload: a row per step.

    Attributes:
        rows: as in ``ops``, with WORK and DRAM per parameter, then what a step waits for, takes and
            gives back (see T_*): shape (steps, OP_COLUMNS + 5).
        first: the steps of a way to be updated are rows first[code] to last[code], its code being
            the sum of PLACEMENT_CODES' and HOME_CODES'.
        gradient_home: by code, whether the gradient goes to host memory.
        threaded: rows whose CORES are the plan's threads.
    """

    rows: Floats
    first: Ints
    last: Ints
    gradient_home: Ints
    threaded: Ints
    by_threads: dict[int, Floats] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, amounts: Bytes) -> Self:
        steps: list[Step] = []
        first, last, homes = (np.zeros(2 * PARAMETERS_ON_HOST, np.int64) for _ in range(3))
        for placement, home in ways():
            recipe, code = recipe_of(placement, home), PLACEMENT_CODES[placement] + HOME_CODES[home]
            first[code], last[code] = len(steps), len(steps) + len(recipe.steps)
            homes[code] = recipe.gradient == "host"
            steps += recipe.steps
        steps += [GRADIENT_FETCH, GRADIENT_HOME]  # the last two rows
        return cls(
            rows=np.array([[*_row(step, amounts), *_waits(step)] for step in steps]),
            first=first,
            last=last,
            gradient_home=homes,
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


@compiled
def totals(placement: Any, sizes: Floats, kinds: int) -> Floats:
    """How many subgroups there are of each of `ways`, their elements, and the largest: shape
    (3, kinds).
    """
    result = np.zeros((3, kinds))
    for s in range(sizes.size):
        code = placement[s]
        if code >= PARAMETERS_ON_HOST:
            code = code - PARAMETERS_ON_HOST + kinds // 2
        result[0, code] += 1
        result[1, code] += sizes[s]
        result[2, code] = max(result[2, code], sizes[s])
    return result


@inlined
def _wait(n: Ints, after: Ints, op: int) -> None:
    """The op that comes next waits for ``op``; -1 is nobody. Where most ops are written this is
    done in place: each call counts references of both arrays.
    """
    if op >= 0:
        after[n[_N_AFTER]] = op
        n[_N_AFTER] += 1


@inlined
def _add(
    n: Ints, ops: Floats, after_first: Ints, kind: int, lane: int, work: float, rate: int,
    share: float, alloc: float, free: float,
) -> int:  # fmt: skip
    """An op of the training loop. Columns that no op here sets stay as they were: zero."""
    i = n[_N_OPS]
    ops[i, kernel.LANE] = lane
    ops[i, kernel.KIND] = kind
    ops[i, kernel.ITERATION] = n[_N_ITERATION]
    ops[i, kernel.WORK] = work
    ops[i, kernel.RATE] = rate
    ops[i, kernel.DRAM] = 0.0
    ops[i, kernel.CORES] = 0.0
    ops[i, kernel.DEVICE_SHARE] = share
    ops[i, kernel.DEVICE_ALLOC] = alloc
    ops[i, kernel.DEVICE_FREE] = free
    n[_N_OPS] = i + 1
    after_first[i + 1] = n[_N_AFTER]
    return int(i)


@compiled
def _add_step(
    n: Ints, ops: Floats, after_first: Ints, after: Ints, rows: Floats, row: int,
    size: float,
) -> int:  # fmt: skip
    """An op of the update, behind the waits noted so far and the op that frees its buffer."""
    slot = int(rows[row, T_TAKES])
    if slot >= 0:
        use = n[_N_TAKEN + slot] - n[_N_SLOTS + slot]
        n[_N_TAKEN + slot] += 1
        if use >= 0:
            after[n[_N_AFTER]] = n[n[_N_GIVERS + slot] + use]
            n[_N_AFTER] += 1
    i = n[_N_OPS]
    # Column by column: slices would count references, which costs more than the copy.
    ops[i, kernel.LANE] = rows[row, kernel.LANE]
    ops[i, kernel.KIND] = rows[row, kernel.KIND]
    ops[i, kernel.ITERATION] = n[_N_ITERATION]
    ops[i, kernel.WORK] = size * rows[row, kernel.WORK]
    ops[i, kernel.RATE] = rows[row, kernel.RATE]
    ops[i, kernel.DRAM] = size * rows[row, kernel.DRAM]
    ops[i, kernel.CORES] = rows[row, kernel.CORES]
    ops[i, kernel.DEVICE_SHARE] = rows[row, kernel.DEVICE_SHARE]
    ops[i, kernel.DEVICE_ALLOC] = 0.0
    ops[i, kernel.DEVICE_FREE] = 0.0
    n[_N_OPS] = i + 1
    after_first[i + 1] = n[_N_AFTER]
    slot = int(rows[row, T_GIVES])
    if slot >= 0:
        n[n[_N_GIVERS + slot] + n[_N_GIVEN + slot]] = i
        n[_N_GIVEN + slot] += 1
    return int(i)


@inlined
def _pass_done(n: Ints, op: int) -> None:
    n[_N_PASS_BEFORE] = n[_N_PASS]
    n[_N_PASS] = op


@compiled
def _fetch(n: Ints, ops: Floats, after_first: Ints, after: Ints, layers: Floats, layer: int) -> int:
    """A layer's parameters come in from the host, behind the waits noted so far."""
    size = layers[layer, L_FETCH]
    _wait(n, after, n[_N_PASS_BEFORE])
    i = _add(n, ops, after_first, _FETCH, _FETCH_LANE, size, _H2D, 0.0, 0.0, 0.0)
    ops[i, kernel.DRAM] = size
    return int(i)


@compiled
def _parameter_waits(
    n: Ints, after: Ints, first: int, last: int, share_subgroup: Ints, placement: Any, new: Ints,
    on_host: int,
) -> None:  # fmt: skip
    """A layer's subgroups whose parameters live on the host (1), or not (0)."""
    at = n[_N_AFTER]
    for j in range(first, last):
        s = share_subgroup[j]
        if new[s] >= 0 and (placement[s] >= PARAMETERS_ON_HOST) == (on_host == 1):
            after[at] = new[s]
            at += 1
    n[_N_AFTER] = at


@compiled
def _forward(
    n: Ints, ops: Floats, after_first: Ints, after: Ints, micro_batch: int, layers: Floats,
    share_first: Ints, share_subgroup: Ints, placement: Any, new: Ints,
) -> None:  # fmt: skip
    for layer in range(layers.shape[0]):
        first, last = share_first[layer], share_first[layer + 1]
        begun = micro_batch == 0 and n[_N_STEP_END] >= 0
        if begun:
            _wait(n, after, n[_N_STEP_END])
        if layers[layer, L_FETCH] > 0:
            if begun:
                _parameter_waits(n, after, first, last, share_subgroup, placement, new, 1)
            fetch = _fetch(n, ops, after_first, after, layers, layer)
            _wait(n, after, fetch)
        if begun:
            _parameter_waits(n, after, first, last, share_subgroup, placement, new, 0)
        if layers[layer, L_GATHER] > 0:
            _wait(n, after, n[_N_PASS_BEFORE])
            gather = _add(n, ops, after_first, _GATHER, _NETWORK_LANE, layers[layer, L_GATHER],
                          NETWORK, 0.0, 0.0, 0.0)  # fmt: skip
            _wait(n, after, gather)
        op = _add(n, ops, after_first, _FORWARD, _COMPUTE, layers[layer, L_FORWARD], WALL,
                  1.0, layers[layer, L_ACTIVATION], 0.0)  # fmt: skip
        _pass_done(n, op)


@compiled
def _gather_before_backward(
    n: Ints, ops: Floats, after_first: Ints, after: Ints, layers: Floats, layer: int
) -> int:
    """As `TrainingLoop.backward` issues it: before the reduction of the layer above. Returns what
    the pass waits for: the gather, or what came in from the host, or nothing.
    """
    op = -1
    if layers[layer, L_FETCH] > 0:
        op = _fetch(n, ops, after_first, after, layers, layer)
    if layers[layer, L_GATHER] > 0:
        _wait(n, after, op)
        _wait(n, after, n[_N_PASS_BEFORE])
        op = int(_add(n, ops, after_first, _GATHER, _NETWORK_LANE, layers[layer, L_GATHER],
                      NETWORK, 0.0, 0.0, 0.0))  # fmt: skip
    return op


@inlined
def _reduced(
    n: Ints, ops: Floats, after_first: Ints, after: Ints, size_bytes: float, op: int
) -> int:
    """After which op so much is reduced."""
    if size_bytes > 0:
        _wait(n, after, op)
        op = int(_add(n, ops, after_first, _REDUCE, _NETWORK_LANE, size_bytes, NETWORK, 0.0, 0.0,
                      0.0))  # fmt: skip
        n[_N_REDUCE] = op
    return op


@compiled
def _prefetch(
    n: Ints, ops: Floats, after_first: Ints, after: Ints, sizes: Floats, placement: Any,
    issue: Ints, plan: Ints, rows: Floats, first: Ints, early: Ints,
) -> None:  # fmt: skip
    begun = 0
    for k in range(sizes.size):
        s = issue[k]
        row = first[placement[s]]
        if rows[row, T_EARLY] > 0 and begun < plan[P_PREFETCH]:
            _wait(n, after, n[_N_BACKWARD])
            early[s] = _add_step(n, ops, after_first, after, rows, row, sizes[s])
            begun += 1
            if begun == plan[P_PREFETCH]:
                break


@compiled
def _backward(
    n: Ints, ops: Floats, after_first: Ints, after: Ints, micro_batch: int, layers: Floats,
    share_first: Ints, share_subgroup: Ints, layer_count: Ints, sizes: Floats, placement: Any,
    issue: Ints, plan: Ints, rows: Floats, first: Ints, gradient_home: Ints,
    home: Ints, early: Ints,
) -> None:  # fmt: skip
    """A turn is a layer's backward, its gradients' way or, from ZeRO-2 on, both. One function, each
    thing in it once: a call per turn, or a second copy, counts references of all these arrays.
    """
    missing = layer_count.copy()
    fetch, store = rows.shape[0] - 2, rows.shape[0] - 1
    boundary = micro_batch == plan[P_MICRO_BATCHES] - 1
    count = layers.shape[0]
    # ZeRO-1 reduces when the last micro-batch's backward is over.
    turns = 2 * count if plan[P_ZERO_STAGE] == 1 and boundary else count
    each_layer = plan[P_ZERO_STAGE] > 1
    waited_for = -1
    gather = _gather_before_backward(n, ops, after_first, after, layers, count - 1)
    for turn in range(turns):
        layer = (count if turn < count else 2 * count) - 1 - turn
        if turn < count:
            _wait(n, after, gather)
            _wait(n, after, waited_for)
            op = _add(n, ops, after_first, _BACKWARD, _COMPUTE, layers[layer, L_BACKWARD], WALL,
                      1.0, 0.0, layers[layer, L_ACTIVATION])  # fmt: skip
            _pass_done(n, op)
            n[_N_BACKWARD] = op
            gather = -1
            if layer > 0:
                gather = _gather_before_backward(n, ops, after_first, after, layers, layer - 1)
        if turn >= count or each_layer:
            op = n[_N_BACKWARD]
            op = _reduced(n, ops, after_first, after, layers[layer, L_REDUCE], op)
            waited_for = op if layers[layer, L_REDUCE] > 0 else -1
            op = _reduced(n, ops, after_first, after, layers[layer, L_REDUCE_BESIDE], op)
            for j in range(share_first[layer + 1] - 1, share_first[layer] - 1, -1):
                s = share_subgroup[j]
                missing[s] -= 1
                if missing[s] > 0:
                    continue
                there = op
                if gradient_home[placement[s]]:
                    if micro_batch > 0:
                        _wait(n, after, op)
                        _wait(n, after, home[s])
                        there = _add_step(n, ops, after_first, after, rows, fetch, sizes[s])
                    _wait(n, after, there)
                    there = _add_step(n, ops, after_first, after, rows, store, sizes[s])
                home[s] = there
            if layer == count - 1 and boundary:
                _prefetch(n, ops, after_first, after, sizes, placement, issue, plan, rows, first,
                          early)  # fmt: skip


@compiled
def _step_waits(n: Ints, after: Ints, plan: Ints, norm: int, new: Ints, ends: Ints) -> None:
    """What comes next waits for what a step waits for."""
    _wait(n, after, norm)
    if not plan[P_OVERLAP]:
        for s in range(new.size):
            _wait(n, after, new[s])
            _wait(n, after, ends[s])


@compiled
def _step(
    n: Ints, ops: Floats, after_first: Ints, after: Ints, sizes: Floats, placement: Any,
    issue: Ints, plan: Ints, extra: Floats, rows: Floats, first: Ints, last: Ints, home: Ints,
    early: Ints, new: Ints, ends: Ints,
) -> None:  # fmt: skip
    _wait(n, after, n[_N_BACKWARD])
    _wait(n, after, n[_N_REDUCE])
    norm = _add(n, ops, after_first, _NORM, _COMPUTE, 0.0, WALL, 0.0, 0.0, 0.0)
    for k in range(sizes.size):
        s = issue[k]
        code = placement[s]
        previous = -1
        for row in range(first[code], last[code]):
            if rows[row, T_EARLY] > 0 and early[s] >= 0:
                previous = early[s]
                early[s] = -1
                continue
            waits = int(rows[row, T_WAITS])
            at = n[_N_AFTER]
            if waits & _WAIT_NORM:
                after[at] = norm
                at += 1
            if waits & _WAIT_GRADIENT:
                after[at] = home[s]
                at += 1
            if waits & _WAIT_PREVIOUS:
                after[at] = previous
                at += 1
            n[_N_AFTER] = at
            previous = _add_step(n, ops, after_first, after, rows, row, sizes[s])
            if rows[row, T_PUBLISHES] > 0:
                new[s] = previous
        ends[s] = previous
    network, gathered = -1, -1
    if extra[E_NETWORK_GATHER] > 0:
        _step_waits(n, after, plan, norm, new, ends)
        network = _add(n, ops, after_first, _GATHER, _NETWORK_LANE, extra[E_NETWORK_GATHER],
                       NETWORK, 0.0, 0.0, 0.0)  # fmt: skip
    if extra[E_GATHER] > 0:
        _step_waits(n, after, plan, norm, new, ends)
        gathered = _add(n, ops, after_first, _GATHER, _COMPUTE, extra[E_GATHER], WALL,
                        0.0, 0.0, 0.0)  # fmt: skip
    _step_waits(n, after, plan, norm, new, ends)
    _wait(n, after, network)
    _wait(n, after, gathered)
    if not plan[P_OVERLAP]:
        new[:] = -1
    n[_N_STEP_END] = _add(n, ops, after_first, _STEP_END, _COMPUTE, 0.0, WALL, 0.0, 0.0, 0.0)


@compiled
def build(
    layers: Floats, share_first: Ints, share_subgroup: Ints, layer_count: Ints, extra: Floats,
    sizes: Floats, placement: Any, issue: Ints, plan: Ints, rows: Floats,
    first: Ints, last: Ints, gradient_home: Ints, ops: Floats, after_first: Ints, after: Ints,
) -> int:  # fmt: skip
    """Writes the schedule of `build_schedule` into the arrays; returns how many ops it has.

    Args:
        layers: shape (layers, 7), see L_*; the shares as `Workload.shares` gives them, flat.
        extra: see E_*.
        sizes, placement: of the subgroups; issue: all of them, in the plan's order.
        plan: see P_*, the buffers of each kind at the end; rows to gradient_home: `RecipeArrays`.
        ops, after_first, after: written.
    """
    subgroups = sizes.size
    uses = subgroups * plan[P_ITERATIONS]
    kinds = plan.size - P_SLOTS
    n = np.full(_N_COUNT + kinds * uses, -1, dtype=np.int64)
    n[_N_OPS] = n[_N_AFTER] = 0
    for kind in range(kinds):
        n[_N_SLOTS + kind] = plan[P_SLOTS + kind]
        n[_N_TAKEN + kind] = n[_N_GIVEN + kind] = 0
        n[_N_GIVERS + kind] = _N_COUNT + kind * uses
    after_first[0] = 0
    new = np.full(subgroups, -1, dtype=np.int64)
    home = np.full(subgroups, -1, dtype=np.int64)
    early = np.full(subgroups, -1, dtype=np.int64)
    ends = np.full(subgroups, -1, dtype=np.int64)
    for iteration in range(plan[P_ITERATIONS]):
        n[_N_ITERATION] = iteration
        if extra[E_IDLE] > 0:
            _add(n, ops, after_first, _IDLE, _COMPUTE, extra[E_IDLE], WALL, 0.0, 0.0, 0.0)
        for micro_batch in range(plan[P_MICRO_BATCHES]):
            _forward(n, ops, after_first, after, micro_batch, layers, share_first,
                     share_subgroup, placement, new)  # fmt: skip
            _backward(n, ops, after_first, after, micro_batch, layers, share_first,
                      share_subgroup, layer_count, sizes, placement, issue, plan, rows,
                      first, gradient_home, home, early)  # fmt: skip
        _step(n, ops, after_first, after, sizes, placement, issue, plan, extra, rows, first, last,
              home, early, new, ends)  # fmt: skip
    return int(n[_N_OPS])
