"""Max-min fair sharing of a node's capacities, such as DRAM bandwidth, among ops that run at the same time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def max_min_speeds(demands: Sequence[Mapping[str, float]], capacities: Mapping[str, float]) -> list[float]:
    """Return the speeds of ops that run at the same time under max-min fair sharing: a list, from 0 to 1 (full speed).

    All ops speed up together until a capacity is full (progressive filling). The ops that use this capacity
    keep their speed, and the others continue. See Bertsekas & Gallager, Data Networks, section 6.5.2.

    Args:
        demands: For each op, the amount of each capacity that it uses at full speed, per second.
        capacities: Size of each capacity, per second. A capacity that is not named is unlimited.
    """
    speeds = [0.0] * len(demands)
    left = dict(capacities)
    growing = set(range(len(demands)))
    while growing:
        load = _load(demands, growing, left)
        to_full = [left[name] / load[name] for name in load]
        step = min([*to_full, *(1.0 - speeds[i] for i in growing)])
        for i in growing:
            speeds[i] += step
        full = set()
        for name, total in load.items():
            left[name] -= total * step
            if left[name] <= 1e-12 * capacities[name]:
                full.add(name)
        growing = {
            i for i in growing if speeds[i] < 1.0 - 1e-12 and not any(demands[i].get(name, 0.0) > 0 for name in full)
        }
    return speeds


def _load(
    demands: Sequence[Mapping[str, float]], growing: set[int], capacities: Mapping[str, float]
) -> dict[str, float]:
    load: dict[str, float] = {}
    for i in growing:
        for name, demand in demands[i].items():
            if name in capacities and demand > 0:
                load[name] = load.get(name, 0.0) + demand
    return load
