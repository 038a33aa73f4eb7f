"""Lower bounds of a job's iteration time, which plan searches at all subgroup sizes share."""

import math
from bisect import bisect_left

from ebbtide.simulator.analysis.bound import Bound, lower_bound
from ebbtide.simulator.limits import Limits
from ebbtide.simulator.machine import Machine
from ebbtide.simulator.workload import Workload

ROUNDING = 1e-4  # relative, far larger than the solver's tolerances


class Bounds:
    """The lower bounds of one job's iteration time that were computed so far.

    A bound holds for plans with any subgroup size, so the workload may be cut into any subgroups. All calls must be for
    one job on one machine, because bounds are remembered by the limits and ``away`` only.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[Limits, int | None], Bound | ValueError] = {}

    def of(self, workload: Workload, machine: Machine, limits: Limits, away: int | None) -> Bound:
        """Return a lower bound of the iteration time under any plan within memory limits.

        Args:
            away: Number of elements with their 16-bit parameters in host memory. None: any number.

        Raises:
            ValueError: The job does not fit into memory with any plan.
        """
        key = limits, away
        if key not in self._known:
            try:
                self._known[key] = lower_bound(workload, machine, limits, away=away)
            except ValueError as error:
                self._known[key] = error
        found = self._known[key]
        if isinstance(found, ValueError):
            raise found.with_traceback(None)
        return found

    def seconds(self, workload: Workload, machine: Machine, limits: Limits, away: int | None) -> float:
        """Return a lower bound in seconds, or ``inf`` if the job does not fit into memory."""
        try:
            return self.of(workload, machine, limits, away).iteration_s
        except ValueError:
            return math.inf

    def may_take_less(self, workload: Workload, machine: Machine, limits: Limits, away: int, seconds: float) -> bool:
        """Return True if the lower bound is less than ``seconds``.

        The bound is the minimum of a linear program, and ``away`` is the right side of one of its rows. So the bound is
        a convex function of ``away``. The lines through two known bounds limit a third one: from above between the two,
        and from below elsewhere. If that decides, the bound itself is not computed.
        """
        least_s, most_s = self._lines(limits, away)
        # Drives make no plan slower, so the limit without drives holds too.
        if min(most_s, self._lines(limits.in_memory, away)[1]) < seconds:
            return True
        return least_s < seconds and self.seconds(workload, machine, limits, away) < seconds

    def _lines(self, limits: Limits, away: int) -> tuple[float, float]:
        pairs = ((key[1], found) for key, found in self._known.items() if key[0] == limits)
        known = sorted((n, found.iteration_s) for n, found in pairs if n is not None and isinstance(found, Bound))
        place = bisect_left(known, (away, 0.0))
        least_s, most_s = 0.0, math.inf
        for first in {place - 2, place - 1, place} & {*range(len(known) - 1)}:
            line_s, rounding_s = _line(known[first], known[first + 1], away)
            if first == place - 1:
                most_s = line_s + rounding_s
            else:
                least_s = max(least_s, line_s - rounding_s)
        return least_s, most_s


def _line(one: tuple[int, float], other: tuple[int, float], at: int) -> tuple[float, float]:
    part = (at - one[0]) / (other[0] - one[0])
    rounding_s = ROUNDING * max(one[1], other[1]) * (abs(part) + abs(1 - part))
    return one[1] + part * (other[1] - one[1]), rounding_s
