"""The arithmetic of `simulator.simulate` on arrays, for sweeps.

One row of ``ops`` per op; the columns are the constants below. Everything here is compiled by
numba where it is installed, so it sticks to loops over arrays. Sums run over lanes in the order of
`Lane`, as the reference's do: the two engines agree to the last bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from simulator.jit import compiled, inlined
from simulator.schedule import Lane, OpKind

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# Columns of an op's row.
LANE, KIND, ITERATION, WORK, RATE, LATENCY, DRAM, CORES, DEVICE_SHARE = range(9)
DEVICE_ALLOC, DEVICE_FREE, HOST_ALLOC, HOST_FREE = range(9, 13)
OP_COLUMNS = 13

# Entries of the capacity vector.
C_DRAM, C_CORES, C_H2D, C_D2H, C_LINK, C_DEVICE, C_STORAGE, C_NETWORK = range(8)
CAPACITY_COUNT = 8
CAPACITIES = ("dram", "cores", "h2d", "d2h", "link", "device", "storage", "network")

# Entries of the vector that describes the machine besides rates and capacities.
M_CORES, M_DRAM, M_COPY_LATENCY, M_LAUNCH_LATENCY, M_UNIFIED, M_SHARES_CORES = range(6)

LANES = list(Lane)
KINDS = list(OpKind)
LANE_COUNT = len(LANES)
_COMPUTE, _UPDATE, _H2D, _H2D_PARAMETERS, _D2H, _STORAGE, _NETWORK = (
    LANES.index(lane)
    for lane in (
        Lane.COMPUTE,
        Lane.DEVICE_UPDATE,
        Lane.H2D,
        Lane.H2D_PARAMETERS,
        Lane.D2H,
        Lane.STORAGE,
        Lane.NETWORK,
    )
)
_GRADIENT_D2H = KINDS.index(OpKind.GRADIENT_D2H)
_GRADIENT_H2D = KINDS.index(OpKind.GRADIENT_H2D)
_PARAMETER_H2D = KINDS.index(OpKind.PARAMETER_H2D)

# States of the lanes are remembered with their speeds: most moments of a schedule look like an
# earlier one. A lane's op falls into one of a few classes of equal demands.
_CLASSES = 15
_CACHE = 512
_HASH = 0x9E3779B1
_NEVER = -1


@inlined
def _is_copy(lane: int) -> bool:
    return lane in (_H2D, _H2D_PARAMETERS, _D2H)


@inlined
def _alone_s(ops: Floats, i: int, rates: Floats, machine: Floats) -> float:
    kind, lane = int(ops[i, KIND]), int(ops[i, LANE])
    if machine[M_UNIFIED] and kind in (_GRADIENT_D2H, _GRADIENT_H2D, _PARAMETER_H2D):
        return 0.0
    if ops[i, WORK] == 0.0:
        return float(ops[i, LATENCY])
    latency = ops[i, LATENCY]
    if _is_copy(lane):
        latency += machine[M_COPY_LATENCY]
    elif lane == _UPDATE:
        latency += machine[M_LAUNCH_LATENCY]
    return float(latency + ops[i, WORK] / rates[int(ops[i, RATE])])


@inlined
def _fill_demand(ops: Floats, i: int, duration_s: float, machine: Floats, demand: Floats) -> None:
    """What op i takes of each capacity at full speed, into its lane's row of ``demand``."""
    lane = int(ops[i, LANE])
    for c in range(CAPACITY_COUNT):
        demand[lane, c] = 0.0
    if duration_s <= 0:
        return
    copies = _is_copy(lane)
    cores = min(ops[i, CORES], machine[M_CORES])
    if machine[M_SHARES_CORES]:
        cores += ops[i, DEVICE_SHARE] * machine[M_CORES] + (1.0 if copies else 0.0)
    demand[lane, C_DRAM] = min(ops[i, DRAM] / duration_s, machine[M_DRAM])
    demand[lane, C_CORES] = min(cores, machine[M_CORES])
    demand[lane, C_DEVICE] = ops[i, DEVICE_SHARE]
    speed = ops[i, WORK] / duration_s
    if copies:
        demand[lane, C_D2H if lane == _D2H else C_H2D] = speed
        demand[lane, C_LINK] = speed
    elif lane == _STORAGE:
        demand[lane, C_STORAGE] = speed
    elif lane == _NETWORK:
        demand[lane, C_NETWORK] = speed


# What each lane is at: its place in the queue, the end of its part of the queue, whether an op
# runs, that op's class, and how many classes of demands the lane has shown so far.
HEAD, QUEUE_END, BUSY, CLASS, CLASSES = range(5)
LEFT_S, SPEED = range(2)  # of the running op: seconds left at full speed, and its speed
NOW, DEVICE, HOST, DEVICE_TOP, HOST_TOP = range(5)  # totals: time, memory in use, peaks


@compiled
def _fill_step(growing: Any, demand: Floats, left: Floats, progress: Floats, load: Floats) -> float:
    """How far all growing ops can speed up together; leaves their sums in ``load``."""
    step = np.inf
    for c in range(CAPACITY_COUNT):
        load[c] = 0.0
    for i in range(LANE_COUNT):
        if growing[i]:
            step = min(step, 1.0 - progress[i, SPEED])
            for c in range(CAPACITY_COUNT):
                load[c] += demand[i, c]
    for c in range(CAPACITY_COUNT):
        if load[c] > 0.0:
            step = min(step, left[c] / load[c])
    return float(step)


@compiled
def _stops(i: int, demand: Floats, full: Any) -> bool:
    stops = False
    for c in range(CAPACITY_COUNT):
        stops |= full[c] and demand[i, c] > 0.0
    return stops


@compiled
def _max_min(lanes: Ints, demand: Floats, capacity: Floats, progress: Floats) -> None:
    """`simulator.fluid.max_min_speeds` on arrays; see there."""
    growing = lanes[:, BUSY] > 0
    left = capacity.copy()
    load = np.zeros(CAPACITY_COUNT)
    full = np.zeros(CAPACITY_COUNT, dtype=np.bool_)
    for i in range(LANE_COUNT):
        progress[i, SPEED] = 0.0
    while growing.any():
        step = _fill_step(growing, demand, left, progress, load)
        for c in range(CAPACITY_COUNT):
            full[c] = False
            if load[c] > 0.0 and capacity[c] < np.inf:
                left[c] -= load[c] * step
                full[c] = left[c] <= 1e-12 * capacity[c]
        for i in range(LANE_COUNT):
            if growing[i]:
                progress[i, SPEED] += step
                if progress[i, SPEED] >= 1.0 - 1e-12 or _stops(i, demand, full):
                    growing[i] = False


@inlined
def _class_of(lane: int, demand: Floats, known: Floats, lanes: Ints) -> int:
    """Number of the lane's class with exactly these demands; -1 if there are too many."""
    count = lanes[lane, CLASSES]
    found = 0
    for j in range(count):
        same = True
        for c in range(CAPACITY_COUNT):
            same &= known[lane, j, c] == demand[lane, c]
        if same:
            found = j + 1
            break
    if found == 0 and count < _CLASSES:
        for c in range(CAPACITY_COUNT):
            known[lane, count, c] = demand[lane, c]
        lanes[lane, CLASSES] = count + 1
        found = count + 1
    return found if found > 0 else _NEVER


@inlined
def _start_ready(
    lanes: Ints, progress: Floats, demand: Floats, known: Floats, totals: Floats, queue: Ints,
    ops: Floats, after_first: Ints, after: Ints, met: Ints, ended: Any, rates: Floats,
    machine: Floats, start_s: Floats,
) -> int:  # fmt: skip
    """Starts what can start; returns how many lanes are busy."""
    running = 0
    for lane in range(LANE_COUNT):
        if not lanes[lane, BUSY] and lanes[lane, HEAD] < lanes[lane, QUEUE_END]:
            i = queue[lanes[lane, HEAD]]
            while met[i] < after_first[i + 1] and ended[after[met[i]]]:
                met[i] += 1
            if met[i] == after_first[i + 1]:
                start_s[i] = totals[NOW]
                progress[lane, LEFT_S] = _alone_s(ops, i, rates, machine)
                _fill_demand(ops, i, progress[lane, LEFT_S], machine, demand)
                lanes[lane, BUSY] = 1
                lanes[lane, CLASS] = _class_of(lane, demand, known, lanes)
                totals[DEVICE] += ops[i, DEVICE_ALLOC]
                totals[HOST] += ops[i, HOST_ALLOC]
                totals[DEVICE_TOP] = max(totals[DEVICE_TOP], totals[DEVICE])
                totals[HOST_TOP] = max(totals[HOST_TOP], totals[HOST])
        running += lanes[lane, BUSY]
    return running


@inlined
def _state_key(lanes: Ints) -> int:
    """One number for what runs on all lanes; -1: not to be remembered."""
    key = 0
    unknown = False
    for i in range(LANE_COUNT):
        if lanes[i, BUSY]:
            unknown |= lanes[i, CLASS] == _NEVER
            key |= lanes[i, CLASS] << (4 * i)
    return _NEVER if unknown else key


@inlined
def _set_speeds(
    lanes: Ints, progress: Floats, demand: Floats, capacity: Floats, cache_key: Ints,
    cache_speeds: Floats,
) -> None:  # fmt: skip
    key = _state_key(lanes)
    slot = ((key * _HASH) >> 16) & (_CACHE - 1)
    if key == _NEVER or cache_key[slot] != key:
        _max_min(lanes, demand, capacity, progress)
        cache_key[slot] = key
        for lane in range(LANE_COUNT):
            cache_speeds[slot, lane] = progress[lane, SPEED]
    else:
        for lane in range(LANE_COUNT):
            progress[lane, SPEED] = cache_speeds[slot, lane]


@inlined
def _advance(
    lanes: Ints, progress: Floats, totals: Floats, queue: Ints, ops: Floats, ended: Any,
    end_s: Floats,
) -> None:  # fmt: skip
    """To the next moment at which an op ends."""
    step = np.inf
    for lane in range(LANE_COUNT):
        if lanes[lane, BUSY]:
            left_s = progress[lane, LEFT_S]
            step = min(step, left_s / progress[lane, SPEED] if left_s > 0 else 0.0)
    totals[NOW] += step
    for lane in range(LANE_COUNT):
        if lanes[lane, BUSY]:
            progress[lane, LEFT_S] -= step * progress[lane, SPEED]
            if progress[lane, LEFT_S] <= 1e-12 * (1.0 + step):
                i = queue[lanes[lane, HEAD]]
                lanes[lane, HEAD] += 1
                lanes[lane, BUSY] = 0
                ended[i] = True
                end_s[i] = totals[NOW]
                totals[DEVICE] -= ops[i, DEVICE_FREE]
                totals[HOST] -= ops[i, HOST_FREE]


@compiled
def _lane_queues(ops: Floats, lanes: Ints) -> Ints:
    """Ops by lane in issue order; writes where each lane's part begins and ends."""
    for i in range(ops.shape[0]):
        lanes[int(ops[i, LANE]), QUEUE_END] += 1
    first = 0
    for lane in range(LANE_COUNT):
        lanes[lane, HEAD] = first
        first += lanes[lane, QUEUE_END]
        lanes[lane, QUEUE_END] = lanes[lane, HEAD]
    queue = np.empty(ops.shape[0], dtype=np.int64)
    for i in range(ops.shape[0]):
        lane = int(ops[i, LANE])
        queue[lanes[lane, QUEUE_END]] = i
        lanes[lane, QUEUE_END] += 1
    return queue


@compiled
def run(
    ops: Floats, after_first: Ints, after: Ints, rates: Floats, capacity: Floats, machine: Floats,
    start_s: Floats, end_s: Floats,
) -> tuple[float, float]:  # fmt: skip
    """Fills in when each op starts and ends; returns the peaks over the base of device and host.

    Args:
        ops: shape (n, OP_COLUMNS); op i waits for after[after_first[i]:after_first[i + 1]].
        rates: full speeds, indexed by an op's RATE; capacity: see CAPACITIES; machine: see M_*.
        start_s, end_s: shape (n,), written.
    """
    lanes = np.zeros((LANE_COUNT, 5), dtype=np.int64)
    queue = _lane_queues(ops, lanes)
    progress = np.zeros((LANE_COUNT, 2))
    totals = np.zeros(5)
    demand = np.zeros((LANE_COUNT, CAPACITY_COUNT))
    known = np.zeros((LANE_COUNT, _CLASSES, CAPACITY_COUNT))
    cache_key = np.full(_CACHE, _NEVER, dtype=np.int64)
    cache_speeds = np.zeros((_CACHE, LANE_COUNT))
    met = after_first[:-1].copy()
    ended = np.zeros(ops.shape[0], dtype=np.bool_)
    while _start_ready(
        lanes, progress, demand, known, totals, queue, ops, after_first, after, met, ended,
        rates, machine, start_s,
    ):  # fmt: skip
        _set_speeds(lanes, progress, demand, capacity, cache_key, cache_speeds)
        _advance(lanes, progress, totals, queue, ops, ended, end_s)
    return float(totals[DEVICE_TOP]), float(totals[HOST_TOP])


# Columns of a summary row.
ITERATION_S, FORWARD_S, BACKWARD_S, STEP_S, UPDATE_S, MAKESPAN_S, DEVICE_PEAK, HOST_PEAK = range(8)
SUMMARY_COLUMNS = 8
_FORWARD, _BACKWARD, _IDLE, _NORM, _STEP_END, _GRADIENT_PASS = (
    KINDS.index(kind)
    for kind in (
        OpKind.FORWARD,
        OpKind.BACKWARD,
        OpKind.IDLE,
        OpKind.NORM,
        OpKind.STEP_END,
        OpKind.GRADIENT_PASS,
    )
)
_UPDATE_KINDS = tuple(
    KINDS.index(kind)
    for kind in (
        OpKind.UPDATE_HOST,
        OpKind.UPDATE_DEVICE,
        OpKind.STATE_D2H,
        OpKind.PARAMETER_H2D,
    )
)


@compiled
def _phase(kind: int) -> int:
    if kind in (_FORWARD, _IDLE):
        return FORWARD_S
    if kind in (_BACKWARD, _GRADIENT_PASS):
        return BACKWARD_S
    return STEP_S if kind in (_NORM, _STEP_END) else -1


@compiled
def _period_s(ops: Floats, end_s: Floats, iterations: int) -> float:
    """As `Timeline.iteration_s` takes it; -1: fewer than two iterations have a backward."""
    ends = np.full(iterations, -1.0)
    for i in range(ops.shape[0]):
        if ops[i, KIND] == _BACKWARD:
            number = int(ops[i, ITERATION])
            ends[number] = max(ends[number], end_s[i])
    ends = ends[ends >= 0]
    if ends.size < 2:
        return -1.0
    base = 1 if ends.size > 2 else 0
    return float((ends[-1] - ends[base]) / (ends.size - 1 - base))


@compiled
def _add_phases(
    ops: Floats, start_s: Floats, end_s: Floats, iteration: int, summary: Floats
) -> None:
    """As `Timeline.phases` takes them, for the iteration given."""
    previous = np.inf
    for i in range(ops.shape[0]):
        if ops[i, KIND] == _STEP_END and ops[i, ITERATION] == iteration - 1:
            previous = end_s[i]
    if previous == np.inf:
        for i in range(ops.shape[0]):
            if ops[i, ITERATION] == iteration:
                previous = min(previous, start_s[i])
    backward_end = previous
    update_end = -np.inf
    for i in range(ops.shape[0]):
        if ops[i, ITERATION] != iteration:
            continue
        kind = int(ops[i, KIND])
        if ops[i, LANE] == _COMPUTE and _phase(kind) >= 0:
            summary[_phase(kind)] += max(0.0, end_s[i] - previous)
            previous = max(previous, end_s[i])
            if _phase(kind) == BACKWARD_S:
                backward_end = previous
        if kind in _UPDATE_KINDS:
            update_end = max(update_end, end_s[i])
    summary[UPDATE_S] = max(0.0, update_end - backward_end)


@compiled
def summarise(
    ops: Floats, start_s: Floats, end_s: Floats, iterations: int, summary: Floats
) -> None:
    """Writes the period, the phases and the makespan of a run into ``summary``."""
    summary[:] = 0.0
    if ops.shape[0] == 0:
        return
    summary[MAKESPAN_S] = end_s.max() - start_s.min()
    period = _period_s(ops, end_s, iterations)
    summary[ITERATION_S] = period if period >= 0 else summary[MAKESPAN_S]
    last = 0
    for i in range(ops.shape[0]):
        if ops[i, KIND] == _STEP_END:
            last = max(last, int(ops[i, ITERATION]))
    _add_phases(ops, start_s, end_s, last, summary)
