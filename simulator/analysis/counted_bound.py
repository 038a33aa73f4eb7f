"""How fast any plan with so many host, visiting and resident subgroups could be.

The linear program of `simulator.analysis.bound` treats parameters as a fluid. Here subgroups are
whole, and lanes have to fill and to drain: what follows holds for every order of the placements,
and for every order in which each queue updates its subgroups.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import permutations, product

import numpy as np
from numpy.typing import NDArray

from simulator.analysis.sharing_modes import REQUIREMENTS, HostUpdates, WindowProgram, modes
from simulator.engines.reference import alone_s, capacities, demands
from simulator.machine import Machine
from simulator.schedule import Lane, Op, OpKind
from simulator.update.recipes import Bytes
from simulator.workload import Workload

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
MOST_CUTS = 60
INTERVALS = 12
MOST_NAMED = 10  # subgroups, of which every choice is looked at
MOST_SUBGROUPS = 128  # n**3 / 6 counts of n subgroups: more are left to the linear program


@dataclass(frozen=True, slots=True)
class CountBounds:
    """All that fits into device memory, fastest first.

    Attributes:
        host, device, resident, slots: how many of each, shape (counts,).
        iteration_s: no plan with these counts has a shorter steady iteration, shape (counts,).
    """

    host: Ints
    device: Ints
    resident: Ints
    slots: Ints
    iteration_s: Floats


def count_bounds(workload: Workload, machine: Machine, device_bytes: float) -> CountBounds:
    """A lower bound for each number of host, visiting and resident subgroups and of slots.

    From the norm barrier until the first forward has ended (``W``), with the rest of the iteration
    being serial on the device:

    - every resource has to fit what must happen within W: all updates, all parameters that come
      home, and the visits beyond the slots, in and out;
    - the last host update is followed by its copy and by the forward of its layer and of those
      behind, whichever subgroup it is;
    - gradients come home in the order of backward, those of the first layers last: the updates of
      any that come last follow the first of them (`_Times.late_s`);
    - with more visits than slots, the last visit comes in behind the write-back of an earlier one,
      behind the first device update; each slot's visits follow one another.

    Subgroups of unequal size: any k of them are taken for the k smallest.

    Raises:
        ValueError: the workload has more than MOST_SUBGROUPS subgroups.
    """
    count = len(workload.subgroups)
    if count > MOST_SUBGROUPS:
        raise ValueError(
            f"at most {MOST_SUBGROUPS} subgroups can be counted out, but got {count}: use the "
            "linear program (simulator.analysis.bound.bound), or a larger sub_group_size"
        )
    host, device, resident, slots = _fitting(workload, device_bytes)
    times = _Times(workload, machine)
    seconds = times.iteration_s(host, device, resident, slots)
    seconds = np.maximum(seconds, _by_elements(times, device_bytes, host, device, resident, slots))
    if len(seconds):
        seconds = _shared(times, machine, seconds, (host, device, slots))
    order = np.argsort(seconds, kind="stable")
    return CountBounds(host[order], device[order], resident[order], slots[order], seconds[order])


def _shared(
    times: _Times, machine: Machine, seconds: Floats, counts: tuple[Ints, Ints, Ints]
) -> Floats:
    """Cuts of the window's linear program, until the lowest bound is as high as it gets.

    The last subgroup is a visit, or it is not; the first host update has ended before the first
    write-back has, or it has not: the shortest window of these cases counts.
    """
    program = times.program(machine)
    cases = product((False, True), repeat=2)
    asked = [times.asked(*counts, visit_last, early_home) for visit_last, early_home in cases]
    windows = [np.zeros(len(seconds)) for _ in asked]
    raised = seconds
    for _ in range(MOST_CUTS):
        lowest = int(np.argmin(raised))
        before = raised[lowest]
        for case in asked:
            cut = program.cut(case[lowest])
            windows = [np.maximum(w, a @ cut) for w, a in zip(windows, asked, strict=True)]
        raised = np.maximum(seconds, np.min(windows, axis=0) + times.rest_s)
        if raised.min() <= before * (1 + 1e-7):
            break
    return raised


def _fitting(w: Workload, device_bytes: float) -> tuple[Ints, Ints, Ints, Ints]:
    """Counts whose state, slots, gradients and activations fit."""
    n = len(w.subgroups)
    d, r, s = np.meshgrid(*(np.arange(n + 1),) * 3, indexing="ij", sparse=True)
    whole = (d + r <= n) & (s <= d) & ((s > 0) | (d == 0))
    device, resident, slots = (np.asarray(a, dtype=np.int64) for a in np.nonzero(whole))
    least = np.concatenate([[0.0], np.cumsum(np.sort(w.subgroups))])
    # The slots are as large as the largest visit, which is at least the device-th smallest; and
    # together as large as that many visits, which are other subgroups than the residents.
    largest = np.concatenate([[0.0], np.sort(w.subgroups)])
    held = np.maximum(least[resident] + slots * largest[device], least[resident + slots])
    held = w.optimizer_state.state_bytes * held
    activations = sum(layer.activation_bytes for layer in w.layers)
    gradients = w.grad_bytes_per_param * least[device + resident]
    fits = w.device_base_bytes + held + activations + gradients <= device_bytes
    device, resident, slots = device[fits], resident[fits], slots[fits]
    return n - device - resident, device, resident, slots


def _by_elements(
    times: _Times, device_bytes: float, host: Ints, device: Ints, resident: Ints, slots: Ints
) -> Floats:
    """What the elements ask for, however sizes are dealt out among the counts.

    Memory says how many elements are on the host at least. It is fewer the more elements visit
    beyond what the slots hold, each of which has to be written back behind all gradients: the
    lowest over all numbers of them, interval by interval.
    """
    w = times.workload
    sizes = np.sort(np.array(w.subgroups, dtype=np.float64))
    least, most = (np.concatenate([[0.0], np.cumsum(order)]) for order in (sizes, sizes[::-1]))
    state, grad = w.optimizer_state.state_bytes, w.grad_bytes_per_param
    room = device_bytes - w.device_base_bytes - sum(layer.activation_bytes for layer in w.layers)
    beyond = np.maximum(_spared(sizes, least)[device, slots], 0.0)
    lowest: Floats = np.full(host.shape, np.inf)
    for step in range(INTERVALS):
        low, high = beyond * step / INTERVALS, beyond * (step + 1) / INTERVALS
        # state * (residents + slots * largest visit) + grad * (residents + visits) <= room
        on_device = (room + state * high) / (state + grad)
        on_device = np.minimum(most[device + resident], on_device)
        elements = np.maximum(least[host], w.params - on_device)
        seconds = np.maximum(
            times.elements_s(host, elements),
            times.behind_gradients_s(device, slots, elements, low),
        )
        lowest = np.minimum(lowest, seconds)
    return lowest


def _spared(sizes: Floats, least: Floats) -> Floats:
    """The most elements that d visits have beyond s slots as large as the largest of them: shape
    (subgroups + 1, subgroups + 1); ``sizes`` ascend, ``least`` are their sums.
    """
    count = len(sizes)
    slots = np.arange(count + 1)
    spared = np.zeros((count + 1, count + 1))
    for visits in range(1, count + 1):
        last = np.arange(visits - 1, count)  # the largest visit, with the next smaller ones
        whole = least[last + 1] - least[last + 1 - visits]
        spared[visits] = (whole[:, None] - sizes[last][:, None] * slots).max(axis=0)
    return spared


class _Work:
    """The least that k ops of one kind take, one for each of k subgroups: arrays over k.

    Attributes:
        lane_s: of their lane, shape (subgroups + 1,).
        alone_s: the same where nothing is shared, with other ranks either.
        one_s: the least seconds of a single one.
    """

    def __init__(
        self, make: Callable[[int], Op], sizes: list[int], machine: Machine, have: dict[str, float]
    ) -> None:
        seconds, alones, self._amounts = [], [0.0], {name: [0.0] for name in have}
        for size in sizes:
            op = make(size)
            alone = alone_s(op, machine)
            asked = demands(op, machine, alone)
            slowest = max([1.0, *(asked[name] / have[name] for name in asked)])
            seconds.append(alone * slowest)
            alones.append(alone)
            for name in have:
                self._amounts[name].append(asked.get(name, 0.0) * alone)
        self._have = have
        self.lane_s = np.concatenate([[0.0], np.cumsum(seconds)])
        self.alone_s = np.cumsum(alones)
        self.one_s = float(seconds[0])

    def on(self, resource: str) -> Floats:
        """Seconds of a resource, were they alone on it; shape (subgroups + 1,)."""
        return np.cumsum(self._amounts[resource]) / self._have[resource]


class _Times:
    """The least times of a workload's ops on a machine, and what they add up to."""

    def __init__(self, w: Workload, machine: Machine) -> None:
        self.workload = w
        self.count = len(w.subgroups)
        self.have = capacities(machine, w.ranks_per_node)
        amounts = self.bytes = Bytes.of(w)
        state, grad, wire = amounts.visit, amounts.gradient, amounts.wire
        sizes = sorted(w.subgroups)

        def work(make: Callable[[int], Op]) -> _Work:
            return _Work(make, sizes, machine, self.have)

        self.visit_in = work(lambda n: _copy(OpKind.STATE_H2D, n * state))
        self.visit_out = work(lambda n: _copy(OpKind.STATE_D2H, n * state))
        self.gradient = work(lambda n: _copy(OpKind.GRADIENT_D2H, n * grad))
        self.fetch = work(lambda n: _copy(OpKind.GRADIENT_H2D, n * grad))
        self.parameter = work(lambda n: _copy(OpKind.PARAMETER_H2D, n * wire))
        self.on_device = work(_device_update)
        per_param = amounts.host_traffic

        def on_host(threads: float) -> _Work:
            return work(lambda n: _host_update(n, threads, per_param * n))

        threads = _thread_counts(machine, self.have["cores"])
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
        down = min(self.have["d2h"], machine.rate("d2h_bytes_per_s"))
        up = min(self.have["h2d"], machine.rate("h2d_bytes_per_s"))
        self.home_s, self.fetch_s = self.bytes.gradient / down, self.bytes.gradient / up
        self.copy_s = self.bytes.wire / up
        self.device_s = 1.0 / machine.rate("device_adam_params_per_s")

    def elements_s(self, host: Ints, elements: Floats) -> Floats:
        """What so many elements on the host ask for, in so many subgroups: as `_late`, for all of
        them at once.
        """
        micro = self.workload.gradient_accumulation_steps
        one_update, one_copy = self._updates_s(np.array([1]))[0], self.parameter.one_s
        updates, copies = elements * self.update_s, elements * self.copy_s
        window = np.maximum(updates + one_copy, one_update + copies) + self.tails[0]
        behind = np.array([0.0, *self.tails])[host]
        late = self.backward[-1] + micro * elements * self.home_s + one_update + one_copy + behind
        seconds = np.maximum(self.rest_s + window, late)
        if micro > 1:
            begin_s = float(self.backward.sum()) + self.forward_s + self.backward[-1]
            fetched = (micro - 1) * elements * self.fetch_s
            seconds = np.maximum(seconds, begin_s + fetched + copies + self.tails[0])
        asked: Floats = np.where(host > 0, seconds, 0.0)
        return asked

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
        asked: Floats = np.where(beyond > 0, np.maximum(behind, inside) + self.tails[0], 0.0)
        return asked

    def _passes(self, w: Workload) -> None:
        """Forward and backward of one micro-batch, and the forward behind each subgroup's layer."""
        micro = w.gradient_accumulation_steps
        forward = np.array([layer.forward_s for layer in w.layers]) / micro
        self.backward = np.array([layer.backward_s for layer in w.layers]) / micro
        self.forward_s = float(forward.sum())
        self.rest_s = w.backward_s + w.forward_s - self.forward_s
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
        seconds: Floats = np.maximum(window + self.rest_s, whole)
        return seconds

    def _host(self, of: Callable[[_Work], Floats], host: Ints) -> Floats:
        """The least over thread counts."""
        least: Floats = np.min([of(work)[host] for work in self.on_host], axis=0)
        return least

    def _resources(self, host: Ints, device: Ints, resident: Ints, slots: Ints) -> Floats:
        """What must happen within W, on each resource."""
        beyond = device - slots
        found = np.full(host.shape, self.forward_s + self.workload.pipeline_idle_s)
        for name in ("dram", "cores", "h2d", "d2h", "link", "device"):
            crossing = self.visit_in.on(name)[beyond] + self.visit_out.on(name)[beyond]
            updates = self._host(lambda work: work.on(name), host)  # noqa: B023 - called at once
            updates = updates + self.on_device.on(name)[device + resident]
            inside = crossing + updates + self.parameter.on(name)[host]
            if name == "device":
                inside = inside + self.forward_s
            found = np.maximum(found, inside)
        # Visits can come in during backward from the last layer's end on.
        early_s = float(self.backward[:-1].sum())
        coming = self.visit_in.on("h2d")[device] + self.parameter.on("h2d")[host]
        within: Floats = np.maximum(found, coming - early_s)
        return within

    def program(self, machine: Machine) -> WindowProgram:
        """Of the lanes' ops, the smallest and the largest of each."""
        w = self.workload
        sizes = sorted({min(w.subgroups), max(w.subgroups)})
        state, wire, dram = self.bytes.visit, self.bytes.wire, self.bytes.host_traffic
        lanes = [
            [_copy(OpKind.STATE_H2D, n * state) for n in sizes],
            [_copy(OpKind.PARAMETER_H2D, n * wire) for n in sizes],
            [_copy(OpKind.STATE_D2H, n * state) for n in sizes],
        ]
        rates = tuple(self.host_rates)
        scales = bool(machine.host_adam_by_threads)
        # Of parameters that come home, the smallest have the largest share of latency.
        return WindowProgram(
            modes(lanes, HostUpdates(rates, dram, scales), machine, self.have),
            sizes[0] / float(self.parameter.alone_s[1]),
        )

    def asked(
        self, host: Ints, device: Ints, slots: Ints, visit_last: bool, early_home: bool
    ) -> Floats:
        """What the window's program has to do, shape (counts, REQUIREMENTS).

        One of the two lanes that finish late holds the last subgroup; behind the other one's last
        update there is more of forward to do.
        """
        beyond = np.maximum(device - slots, 0)
        visits, hosts = beyond > 0, host > 0
        least = np.concatenate([[0.0], np.cumsum(np.sort(self.workload.subgroups))])
        last, other = [*self.tails, 0.0][:2]
        other = min(other, last) if len(self.tails) < 2 else other
        update_s, copy_s = self.on_device.one_s, self.parameter.one_s
        # Before the window's end: when visits and host updates have ended, beyond the tail.
        visits_s = update_s + np.where(hosts & (not visit_last), other - last, 0.0)
        hosts_s = copy_s + np.where(visits & visit_last, other - last, 0.0)
        both = visits & hosts
        end_s = np.where(both, np.minimum(visits_s, hosts_s), np.where(hosts, hosts_s, visits_s))
        zero, one_in_s = np.zeros(host.shape), self.visit_in.alone_s[1]
        between = np.maximum(beyond - 1, 0)
        first_s = min(float(work.alone_s[1]) for work in self.on_host)
        anything_s = float(self.parameter.alone_s[-1])
        asked = {
            "head_s": visits * update_s,
            "first_back_s": visits * self.visit_out.alone_s[1],
            "coming_s": self.visit_in.alone_s[between],
            "leaving_s": self.visit_out.alone_s[between],
            "last_in_s": visits * one_in_s,
            # No longer than the last arrival, so that no other one falls into it.
            "no_host_s": np.where(both, np.clip(hosts_s - visits_s, 0.0, one_in_s), 0.0),
            "host_on_s": np.where(both, np.maximum(visits_s - hosts_s, 0.0), 0.0),
            "last_copy_s": np.where(visits | hosts, end_s, 0.0),
            "tail_s": zero + np.where(visits | hosts, last, 0.0),
            "host_params": least[host],
            "home_s": self.parameter.alone_s[host],
            "updated_first": zero,
            # Nothing comes home before the first host update has ended.
            "idle_home_s": both * (first_s if early_home else 0.0),
            "no_early_home_s": np.where(both & (not early_home), 0.0, -anything_s),
        }
        return np.stack([asked[name] for name in REQUIREMENTS], axis=1)

    def _whole(self, host: Ints, device: Ints) -> Floats:
        """What a whole iteration asks of the resources that work during backward too."""
        micro = self.workload.gradient_accumulation_steps
        found = np.zeros(host.shape)
        for name in ("dram", "h2d", "d2h", "link"):
            crossing = self.visit_in.on(name) + self.visit_out.on(name)
            home = self.parameter.on(name) + micro * self.gradient.on(name)
            home = home + (micro - 1) * self.fetch.on(name)
            updates = self._host(lambda work: work.on(name), host)  # noqa: B023 - called at once
            found = np.maximum(found, crossing[device] + home[host] + updates)
        return found

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
        return max(float((begin_s + ended + behind).max()), self._fetched_s(hosted))

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

    def _fetched_s(self, hosted: int) -> float:
        """The iteration that the lane of fetched gradients allows: from the second micro-batch's
        backward on it brings them all, then the new parameters.
        """
        micro = self.workload.gradient_accumulation_steps
        if micro == 1:
            return 0.0
        begin_s = float(self.backward.sum()) + self.forward_s + self.backward[-1]
        fetched_s = (micro - 1) * self.fetch.lane_s[hosted] + self.parameter.lane_s[hosted]
        return float(begin_s + fetched_s + self.tails[0])

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
        found = np.maximum(self.visit_in.lane_s[device] - early_s, 0.0) + update
        return np.where(beyond > 0, np.maximum(found, np.maximum(in_turn, by_slot)), found)


def _copy(kind: OpKind, size_bytes: int) -> Op:
    down = kind in (OpKind.STATE_D2H, OpKind.GRADIENT_D2H)
    lane = Lane.D2H if down else Lane.H2D
    rate = "d2h_bytes_per_s" if down else "h2d_bytes_per_s"
    return Op(0, kind, lane, size_bytes, rate, dram_bytes=size_bytes)  # type: ignore[arg-type]


def _device_update(params: int) -> Op:
    return Op(
        0, OpKind.UPDATE_DEVICE, Lane.DEVICE_UPDATE, params, "device_adam_params_per_s",
        device_share=1.0,
    )  # fmt: skip


def _host_update(params: int, threads: float, dram_bytes: int) -> Op:
    return Op(
        0, OpKind.UPDATE_HOST, Lane.HOST, params, "host_adam_params_per_s",
        dram_bytes=dram_bytes, cores=threads,
    )  # fmt: skip


def _thread_counts(machine: Machine, cores: float) -> list[float]:
    """Between these the update's rate is linear in the threads, and shared cores add one more.

    Without a measured number of threads the simulator lets one of them run at the full rate.
    """
    measured = machine.host_adam_by_threads or (1,)
    return sorted({float(machine.cpu_cores), cores, *map(float, measured)})
