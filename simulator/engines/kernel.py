"""The reference simulator's computation, written as loops over arrays so that numba can make it fast.

The array ``ops`` has one row for each op, and its columns are defined by constants. All functions are
compiled by numba if it is installed. Code that runs for each event allocates no memory. Sums over lanes
(such as copy directions) are computed in the order of `Lane`, as in `ebbtide.simulator.engines.reference`,
so that both simulators give identical results.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from ebbtide.simulator.engines.jit import compiled, uncounted
from ebbtide.simulator.schedule import D2H_LANES, FREE_WHERE_UNIFIED, H2D_LANES, Lane, OpKind
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

LANE_COUNT = len(Lane)
# Positions in the vector of capacities.
C_DRAM, C_CORES, C_H2D, C_D2H, C_LINK, C_DEVICE, C_STORAGE, C_NETWORK, C_STORAGE_READ = range(9)
C_STORAGE_BOTH = 9
CAPACITY_COUNT = 10
CAPACITIES = ("dram", "cores", "h2d", "d2h", "link", "device", "storage", "network", "storage_read", "storage_both")

R_LEFT, R_LOAD, R_FULL = range(3)  # rows of `room`: what is left, the total demand, and 1 if it is used up


@uncounted
def max_min(busy: Ints, demand: Floats, capacity: Floats, speed: Floats, growing: Ints, room: Floats) -> None:
    """Compute the speeds of the running ops under max-min fair sharing of capacities such as DRAM bandwidth.

    The results are written to ``speed``, and equal those of `ebbtide.simulator.engines.reference.max_min_speeds`.

    Args:
        busy: For each lane, 1 if an op of the lane runs, and 0 otherwise.
        demand: For each lane and capacity, the amount of the capacity that the lane's op uses at full speed.
        speed: Output: for each lane, the speed of its op as a fraction of full speed.
        growing: Working array, which is overwritten. It marks the lanes that can still get a higher speed.
        room: Working array, which is overwritten. For each capacity it holds the amount that is left (R_LEFT), the
            total demand on it (R_LOAD), and whether it is used up (R_FULL).
    """
    count = 0
    for i in range(LANE_COUNT):
        growing[i] = busy[i]
        count += busy[i]
        speed[i] = 0.0
    for c in range(CAPACITY_COUNT):
        room[R_LEFT, c] = capacity[c]
    while count > 0:
        step = _fill_step(growing, demand, speed, room)
        for c in range(CAPACITY_COUNT):
            room[R_FULL, c] = 0.0
            if room[R_LOAD, c] > 0.0 and capacity[c] < np.inf:
                room[R_LEFT, c] -= room[R_LOAD, c] * step
                room[R_FULL, c] = room[R_LEFT, c] <= 1e-12 * capacity[c]
        for i in range(LANE_COUNT):
            if growing[i] > 0:
                speed[i] += step
                if speed[i] >= 1.0 - 1e-12 or _stops(i, demand, room):
                    growing[i] = 0
                    count -= 1


@uncounted
def _fill_step(growing: Ints, demand: Floats, speed: Floats, room: Floats) -> float:
    step = np.inf
    for c in range(CAPACITY_COUNT):
        room[R_LOAD, c] = 0.0
    for i in range(LANE_COUNT):
        if growing[i] > 0:
            step = min(step, 1.0 - speed[i])
            for c in range(CAPACITY_COUNT):
                room[R_LOAD, c] += demand[i, c]
    for c in range(CAPACITY_COUNT):
        if room[R_LOAD, c] > 0.0:
            step = min(step, room[R_LEFT, c] / room[R_LOAD, c])
    return float(step)


@uncounted
def _stops(i: int, demand: Floats, room: Floats) -> bool:
    stops = False
    for c in range(CAPACITY_COUNT):
        stops |= room[R_FULL, c] > 0.0 and demand[i, c] > 0.0
    return stops


# Columns of the row that describes an op.
LANE, KIND, ITERATION, WORK, RATE, LATENCY, DRAM, CORES, DEVICE_SHARE = range(9)
DEVICE_ALLOC, DEVICE_FREE, HOST_ALLOC, HOST_FREE = range(9, 13)
OP_COLUMNS = 13

# Positions in the vector of the machine's other properties (besides rates and capacities).
M_CORES, M_DRAM, M_COPY_LATENCY, M_LAUNCH_LATENCY, M_UNIFIED, M_SHARES_CORES = range(6)

LANES = list(Lane)
KINDS = list(OpKind)
LANE_NUMBERS = {lane: number for number, lane in enumerate(LANES)}
KIND_NUMBERS = {kind: number for number, kind in enumerate(KINDS)}
_UPDATE, _STORAGE, _NETWORK, _STORAGE_READ = (
    LANES.index(lane) for lane in (Lane.DEVICE_UPDATE, Lane.STORAGE, Lane.NETWORK, Lane.STORAGE_READ)
)
_OUT = tuple(LANES.index(lane) for lane in sorted(D2H_LANES))
_IN = tuple(LANES.index(lane) for lane in sorted(H2D_LANES))
_FREE_WHERE_UNIFIED = tuple(KINDS.index(kind) for kind in FREE_WHERE_UNIFIED)

# Speeds are cached by the state of the lanes, because most moments of a schedule resemble an earlier one. In each lane,
# ops with equal demands form a class.
_CLASSES = 15
_ROWS = 32  # number of cached rows per lane. For each row, the duration and the class of its op are known
_ROW_COLUMNS = (WORK, KIND, RATE, LATENCY, DRAM, CORES, DEVICE_SHARE)  # the columns that determine duration and class
_ROW_S = len(_ROW_COLUMNS)
_CACHE = 1024  # number of entries of the cache of speeds
_PROBES = 8  # number of entries that are tried for one key
_HASH = 0x9E3779B97F4A7C15 - 2**64  # golden ratio: the highest bits of the product depend on all bits of the key
_NEVER = -1


class _Notes(NamedTuple):
    """The working arrays of one run of the compiled simulator.

    Ops of one lane form a class if they use the same amount of each shared capacity, such as DRAM bandwidth. The
    classes of all running ops determine the ops' speeds, so speeds are cached. A cache key consists of the class
    numbers of the running ops, in four bits per lane.

    Attributes:
        queue: All ops, sorted by lane and in order of issue.
        met: For each op, the position in ``after`` of the first dependency that is not known to have ended.
        ended: For each op, whether the op has ended. Behind the ops there are two more entries: one that never ends,
            and one that has ended.
        head, queue_end: For each lane, the position of its next op in ``queue``, and the end of its ops in ``queue``.
        blocker: For each lane, the op for which the lane's next op waits, as an index of ``ended``.
        active: The lanes that run an op, in no particular order.
        busy, running, left: For each lane, whether it runs an op, which op it runs, and the seconds that this op still
            needs at full speed.
        bits: For each lane, its part of the cache key: the class number of its running op, shifted to the lane's four
            bits.
        demand: For each lane, the amount of each shared capacity that its running op uses. If the op's class is known,
            the amounts are written here only when speeds are computed.
        growing, room: Working arrays of `max_min`, which computes the speeds of running ops.
        classes: For each lane, the number of classes that its ops have had so far.
        known: For each lane and class, the amount of each shared capacity that an op of the class uses.
        row_count, row_class, rows: For each lane, the number of different ops so far, the class of each, and the values
            of each: those in _ROW_COLUMNS, and its seconds at full speed.
        cache_key, cache_speed, cache_inverse: The cache of speeds: for each entry, its key, and for each lane the speed
            of the running op as a fraction of full speed, and 1 / speed.
    """

    after_first: Ints
    after: Ints
    queue: Ints
    met: Ints
    ended: Any
    head: Ints
    queue_end: Ints
    blocker: Ints
    active: Ints
    busy: Ints
    running: Ints
    bits: Ints
    classes: Ints
    growing: Ints
    left: Floats
    demand: Floats
    room: Floats
    known: Floats
    row_count: Ints
    row_class: Ints
    rows: Floats
    cache_key: Ints
    cache_speed: Floats
    cache_inverse: Floats


@uncounted
def _is_copy(lane: int) -> bool:
    return lane in _IN or lane in _OUT


@uncounted
def _alone_s(ops: Floats, i: int, rates: Floats, machine: Floats) -> float:
    kind, lane = int(ops[i, KIND]), int(ops[i, LANE])
    if machine[M_UNIFIED] and kind in _FREE_WHERE_UNIFIED:
        return 0.0
    if ops[i, WORK] == 0.0:
        return float(ops[i, LATENCY])
    latency = ops[i, LATENCY]
    if _is_copy(lane):
        latency += machine[M_COPY_LATENCY]
    elif lane == _UPDATE:
        latency += machine[M_LAUNCH_LATENCY]
    return float(latency + ops[i, WORK] / rates[int(ops[i, RATE])])


@uncounted
def _fill_demand(ops: Floats, i: int, duration_s: float, machine: Floats, demand: Floats) -> None:
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
        demand[lane, C_D2H if lane in _OUT else C_H2D] = speed
        demand[lane, C_LINK] = speed
    elif lane == _STORAGE:
        demand[lane, C_STORAGE] = speed
    elif lane == _NETWORK:
        demand[lane, C_NETWORK] = speed
    elif lane == _STORAGE_READ:
        demand[lane, C_STORAGE_READ] = speed
    if lane in (_STORAGE, _STORAGE_READ):
        demand[lane, C_STORAGE_BOTH] = (duration_s - ops[i, LATENCY]) / duration_s


@uncounted
def _class_of(lane: int, demand: Floats, known: Floats, classes: Ints) -> int:
    count = classes[lane]
    for j in range(count):
        same = True
        for c in range(CAPACITY_COUNT):
            same &= known[lane, j, c] == demand[lane, c]
        if same:
            return j + 1
    if count == _CLASSES:
        return 0
    for c in range(CAPACITY_COUNT):
        known[lane, count, c] = demand[lane, c]
    classes[lane] = count + 1
    return int(count) + 1


@uncounted
def _class_at(ops: Floats, i: int, lane: int, rates: Floats, machine: Floats, notes: _Notes) -> int:
    rows, count = notes.rows, notes.row_count[lane]
    for j in range(count):
        k = 0
        while k < _ROW_S and rows[lane, j, k] == ops[i, _ROW_COLUMNS[k]]:
            k += 1
        if k == _ROW_S:
            notes.left[lane] = rows[lane, j, _ROW_S]
            return int(notes.row_class[lane, j])
    duration_s = _alone_s(ops, i, rates, machine)
    notes.left[lane] = duration_s
    _fill_demand(ops, i, duration_s, machine, notes.demand)
    number = _class_of(lane, notes.demand, notes.known, notes.classes)
    if number > 0 and count < _ROWS:
        for k in range(_ROW_S):
            rows[lane, count, k] = ops[i, _ROW_COLUMNS[k]]
        rows[lane, count, _ROW_S] = duration_s
        notes.row_class[lane, count] = number
        notes.row_count[lane] = count + 1
    return number


@uncounted
def _ready(i: int, lane: int, notes: _Notes) -> bool:
    # Op number ``i`` is ready if all ops have ended that it waits for. If one has not, the notes remember it.
    first, last = notes.met[i], notes.after_first[i + 1]
    while first < last and notes.ended[notes.after[first]]:
        first += 1
    notes.met[i] = first
    if first < last:
        notes.blocker[lane] = notes.after[first]
    return bool(first == last)


@uncounted
def _speeds(key: int, count: int, capacity: Floats, notes: _Notes) -> int:
    slot = _place(key, notes.cache_key)
    if key == _NEVER or notes.cache_key[slot] != key:
        _find_speeds(slot, count, capacity, notes)
        notes.cache_key[slot] = key
    return slot


@uncounted
def _place(key: int, keys: Ints) -> int:
    # If there is neither an entry nor free room for the key, the index is that of another key's entry, which may be
    # overwritten.
    first = ((key * _HASH) >> 50) & (_CACHE - 1)
    for probe in range(_PROBES):
        slot = (first + probe) & (_CACHE - 1)
        if keys[slot] == key or keys[slot] == _NEVER:
            return slot
    return first


@uncounted
def _find_speeds(slot: int, count: int, capacity: Floats, notes: _Notes) -> None:
    for k in range(count):
        lane = notes.active[k]
        number = notes.bits[lane] >> (4 * lane)
        if number > 0:
            for c in range(CAPACITY_COUNT):
                notes.demand[lane, c] = notes.known[lane, number - 1, c]
    speed = notes.cache_speed[slot]
    max_min(notes.busy, notes.demand, capacity, speed, notes.growing, notes.room)
    for lane in range(LANE_COUNT):
        notes.cache_inverse[slot, lane] = 1.0 / speed[lane] if speed[lane] > 0 else np.inf


@uncounted
def _fill_queues(ops: Floats, notes: _Notes) -> None:
    head, end = notes.head, notes.queue_end
    notes.ended[notes.ended.size - 1] = True
    for i in range(ops.shape[0]):
        end[int(ops[i, LANE])] += 1
    first = 0
    for lane in range(LANE_COUNT):
        head[lane] = first
        first += end[lane]
        end[lane] = head[lane]
    for i in range(ops.shape[0]):
        lane = int(ops[i, LANE])
        notes.queue[end[lane]] = i
        end[lane] += 1
    for lane in range(LANE_COUNT):
        _unblock(lane, notes)


@uncounted
def _unblock(lane: int, notes: _Notes) -> None:
    never, always = notes.ended.size - 2, notes.ended.size - 1
    notes.blocker[lane] = always if notes.head[lane] < notes.queue_end[lane] else never


@compiled
def run(
    ops: Floats,
    after_first: Ints,
    after: Ints,
    rates: Floats,
    capacity: Floats,
    machine: Floats,
    start_s: Floats,
    end_s: Floats,
) -> tuple[float, float]:
    """Simulate a schedule: write the start and end of each op, and return the peaks of device and host memory.

    The peaks do not include memory that is in use throughout the schedule.

    Args:
        ops: One row for each op: shape (n, OP_COLUMNS). Op i waits for after[after_first[i]:after_first[i + 1]].
        rates: Full speeds. The column RATE of an op is an index into this array.
        capacity: Shared capacities, such as DRAM bandwidth, in the order of CAPACITIES.
        start_s, end_s: Output arrays of shape (n,).
    """
    count, lanes = ops.shape[0], LANE_COUNT
    notes = _Notes(
        after_first,
        after,
        np.empty(count, np.int64),
        after_first[:-1].copy(),
        np.zeros(count + 2, np.bool_),
        np.zeros(lanes, np.int64),
        np.zeros(lanes, np.int64),
        np.zeros(lanes, np.int64),
        np.zeros(lanes, np.int64),
        np.zeros(lanes, np.int64),
        np.zeros(lanes, np.int64),
        np.zeros(lanes, np.int64),
        np.zeros(lanes, np.int64),
        np.zeros(lanes, np.int64),
        np.zeros(lanes),
        np.zeros((lanes, CAPACITY_COUNT)),
        np.zeros((3, CAPACITY_COUNT)),
        np.empty((lanes, _CLASSES, CAPACITY_COUNT)),
        np.zeros(lanes, np.int64),
        np.empty((lanes, _ROWS), np.int64),
        np.empty((lanes, _ROWS, _ROW_S + 1)),
        np.full(_CACHE, _NEVER, np.int64),
        np.empty((_CACHE, lanes)),
        np.empty((_CACHE, lanes)),
    )
    _fill_queues(ops, notes)
    return _events(ops, rates, capacity, machine, start_s, end_s, notes)


@uncounted
def _events(
    ops: Floats, rates: Floats, capacity: Floats, machine: Floats, start_s: Floats, end_s: Floats, notes: _Notes
) -> tuple[float, float]:
    queue, head, busy, running, bits = notes.queue, notes.head, notes.busy, notes.running, notes.bits
    active, left, blocker = notes.active, notes.left, notes.blocker
    speed = notes.cache_speed
    never = notes.ended.size - 2
    now = device = host = device_top = host_top = 0.0
    key, unknown, speeds_of = 0, 0, _NEVER
    count = slot = int(np.int64(0))  # no literal, for which numba would compile callees twice
    while True:
        for lane in range(LANE_COUNT):
            if notes.ended[blocker[lane]]:
                i = queue[head[lane]]
                if _ready(i, lane, notes):
                    start_s[i] = now
                    number = _class_at(ops, i, lane, rates, machine, notes)
                    busy[lane], running[lane], bits[lane] = 1, i, number << (4 * lane)
                    blocker[lane], active[count] = never, lane
                    key |= bits[lane]
                    unknown += number == 0
                    count += 1
                    device += ops[i, DEVICE_ALLOC]
                    host += ops[i, HOST_ALLOC]
                    device_top, host_top = max(device_top, device), max(host_top, host)
        if count == 0:
            return device_top, host_top
        if key != speeds_of or unknown > 0:
            speeds_of = key if unknown == 0 else _NEVER
            slot = _speeds(speeds_of, count, capacity, notes)
        step = _until_next_end(count, slot, notes)
        now += step
        tiny = 1e-12 * (1.0 + step)
        going = 0
        for k in range(count):
            lane = active[k]
            left[lane] -= step * speed[slot, lane]
            if left[lane] > tiny:
                active[going] = lane
                going += 1
                continue
            i = running[lane]
            _leave(lane, i, notes)
            end_s[i] = now
            key ^= bits[lane]
            unknown -= bits[lane] == 0
            device -= ops[i, DEVICE_FREE]
            host -= ops[i, HOST_FREE]
        count = going


@uncounted
def _until_next_end(count: int, slot: int, notes: _Notes) -> float:
    step = np.inf
    for k in range(count):
        lane = notes.active[k]
        step = min(step, notes.left[lane] * notes.cache_inverse[slot, lane] if notes.left[lane] > 0 else 0.0)
    return step


@uncounted
def _leave(lane: int, i: int, notes: _Notes) -> None:
    notes.head[lane] += 1
    notes.busy[lane] = 0
    notes.ended[i] = True
    _unblock(lane, notes)
