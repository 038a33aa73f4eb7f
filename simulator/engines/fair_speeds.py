"""The speeds of ops that share capacities, such as DRAM bandwidth, as loops over arrays for numba."""

from __future__ import annotations

import numpy as np
from ebbtide.simulator.engines.jit import uncounted
from ebbtide.simulator.schedule import Lane
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

    The results are written to ``speed``, and equal those of `ebbtide.simulator.engines.sharing.max_min_speeds`.

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
