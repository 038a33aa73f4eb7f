"""Which subgroup gets which placement, for given numbers of each: by when updates can have ended.

The k-th subgroup should be one whose update can be the k-th to end: then no layer waits for a queue
that works for a later one. In which order a queue updates its subgroups:
`tuner.placements.update_orders`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from simulator.engines.reference import capacities
from simulator.machine import Machine
from simulator.plan import Placement
from simulator.workload import Workload


@dataclass(frozen=True)
class Counts:
    """So many subgroups of each placement, and slots."""

    host: int
    device: int
    resident: int
    slots: int


class Arrangements:
    """Guesses of good arrangements; the queues' paces are those of a mean subgroup."""

    def __init__(self, workload: Workload, machine: Machine) -> None:
        mean = workload.params / len(workload.subgroups)
        rates = capacities(machine, workload.ranks_per_node)
        visit = workload.optimizer_state.visit_bytes * mean
        threads = (*machine.host_adam_by_threads, machine.cpu_cores)
        self.host_s = mean / max(machine.host_adam_rate(n) for n in threads)
        self.home_s = workload.wire_bytes * mean / rates["h2d"]
        self.in_s, self.out_s = visit / rates["h2d"], visit / rates["d2h"]
        self.both_s = 2 * visit / rates["link"]
        self.device_s = mean / machine.rate("device_adam_params_per_s")

    def of(self, counts: Counts, window_s: float) -> Iterator[tuple[Placement, ...]]:
        """Some of them, the most likely first; lanes at their own pace, or filling the window."""
        seen = set()
        for fills in (False, True):
            for slots_first in (True, False):
                order = self._order(counts, window_s if fills else 0.0, slots_first)
                if order not in seen:
                    seen.add(order)
                    yield order

    def _order(self, c: Counts, window_s: float, slots_first: bool) -> tuple[Placement, ...]:
        hosts = [(k + 1) * self.host_s + self.home_s for k in range(c.host)]
        pace_s = self.device_s if slots_first else max(self.device_s, self.out_s)
        visits = [self.device_s + k * pace_s for k in range(min(c.slots, c.device))]
        cycle_s = (self.in_s + self.out_s + self.device_s) / max(1, c.slots)
        cycle_s = max(self.in_s, self.out_s, self.both_s, cycle_s)
        first_s = 2 * self.device_s + self.out_s + self.in_s
        visits += [first_s + k * cycle_s for k in range(c.device - len(visits))]
        ended: list[tuple[float, Placement]] = [(s, "host") for s in _stretched(hosts, window_s)]
        ended += [(s, "device") for s in _stretched(visits, window_s)]
        # A hair later than a visit, whose write-back should begin.
        ended += [((k + 1.001) * self.device_s, "resident") for k in range(c.resident)]
        return tuple(placement for _, placement in sorted(ended))


def _stretched(ends: list[float], window_s: float) -> list[float]:
    """The same, the last one at the window's end, if they end before it."""
    if not ends or ends[-1] >= window_s:
        return ends
    return [s * window_s / ends[-1] for s in ends]
