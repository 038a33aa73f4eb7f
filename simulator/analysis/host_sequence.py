"""The host's updates one after the other: when the last forward behind them can have ended.

Gradients arrive in the reverse order of the layers, while forward needs the first layers first: so
the updates that forward waits for longest are those that can begin last. An update that has begun
is not put aside for another one. What any part of them takes together, as
`simulator.analysis.named_bound` adds up, does not know that; of few updates every sequence is
looked at, the sets of those that have ended one by one (Held and Karp, 1962).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from simulator.engines.jit import compiled

Floats = NDArray[np.float64]
HALVINGS = 20


@compiled
def _in_time(ready: Floats, work: Floats, tail: Floats, most: float, ended: Floats) -> bool:
    """Whether some sequence has each of them and its tail done by ``most``; ``ended`` is scratch,
    shape (2**updates,): of each set of updates, the earliest end in time.
    """
    count = ready.size
    for done in range(1, 1 << count):
        earliest = np.inf
        for last in range(count):
            if done >> last & 1:
                end = max(ended[done ^ (1 << last)], ready[last]) + work[last]
                if end + tail[last] <= most:
                    earliest = min(earliest, end)
        ended[done] = earliest
    return bool(ended[(1 << count) - 1] < np.inf)


@compiled
def _least_end(
    ready: Floats, work: Floats, tail: Floats, floor: float, most: float, ended: Floats
) -> float:
    """Between a floor that is known and ``most``, from where on nobody asks."""
    if _in_time(ready, work, tail, floor * (1 + 1e-12), ended):
        return floor
    if most == np.inf:
        most = ready.max() + work.sum() + tail.max()
    elif not _in_time(ready, work, tail, most, ended):
        return most
    for _ in range(HALVINGS):
        middle = (floor + most) / 2
        if _in_time(ready, work, tail, middle, ended):
            most = middle
        else:
            floor = middle
    return floor


@compiled
def lowest_end_s(
    hosted: Any, ready: Floats, work: Floats, tail: Floats, floors: Floats, order: Any
) -> float:
    """The least end of any choice of host updates, whatever their sequence.

    Args:
        hosted: shape (choices, updates), whether a choice has an update.
        ready: when it can begin, of each choice; ``work``, ``tail``: what it takes, and what
            follows it. Seconds, shapes (choices, updates), (updates,), (updates,).
        floors: what is known of each choice; ``order`` sorts them, ascending.
    """
    ended = np.zeros(1 << hosted.shape[1])
    lowest = np.inf
    for choice in order:
        if floors[choice] >= lowest:
            break
        on = hosted[choice]
        end = _least_end(ready[choice][on], work[on], tail[on], floors[choice], lowest, ended)
        lowest = min(lowest, end)
    return float(lowest)
