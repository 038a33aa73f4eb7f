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

from simulator.engines.reference import alone_s, demands
from simulator.engines.sharing import max_min_speeds
from simulator.machine import Machine
from simulator.schedule import Op

Floats = NDArray[np.float64]
COMING, HOME, LEAVING, HOST = range(4)  # visits in, parameters home, visits out, host updates

# The window reaches from the norm barrier to the end of the first forward. Its segments in order of
# time, for a plan with more visits than slots (without them the first five are empty):
#
#   HEAD        FIRST_BACK    CROSSING         LAST_IN    NO_HOST | HOST_ON  LAST_COPY    TAIL
#   the first   its state     the visits be-   the last   the host lane is   the last     forward
#   update on   leaves: no    yond the slots   visit      done before | is   parameters   behind
#   the device  visit comes   come and leave   comes in   on after that      come home    them
#   and all
#   gradients
#
# Each requirement is a least amount of something within some of them: seconds of a segment
# (`head_s`, `no_host_s`, `host_on_s`, `last_copy_s`, `tail_s`), of a lane alone (`first_back_s`,
# `coming_s`, `leaving_s`, `last_in_s`; `all_coming_s`, `all_leaving_s` of all visits beyond the
# slots; `leaving_beside_s`: of the state that leaves while the last visit comes in; `home_s`:
# parameters that come home) and parameters updated on the host (`host_params`).
# The last three are about HEAD and FIRST_BACK, where no visit can come in: what comes home there
# has been updated by then (`updated_first`), the lane home stands idle until the first host update
# has ended (`idle_home_s`), and stays so where that is later still (`no_early_home_s`; otherwise a
# number that asks nothing).
HEAD, FIRST_BACK, CROSSING, LAST_IN, NO_HOST, HOST_ON, LAST_COPY, TAIL = range(8)
SEGMENTS = 8
REQUIREMENTS = (
    "head_s", "first_back_s", "coming_s", "leaving_s", "last_in_s", "no_host_s", "host_on_s",
    "last_copy_s", "tail_s", "all_coming_s", "all_leaving_s", "leaving_beside_s", "host_params",
    "home_s", "updated_first", "idle_home_s", "no_early_home_s",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class HostUpdates:
    """The rates that numbers of threads give, and what they take.

    Attributes:
        choices: (params per second, cores) of each number of threads.
        dram_bytes: per parameter.
        scales: whether other rates come with other numbers of threads.
    """

    choices: tuple[tuple[float, float], ...]
    dram_bytes: float
    scales: bool

    def demands(self, machine: Machine, dram_left: float) -> list[tuple[float, dict[str, float]]]:
        """Of all numbers of threads the ones that matter, with what they take of the node.

        Where DRAM is shared, the update goes as fast as DRAM lets it: so besides the rates given,
        the one that takes just what others leave, and the one that takes all DRAM can do.
        """
        most = max(rate for rate, _ in self.choices)
        cores = min(cores / rate for rate, cores in self.choices)
        triad = machine.dram_bytes_per_s.median
        limits = (dram_left, triad) if self.scales else ()
        kinks = [bytes_per_s / self.dram_bytes for bytes_per_s in limits]
        choices = [*self.choices, *((r, r * cores) for r in kinks if 0 < r < most)]
        return [
            (rate, {"dram": min(rate * self.dram_bytes, triad), "cores": busy})
            for rate, busy in choices
        ]


def modes(
    lanes: list[list[Op]], host: HostUpdates, machine: Machine, limits: dict[str, float]
) -> Floats:
    """The speeds of each combination of copies and of a host update: shape (modes, lanes + 1).

    One op or none per lane. Speeds are relative to the op alone; the host update's are in params
    per second, so that different numbers of threads compare.
    """
    speeds_of_modes = set()
    for running in product(*([None, *ops] for ops in lanes)):
        ops = [op for op in running if op is not None]
        taken = [demands(op, machine, alone_s(op, machine)) for op in ops]
        left = limits["dram"] - sum(each["dram"] for each in taken)
        for rate, update in [(0.0, {}), *host.demands(machine, left)]:
            *copies, updating = max_min_speeds([*taken, update], limits)
            speeds = iter(copies)
            row = [0.0 if op is None else next(speeds) for op in running]
            speeds_of_modes.add((*row, rate * updating))
    return _undominated(np.array(sorted(speeds_of_modes)))


def _undominated(rows: Floats) -> Floats:
    """Without what another mode does better; parameters that come home are asked for exactly."""
    better = (rows[None, :, :] >= rows[:, None, :]).all(axis=2)
    better &= rows[None, :, HOME] == rows[:, None, HOME]
    np.fill_diagonal(better, val=False)
    kept: Floats = rows[~better.any(axis=1)]
    return kept


@dataclass
class WindowProgram:
    """The shortest window in which the modes do what is asked; learns a cut per solution.

    A dual solution is feasible whatever is asked, so each one bounds the window for all counts.
    Visits come in and leave from the first write-back to the last arrival; host updates go on until
    the last copy home, or stop before the visits do.

    Attributes:
        modes: from `modes`.
        home_params_per_s: of parameters that come home alone, at the least.
    """

    modes: Floats
    home_params_per_s: float

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
            ((CROSSING, LAST_IN, NO_HOST), coming),
            ((FIRST_BACK, CROSSING), leaving),
            ((LAST_IN, NO_HOST), leaving),
            ((HEAD, FIRST_BACK, CROSSING, LAST_IN, HOST_ON), host),
            ((HEAD, FIRST_BACK, CROSSING, LAST_IN, NO_HOST, HOST_ON, LAST_COPY), home),
            # What comes home while no visit can come in has been updated by then.
            ((HEAD, FIRST_BACK), host - self.home_params_per_s * home),
            ((HEAD, FIRST_BACK), ones - home),
            ((HEAD, FIRST_BACK), -home),
        ]
        rows = np.zeros((len(REQUIREMENTS), SEGMENTS, len(ones)))
        for row, (segments, values) in zip(rows, wanted, strict=True):
            row[list(segments)] = values
        self._rows = rows.reshape(len(REQUIREMENTS), -1)
        self._scale = np.maximum(
            np.abs(self._rows).max(axis=1), 1e-300
        )  # params per s against seconds

    def cut(self, required: Floats) -> Floats:
        """The dual solution for one vector of requirements, shape (REQUIREMENTS,)."""
        from scipy.optimize import linprog

        scaled = self._rows / self._scale[:, None]
        solved = linprog(
            c=np.ones(scaled.shape[1]), A_ub=-scaled, b_ub=-required / self._scale, method="highs"
        )
        if not solved.success:
            return np.zeros(len(required))
        dual = np.maximum(0.0, -np.asarray(solved.ineqlin.marginals))
        worst = float((dual @ scaled).max())  # 1 but for rounding
        values: Floats = dual / max(1.0, worst) / self._scale
        return values
