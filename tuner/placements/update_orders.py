"""The choice of the update order of the subgroups of optimizer state.

A CPU update can start when the subgroup's gradient is in host memory. The updated parameters are needed when the next
forward reaches their layer. Gradients arrive from the last layer to the first, but forward needs the first layers
first. If all gradients have arrived when the gradient norm is known, the order of forward is best. Otherwise several
orders are compared on a simple model of the CPU, the copies and the next forward. The best of them is chosen:

- By urgency: the next update is for the subgroup that forward needs soonest, among the subgroups with a gradient that
  has arrived (Schrage's rule for release times and tails).
- In two parts: the subgroups of the last layers are updated in the order of forward, and all other subgroups in the
  order of arrival. Either part may be first. Several divisions into two parts are tried.
"""

import heapq
from collections.abc import Iterator, Sequence
from itertools import accumulate, compress

import numpy as np
from ebbtide.simulator.analysis.bounds import serial
from ebbtide.simulator.engines.jit import compiled
from ebbtide.simulator.engines.kernel import Floats, Ints
from ebbtide.simulator.engines.reference import capacities
from ebbtide.simulator.machine import Machine
from ebbtide.simulator.schedules.buckets import bucket_of, leavings
from ebbtide.simulator.update.order import FORWARD, UpdateOrder, compact
from ebbtide.simulator.update.recipes import RECIPES
from ebbtide.simulator.update.steps import Bytes, Placement, Queue
from ebbtide.simulator.workload import Workload

_HOSTED = frozenset(placement for placement, recipe in RECIPES.items() if recipe.queue == Queue.HOST)


class UpdateOrders:
    """A chooser of the order of a training step's updates of subgroups, for one workload on one machine."""

    def __init__(self, workload: Workload, machine: Machine) -> None:
        amounts, room = Bytes.of(workload), capacities(machine, workload.ranks_per_node)
        threads = (*machine.host_adam_by_threads, machine.cpu_cores)
        rate = max(machine.host_adam_rate(n) for n in threads)
        rate = min(rate, room["dram"] / amounts.host_traffic)
        self.update_s = [n / rate for n in workload.subgroups]
        self.copied_s = [n * amounts.gradient / room["d2h"] for n in workload.subgroups]
        self.copy_s = [n * amounts.wire / room["h2d"] for n in workload.subgroups]
        workload = serial(workload)
        self.micro_batches = workload.gradient_accumulation_steps
        self._passes(workload)
        self._gradient_times = np.array(self.complete_s), np.array(self.copied_s)
        self._times = tuple(np.array(times) for times in (self.update_s, self.copy_s, self.behind_s))
        self._known: dict[tuple[int, ...], UpdateOrder] = {}

    def _passes(self, w: Workload) -> None:
        left = [0.0, *accumulate(layer.backward_s for layer in w.layers)]
        self.backward_s, self.forward_s = left[-1], w.forward_s / self.micro_batches
        within = w.layers_of_subgroups()
        first = [layers[0] if layers else 0 for layers in within]
        leave = leavings(w, bucket_of(w))
        behind = {one.layer: layer for layer, some in enumerate(leave) for one in some}
        sent = [min((behind[layer] for layer in layers), default=0) for layers in within]
        self.complete_s = [self.backward_s - left[layer] for layer in sent]
        before = [0.0, *accumulate(layer.forward_s for layer in w.layers)]
        self.behind_s = [self.forward_s - before[layer] for layer in first]

    def of(self, placements: Sequence[Placement]) -> UpdateOrder:
        """Return the order of the subgroups' updates for a plan with the given placements.

        CPU updates are in the order with the earliest estimated end of the next forward (`best`). GPU updates are in
        the order in which forward needs the parameters. CPU updates are in this order too if all their gradients are in
        host memory before the gradient norm is known.
        """
        hosted = tuple(compress(range(len(placements)), map(_HOSTED.__contains__, placements)))
        if hosted not in self._known:
            self._known[hosted] = self._of(hosted)
        return self._known[hosted]

    def _of(self, hosted: Sequence[int]) -> UpdateOrder:
        arrived = self.arrivals(hosted)
        if not arrived or max(arrived.values()) <= 0.0:
            return FORWARD
        return UpdateOrder(host=compact(self.best(arrived)))

    def best(self, arrived: dict[int, float]) -> list[int]:
        """Return the order of CPU updates with the earliest estimated end of the next forward."""
        arrived_s = np.zeros(len(self.update_s))
        arrived_s[[*arrived]] = [*arrived.values()]
        return min(self.candidates(arrived), key=lambda sequence: self.end_s(sequence, arrived_s))

    def end_s(self, sequence: Sequence[int], arrived_s: Floats) -> float:
        """Return the seconds from the moment at which the gradient norm is known to the end of the next forward, for an
        order of CPU updates.
        """
        return float(_end_s(np.array(sequence, np.int64), arrived_s, *self._times))

    def candidates(self, arrived: dict[int, float]) -> Iterator[list[int]]:
        """Yield the orders of CPU updates that are worth comparing, given the seconds at which each
        subgroup's gradient is in host memory.
        """
        yield self.by_urgency(arrived)
        ascending = sorted(arrived)
        count = len(ascending)
        location = sum(at_s <= 0.0 for at_s in arrived.values())
        for held in sorted({0, location // 2, location, *(count * i // 8 for i in range(1, 8))}):
            cut = count - held
            early, late = ascending[:cut][::-1], ascending[cut:]
            yield [*early, *late]
            yield [*late, *early]

    def arrivals(self, hosted: Sequence[int]) -> dict[int, float]:
        """Return a dict from subgroup to the seconds at which its gradient is in host memory, relative to
        the moment at which the gradient norm is known.
        """
        coming = hosted[::-1]
        pass_s = self.forward_s + self.backward_s
        arrived_s = _arrivals_s(np.array(coming, np.int64), self.micro_batches, pass_s, *self._gradient_times)
        norm_s = self.micro_batches * pass_s - self.forward_s
        return dict(zip(coming, (arrived_s - norm_s).tolist(), strict=True))

    def by_urgency(self, arrived: dict[int, float]) -> list[int]:
        """Return an order of CPU updates. When an update ends, the next one is for the subgroup that the next forward
        needs soonest, among the subgroups with their gradient in host memory at that time.

        If no remaining subgroup has its gradient there yet, the next update waits for the next gradient that arrives.
        """
        coming = sorted(arrived, key=lambda s: arrived[s], reverse=True)  # popped from the end, so the next one is last
        there: list[int] = []
        sequence: list[int] = []
        now_s = 0.0
        while coming or there:
            if not there:
                now_s = max(now_s, arrived[coming[-1]])
            while coming and arrived[coming[-1]] <= now_s:
                heapq.heappush(there, coming.pop())
            sequence.append(heapq.heappop(there))
            now_s += self.update_s[sequence[-1]]
        return sequence


@compiled
def _arrivals_s(coming: Ints, micro_batches: int, pass_s: float, complete_s: Floats, copied_s: Floats) -> Floats:
    arrived_s = np.zeros(coming.size)
    free_s = 0.0
    for micro_step in range(micro_batches):
        begin_s = micro_step * pass_s
        for i in range(coming.size):
            free_s = max(free_s, begin_s + complete_s[coming[i]]) + copied_s[coming[i]]
            arrived_s[i] = free_s
    return arrived_s


@compiled
def _end_s(sequence: Ints, arrived_s: Floats, update_s: Floats, copy_s: Floats, behind_s: Floats) -> float:
    host_s = copied_s = before_s = end_s = 0.0
    for s in sequence:
        # An update begins when the previous update has ended, its gradient is on the host, and the slot that it writes
        # to is free.
        host_s = max(host_s, before_s, arrived_s[s]) + update_s[s]
        before_s = copied_s
        copied_s = max(copied_s, host_s) + copy_s[s]
        end_s = max(end_s, copied_s + behind_s[s])
    return end_s
