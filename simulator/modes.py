"""What copies and host updates can do at once: the simulator's shares as a linear program.

At any moment each lane has nothing to do or runs one op, and the simulator shares the node among
those that run. So the time between the norm barrier and the end of forward is a mix of few modes,
each with its speeds; a lane's work needs a mix that does it. Max-min sharing is fair, not clever:
it slows the lane that everything waits for as much as the others, which a bound by resources
misses.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from simulator.fluid import max_min_speeds
from simulator.machine import Machine
from simulator.schedule import Op
from simulator.simulate import alone_s, demands

Floats = NDArray[np.float64]
COMING, HOME, LEAVING, HOST = range(4)  # visits in, parameters home, visits out, host updates

# The window's segments, in order of time, and what has to happen in them.
HEAD, FIRST_BACK, CROSSING, LAST_IN, NO_HOST, HOST_ON, LAST_COPY, TAIL = range(8)
SEGMENTS = 8
REQUIREMENTS = (
    "head_s", "first_back_s", "coming_s", "leaving_s", "last_in_s", "no_host_s", "host_on_s",
    "last_copy_s", "tail_s", "host_params", "home_s",
)  # fmt: skip


def modes(lanes: list[list[Op]], machine: Machine, have: dict[str, float]) -> Floats:
    """The speeds of each combination of ops, one or none per lane: shape (modes, lanes).

    Speeds are relative to the op alone; a host update's are in params per second, so that different
    numbers of threads compare.
    """
    found = set()
    for running in product(*([None, *ops] for ops in lanes)):
        ops = [op for op in running if op is not None]
        seconds = [alone_s(op, machine) for op in ops]
        asked = [demands(op, machine, s) for op, s in zip(ops, seconds, strict=True)]
        speeds = iter(zip(max_min_speeds(asked, have), seconds, ops, strict=True))
        row = [0.0] * len(lanes)
        for lane, op in enumerate(running):
            if op is not None:
                speed, alone, _ = next(speeds)
                row[lane] = speed * op.work / alone if lane == HOST else speed
        found.add(tuple(row))
    return np.array(sorted(found))


@dataclass
class WindowProgram:
    """The shortest window in which the modes do what is asked; learns a cut per solution.

    A dual solution is feasible whatever is asked, so each one bounds the window for all counts.
    Visits come in and leave from the first write-back to the last arrival; host updates go on until
    the last copy home, or stop before the visits do.

    Attributes:
        modes: from `modes`.
    """

    modes: Floats

    def __post_init__(self) -> None:
        coming, home, leaving, host = self.modes.T
        ones = np.ones(len(self.modes))
        wanted: list[tuple[tuple[int, ...], Floats]] = [
            ((HEAD,), ones),
            ((FIRST_BACK,), leaving),
            ((CROSSING,), coming),
            ((CROSSING,), leaving),
            ((LAST_IN, NO_HOST), coming),
            ((NO_HOST,), ones),
            ((HOST_ON,), ones),
            ((LAST_COPY,), ones),
            ((TAIL,), ones),
            ((HEAD, FIRST_BACK, CROSSING, LAST_IN, HOST_ON), host),
            ((HEAD, FIRST_BACK, CROSSING, LAST_IN, NO_HOST, HOST_ON, LAST_COPY), home),
        ]
        rows = np.zeros((len(REQUIREMENTS), SEGMENTS, len(ones)))
        for row, (segments, values) in zip(rows, wanted, strict=True):
            row[list(segments)] = values
        self._rows = rows.reshape(len(REQUIREMENTS), -1)
        self._scale = np.maximum(self._rows.max(axis=1), 1e-300)  # params per s against seconds

    def cut(self, asked: Floats) -> Floats:
        """The dual solution for one vector of requirements, shape (REQUIREMENTS,)."""
        from scipy.optimize import linprog

        scaled = self._rows / self._scale[:, None]
        solved = linprog(
            c=np.ones(scaled.shape[1]), A_ub=-scaled, b_ub=-asked / self._scale, method="highs"
        )
        if not solved.success:
            return np.zeros(len(asked))
        dual = np.maximum(0.0, -np.asarray(solved.ineqlin.marginals))
        worst = float((dual @ scaled).max())  # 1 but for rounding
        found: Floats = dual / max(1.0, worst) / self._scale
        return found
