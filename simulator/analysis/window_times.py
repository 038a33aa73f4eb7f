"""What the updates of an iteration take at the least, for numbers of subgroups per placement.

The window reaches from the norm barrier until the first forward has ended; the rest of the
iteration is serial on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations

import numpy as np
from numpy.typing import NDArray

from simulator.analysis.lane_work import (
    Work,
    copy_op,
    device_update_op,
    host_update_op,
    of_optimizer,
    thread_counts,
)
from simulator.engines.reference import alone_s, capacities, demands
from simulator.machine import Machine
from simulator.schedule import Lane, Op, OpKind
from simulator.update.recipes import PARAMETER_SLOTS, Bytes
from simulator.workload import Workload

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
MOST_UNHELD = 4  # host updates before those that wait for a slot
MOST_NAMED = 10  # subgroups, of which every choice is looked at


class Times:
    """The least times of a workload's ops on a machine, and what they add up to."""

    def __init__(self, w: Workload, machine: Machine) -> None:
        machine = of_optimizer(machine, w)
        self.workload, self.machine = w, machine
        self.count = len(w.subgroups)
        self.limits = capacities(machine, w.ranks_per_node)
        amounts = self.bytes = Bytes.of(w)
        state, grad, wire = amounts.visit, amounts.gradient, amounts.wire
        sizes = sorted(w.subgroups)

        def work(make: Callable[[int], Op]) -> Work:
            return Work(make, sizes, machine, self.limits)

        self.visit_in = work(lambda n: copy_op(OpKind.STATE_H2D, n * state))
        self.visit_out = work(lambda n: copy_op(OpKind.STATE_D2H, n * state))
        self.gradient = work(lambda n: copy_op(OpKind.GRADIENT_D2H, n * grad))
        self.fetch = work(lambda n: copy_op(OpKind.GRADIENT_H2D, n * grad))
        self.parameter = work(lambda n: copy_op(OpKind.PARAMETER_H2D, n * wire))
        self.on_device = work(device_update_op)
        per_param = amounts.host_traffic

        def on_host(threads: float) -> Work:
            return work(lambda n: host_update_op(n, threads, per_param * n))

        threads = thread_counts(machine, self.limits["cores"])
        self.on_host = [on_host(n) for n in threads]
        self.host_rates = [(machine.host_adam_rate(n), n) for n in threads]
        self._passes(w)
        self._per_param(machine)
        self.late_s = np.array([self._late(hosted) for hosted in range(self.count + 1)])
        if self.count <= MOST_NAMED:
            self.late_s = np.maximum(self.late_s, self._named_s())

    def _per_param(self, machine: Machine) -> None:
        """The least seconds per parameter of a host update, of a copy each way, of the device's."""
        every = np.array([self.count])
        self.update_s = float(self._updates_s(every)[0]) / self.workload.params
        down = min(self.limits["d2h"], machine.rate("d2h_bytes_per_s"))
        up = min(self.limits["h2d"], machine.rate("h2d_bytes_per_s"))
        self.home_s, self.fetch_s = self.bytes.gradient / down, self.bytes.gradient / up
        self.copy_s = self.bytes.wire / up
        self.device_s = 1.0 / machine.rate("device_adam_params_per_s")
        self.unheld_s = self._unheld_s()
        self.slowest_copies_s = self._slowest_copies_s()

    def copy_speed(self, size: Floats) -> Floats:
        """Of copies to the device of so many bytes, bytes per second when nothing else runs."""
        some = np.maximum(size, 1.0)
        alone_s = self.machine.copy_latency_s + some / self.machine.rate("h2d_bytes_per_s")
        speed: Floats = some / alone_s
        return speed

    def _slowest_copies_s(self) -> Floats:
        """At the most, of each subgroup's new parameters, whatever runs beside them."""
        alone = self.bytes.wire / self.machine.rate("h2d_bytes_per_s")
        sizes = np.array(self.workload.subgroups, dtype=np.float64)
        latency_s = self.machine.copy_latency_s
        slowest: Floats = self.stretch(*self.limits) * (latency_s + sizes * alone)
        return slowest

    def stretch(self, *names: str) -> float:
        """How much longer an op takes at the most that uses these capacities: it gets no less of
        its speed than a capacity has for all that ask for it at once.
        """
        size, amounts = max(self.workload.subgroups), self.bytes
        together = [
            copy_op(OpKind.STATE_H2D, size * amounts.visit),
            copy_op(OpKind.PARAMETER_H2D, size * amounts.wire),
            copy_op(OpKind.STATE_D2H, size * amounts.visit),
            host_update_op(size, self.machine.cpu_cores, 0),
            device_update_op(size),
            Op(0, OpKind.FORWARD, Lane.COMPUTE, 1.0, device_share=1.0),
        ]
        taken = [demands(op, self.machine, alone_s(op, self.machine)) for op in together]
        asked = {name: sum(each.get(name, 0.0) for each in taken) for name in self.limits}
        asked["dram"] += self.machine.dram_bytes_per_s.median  # host updates of any threads
        return max(1.0, *(asked[name] / self.limits[name] for name in names))

    def _unheld_s(self) -> Floats:
        """By host subgroups: how much sooner than behind all updates the last one can have ended,
        where no slot is free before the first copy.

        Update j + 2 follows copy j: so all follow one another but for the first j, of which only
        the copies count, and the next one. Of any three in a row one is no larger than the third
        largest, and so on: that one is the next one.
        """
        largest = np.sort(np.array(self.workload.subgroups, dtype=np.float64))[::-1]
        longer_s = max(0.0, self.update_s - self.copy_s)
        unheld = np.full(self.count + 1, np.inf)
        for first in range(1, min(MOST_UNHELD, self.count - PARAMETER_SLOTS) + 1):
            saved_s = longer_s * largest[:first].sum() + self.update_s * largest[first - 1]
            unheld[first + PARAMETER_SLOTS :] = np.minimum(
                unheld[first + PARAMETER_SLOTS :], saved_s
            )
        return unheld

    def elements_s(
        self, host: Ints, device: Ints, slots: Ints, elements: Floats, beyond_elements: Floats
    ) -> Floats:
        """What so many elements on the host ask for, in so many subgroups: as `_late` and
        `_fetching_s`, for all of them at once.
        """
        micro = self.workload.gradient_accumulation_steps
        one_update, one_copy = self._updates_s(np.array([1]))[0], self.parameter.one_s
        updates, copies = elements * self.update_s, elements * self.copy_s
        window = np.maximum(updates + one_copy, one_update + copies) + self.tails[0]
        behind = np.array([0.0, *self.tails])[host]
        late = self.backward[-1] + micro * elements * self.home_s + one_update + one_copy + behind
        seconds = np.maximum(self.rest_s + window, late)
        if micro > 1:
            fetched = self.fetch_begin_s + (micro - 1) * elements * self.fetch_s
            # Slots hold the largest visit: as many elements each as one of those beyond, or more.
            visits = beyond_elements * device / np.maximum(device - slots, 1)
            visits = visits * self.bytes.visit / self.limits["h2d"]
            coming = copies + np.maximum(visits, self.visit_in.on("h2d")[device])
            last_s = self.rest_s - float(self.backward[:-1].sum()) + elements * self.fetch_s
            coming = np.maximum(coming, np.where(device > 0, last_s - fetched + coming, 0.0))
            waiting = updates + one_copy - self.unheld_s[host]
            in_turn = np.maximum(coming, waiting)
            seconds = np.maximum(seconds, fetched + in_turn + self.tails[0])
        least_s: Floats = np.where(host > 0, seconds, 0.0)
        return least_s

    def behind_gradients_s(
        self, device: Ints, slots: Ints, elements: Floats, beyond_elements: Floats
    ) -> Floats:
        """Visits beyond the slots: their write-backs come behind all gradients on the lane, and the
        last visit comes in behind the write-back of the one before it in its slot. They share the
        way in with new parameters.
        """
        micro = self.workload.gradient_accumulation_steps
        gradients = self.backward[-1] + micro * elements * self.home_s
        back, come, update = self.visit_out.one_s, self.visit_in.one_s, self.on_device.one_s
        beyond = np.maximum(device - slots, 0)
        cycles = np.maximum(device - 1, 0) // np.maximum(slots, 1)
        times = self.bytes.visit / self.bytes.gradient
        out_s, in_s = (beyond_elements * times * s for s in (self.home_s, self.fetch_s))
        # A slot's visits follow one another; the slots share what is beyond them at best equally.
        by_slot = (out_s + in_s) / np.maximum(slots, 1)
        in_turn = np.maximum(np.maximum(self.visit_out.lane_s[beyond], out_s) + come, by_slot)
        in_turn = in_turn + update
        behind = gradients + np.maximum(in_turn, cycles * (back + come + update))
        inside = self.rest_s + in_s + elements * self.copy_s
        # Each slot holds as many elements as one of those beyond, or more: as `_slots_s`.
        held = by_slot * device / np.maximum(beyond, 1)
        whole = np.maximum(np.maximum(behind, inside) + self.tails[0], held)
        least_s: Floats = np.where(beyond > 0, whole, 0.0)
        return least_s

    def _passes(self, w: Workload) -> None:
        """Forward and backward of one micro-batch, and the forward behind each subgroup's layer."""
        micro = w.gradient_accumulation_steps
        forward = np.array([layer.forward_s for layer in w.layers]) / micro
        self.backward = np.array([layer.backward_s for layer in w.layers]) / micro
        self.forward_s = float(forward.sum())
        self.rest_s = w.backward_s + w.forward_s - self.forward_s
        # The second micro-batch's first gradient, behind the end of the first one's forward.
        self.fetch_begin_s = float(self.backward.sum()) + self.forward_s + float(self.backward[-1])
        behind = np.concatenate([np.cumsum(forward[::-1])[::-1], [0.0]])
        first = [held[0] for held in w.layers_of_subgroups()]
        self.tails = [float(behind[layer]) for layer in first[::-1]]  # last subgroup first
        below = np.concatenate([[0.0], np.cumsum(self.backward)])
        # Of each subgroup: backward that is left when its gradient is complete.
        self.left_s = np.array([below[layer] for layer in [*first, len(w.layers)]])

    def iteration_s(self, host: Ints, device: Ints, resident: Ints, slots: Ints) -> Floats:
        """For arrays of counts."""
        window = np.maximum(
            self._resources(host, device, resident, slots),
            self._chains(host, device, resident, slots),
        )
        whole = np.maximum(self._whole(host, device), self.late_s[host])
        whole = np.maximum(whole, self._fetching_s(host, device))
        whole = np.maximum(whole, self._slots_s(device, slots))
        seconds: Floats = np.maximum(window + self.rest_s, whole)
        return seconds

    def _slots_s(self, device: Ints, slots: Ints) -> Floats:
        """A slot is taken from where a visit begins to come in until it has been written back."""
        held = self.visit_in.lane_s + self.on_device.alone_s + self.visit_out.lane_s
        seconds: Floats = held[device] / np.maximum(slots, 1)
        return seconds

    def _host(self, of: Callable[[Work], Floats], host: Ints) -> Floats:
        """The least over thread counts."""
        least: Floats = np.min([of(work)[host] for work in self.on_host], axis=0)
        return least

    def _resources(self, host: Ints, device: Ints, resident: Ints, slots: Ints) -> Floats:
        """What must happen within W, on each resource."""
        beyond = device - slots
        least_s = np.full(host.shape, self.forward_s + self.workload.pipeline_idle_s)
        for name in ("dram", "cores", "h2d", "d2h", "link", "device"):
            crossing = self.visit_in.on(name)[beyond] + self.visit_out.on(name)[beyond]
            updates = self._host(lambda work: work.on(name), host)  # noqa: B023 - called at once
            updates = updates + self.on_device.on(name)[device + resident]
            inside = crossing + updates + self.parameter.on(name)[host]
            if name == "device":
                inside = inside + self.forward_s
            least_s = np.maximum(least_s, inside)
        # Visits can come in during backward from the last layer's end on.
        early_s = float(self.backward[:-1].sum())
        coming = self.visit_in.on("h2d")[device] + self.parameter.on("h2d")[host]
        within: Floats = np.maximum(least_s, coming - early_s)
        return within

    def _whole(self, host: Ints, device: Ints) -> Floats:
        """What a whole iteration asks of the resources that work during backward too."""
        micro = self.workload.gradient_accumulation_steps
        least_s = np.zeros(host.shape)
        for name in ("dram", "h2d", "d2h", "link"):
            crossing = self.visit_in.on(name) + self.visit_out.on(name)
            home = self.parameter.on(name) + micro * self.gradient.on(name)
            home = home + (micro - 1) * self.fetch.on(name)
            updates = self._host(lambda work: work.on(name), host)  # noqa: B023 - called at once
            least_s = np.maximum(least_s, crossing[device] + home[host] + updates)
        return least_s

    def _chains(self, host: Ints, device: Ints, resident: Ints, slots: Ints) -> Floats:
        """Ops that follow one another, for the best choice of the last three subgroups."""
        lanes = (
            self._host_chain(host), self._visit_chain(device, slots),
            self.on_device.lane_s[resident],
        )  # fmt: skip
        some = (host > 0, device > 0, resident > 0)
        tails = [*self.tails, np.inf, np.inf][:3]  # no third kind where there are two subgroups
        shortest: Floats = np.min(
            [
                np.max(
                    [np.where(some[k], lanes[k] + tails[place], 0.0) for place, k in enumerate(p)],
                    axis=0,
                )
                for p in permutations(range(3))
            ],
            axis=0,
        )
        return shortest

    def _host_chain(self, host: Ints) -> Floats:
        """All host updates, and the last one's parameters."""
        ended: Floats = self._updates_s(host) + self.parameter.one_s
        return ended

    def _updates_s(self, host: Ints) -> Floats:
        """The least of so many host updates one after the other."""
        updates: Floats = self._host(lambda work: work.alone_s, host)
        for name in ("dram", "cores"):
            updates = np.maximum(updates, self._host(lambda work: work.on(name), host))  # noqa: B023 - called at once
        return updates

    def _late(self, hosted: int) -> float:
        """The iteration that gradients on their way home allow, with so many host subgroups.

        From the end of one iteration's first forward to the next one's. No update begins before the
        norm, and none before its gradient is home: gradients of all micro-batches come one after
        the other, from backward of the last layer on, in the order of backward. So for each m:
        behind the first gradient of the m that come last there are m updates and a copy, or an
        update and m copies, and the forward that is behind any of those m. With h host subgroups of
        n, the one with the m-th lowest index is at most number n - h + m - 1.
        """
        if not hosted:
            return 0.0
        micro = self.workload.gradient_accumulation_steps
        last = np.arange(1, hosted + 1)
        highest = self.count - hosted + last - 1
        home = self.gradient.lane_s
        by_lane = self.backward[-1] + (micro - 1) * home[hosted] + home[hosted - last + 1]
        by_backward = self.rest_s - self.left_s[highest] + self.gradient.one_s
        begin_s = np.maximum(np.maximum(by_lane, by_backward), self.rest_s)
        one, lane_s = self._updates_s(np.array([1])), self.parameter.lane_s[last]
        ended = np.maximum(self._updates_s(last) + self.parameter.one_s, one + lane_s)
        behind = np.array(self.tails[::-1])[highest]
        return float((begin_s + ended + behind).max())

    def _named_s(self) -> Floats:
        """The same by names, for few subgroups of unequal size: the lowest of all choices of which
        ones are on the host, by their number. What the host does not update the device does.
        """
        w, micro = self.workload, self.workload.gradient_accumulation_steps
        count, sizes = self.count, np.array(w.subgroups, dtype=np.float64)
        chosen = (np.arange(2**count)[:, None] >> np.arange(count)) & 1 > 0  # a row per choice
        behind = np.array(self.tails[::-1])
        update_s, home_s, copy_s = self.update_s, self.home_s, self.copy_s
        hosted = chosen @ sizes
        least = np.where(chosen, sizes, np.inf).min(axis=1, initial=np.inf)
        first = chosen.argmax(axis=1)  # its gradient comes last
        some = hosted > 0
        size, tail = sizes[first], behind[first]
        after_norm = np.maximum(hosted * update_s + least * copy_s, hosted * copy_s)
        late = self.backward[-1] + micro * hosted * home_s + size * (update_s + copy_s) + tail
        alone = (chosen * (sizes * (update_s + copy_s) + behind)).max(axis=1)
        window = np.maximum(after_norm + self.tails[0], alone)
        seconds = np.where(some, np.maximum(self.rest_s + window, late), 0.0)
        on_device = (sizes.sum() - hosted) * self.device_s
        seconds = np.maximum(seconds, self.rest_s + self.forward_s + on_device)
        floors = np.full(count + 1, np.inf)
        np.minimum.at(floors, chosen.sum(axis=1), seconds)
        return floors

    def _fetching_s(self, host: Ints, device: Ints) -> Floats:
        """The iteration that the sums of gradients allow which accumulation fetches, from the
        second micro-batch's backward on.

        One lane brings them all, then the new parameters. Visits come in beside them, behind the
        last micro-batch's first layer. And host updates write to slots that are free when the lane
        has brought an earlier one's parameters: all but the first two follow the first copy.
        """
        micro = self.workload.gradient_accumulation_steps
        if micro == 1:
            return np.zeros(host.shape)
        fetched = self.fetch_begin_s + (micro - 1) * self.fetch.lane_s[host]
        link = (micro - 1) * self.fetch.on("h2d") + self.parameter.on("h2d")
        coming = self.fetch_begin_s + link[host] + self.visit_in.on("h2d")[device]
        # Visits in the last micro-batch, with one fetch of all gradients.
        last_s = self.rest_s - float(self.backward[:-1].sum())
        one = (self.fetch.on("h2d") + self.parameter.on("h2d"))[host]
        one = last_s + one + self.visit_in.on("h2d")[device]
        coming = np.maximum(coming, np.where(device > 0, one, 0.0))
        waiting = self._updates_s(np.maximum(host - PARAMETER_SLOTS, 0)) + self.parameter.one_s
        waiting = np.where(host > PARAMETER_SLOTS, waiting, 0.0) + self.parameter.one_s
        least_s = np.maximum(coming, fetched + np.maximum(self.parameter.lane_s[host], waiting))
        seconds: Floats = np.where(host > 0, least_s + self.tails[0], 0.0)
        return seconds

    def _visit_chain(self, device: Ints, slots: Ints) -> Floats:
        """Until the last visit's update has ended."""
        update, back, come = self.on_device.one_s, self.visit_out.one_s, self.visit_in.one_s
        beyond = np.maximum(device - slots, 0)
        between = np.maximum(beyond - 1, 0)
        crossing = [self.visit_in.lane_s[between], self.visit_out.lane_s[between]]
        crossing += [
            self.visit_in.on(name)[between] + self.visit_out.on(name)[between]
            for name in ("dram", "cores", "link")
        ]
        in_turn = update + back + np.max(crossing, axis=0) + come + update
        cycles = (device - 1) // np.maximum(slots, 1)
        by_slot = update + cycles * (back + come + update)
        early_s = float(self.backward[:-1].sum())
        least_s = np.maximum(self.visit_in.lane_s[device] - early_s, 0.0) + update
        return np.where(beyond > 0, np.maximum(least_s, np.maximum(in_turn, by_slot)), least_s)
