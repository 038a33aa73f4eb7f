"""What the linear program of the window is asked for, by numbers of subgroups per placement.

The window reaches from the norm barrier until the first forward has ended; its segments and
requirements are those of `simulator.analysis.sharing_modes`.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from simulator.analysis.lane_work import copy_op
from simulator.analysis.sharing_modes import REQUIREMENTS, HostUpdates, WindowProgram, modes
from simulator.analysis.window_times import Times
from simulator.schedule import OpKind

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Window:
    """The program of one workload on one machine, and what it has to do."""

    def __init__(self, times: Times) -> None:
        self.times = times

    @cached_property
    def program(self) -> WindowProgram:
        """Of the lanes' ops, the smallest and the largest of each."""
        w, machine = self.times.workload, self.times.machine
        sizes = sorted({min(w.subgroups), max(w.subgroups)})
        amounts = self.times.bytes
        state, wire, dram = amounts.visit, amounts.wire, amounts.host_traffic
        lanes = [
            [copy_op(OpKind.STATE_H2D, n * state) for n in sizes],
            [copy_op(OpKind.PARAMETER_H2D, n * wire) for n in sizes],
            [copy_op(OpKind.STATE_D2H, n * state) for n in sizes],
        ]
        rates = tuple(self.times.host_rates)
        scales = bool(machine.host_adam_by_threads)
        # Of parameters that come home, the smallest have the largest share of latency.
        return WindowProgram(
            modes(lanes, HostUpdates(rates, dram, scales), machine, self.times.limits),
            sizes[0] / float(self.times.parameter.alone_s[1]),
        )

    def requirements(
        self,
        counts: tuple[Ints, Ints, Ints],
        elements: Floats,
        beyond_elements: Floats,
        visit_last: bool,
        early_home: bool,
    ) -> Floats:
        """What the window's program has to do, shape (counts, REQUIREMENTS).

        One of the two lanes that finish late holds the last subgroup; behind the other one's last
        update there is more of forward to do. Write-backs come behind all gradients on their lane.

        Args:
            counts: host, device and slots.
            elements, beyond_elements: at least so many on the host, and in the visits beyond the
                slots.
        """
        host, device, slots = counts
        beyond = np.maximum(device - slots, 0)
        visits, hosts = beyond > 0, host > 0
        least = np.concatenate([[0.0], np.cumsum(np.sort(self.times.workload.subgroups))])
        last, other = [*self.times.tails, 0.0][:2]
        other = min(other, last) if len(self.times.tails) < 2 else other
        update_s, copy_s = self.times.on_device.one_s, self.times.parameter.one_s
        # Before the window's end: when visits and host updates have ended, beyond the tail.
        visits_s = update_s + np.where(hosts & (not visit_last), other - last, 0.0)
        hosts_s = copy_s + np.where(visits & visit_last, other - last, 0.0)
        both = visits & hosts
        end_s = np.where(both, np.minimum(visits_s, hosts_s), np.where(hosts, hosts_s, visits_s))
        zero, one_in_s = np.zeros(host.shape), self.times.visit_in.alone_s[1]
        between = np.maximum(beyond - 1, 0)
        first_s = min(float(work.alone_s[1]) for work in self.times.on_host)
        anything_s = float(self.times.parameter.alone_s[-1])
        up, down = (
            self.times.machine.rate("h2d_bytes_per_s"),
            self.times.machine.rate("d2h_bytes_per_s"),
        )
        needed = {
            "head_s": visits * np.maximum(update_s, self._lag_s(host, elements)),
            "first_back_s": visits * self.times.visit_out.alone_s[1],
            "coming_s": self.times.visit_in.alone_s[between],
            "leaving_s": self.times.visit_out.alone_s[between],
            "last_in_s": visits * one_in_s,
            "leaving_beside_s": visits * self._leaving_beside_s(host, device, slots),
            # No longer than the last arrival, so that no other one falls into it.
            "no_host_s": np.where(both, np.clip(hosts_s - visits_s, 0.0, one_in_s), 0.0),
            "host_on_s": np.where(both, np.maximum(visits_s - hosts_s, 0.0), 0.0),
            "last_copy_s": np.where(visits | hosts, end_s, 0.0),
            "tail_s": zero + np.where(visits | hosts, last, 0.0),
            "all_coming_s": visits * beyond_elements * self.times.bytes.visit / up,
            "all_leaving_s": visits * beyond_elements * self.times.bytes.visit / down,
            "host_params": np.maximum(least[host], elements),
            "home_s": np.maximum(
                self.times.parameter.alone_s[host], elements * self.times.bytes.wire / up
            ),
            "updated_first": zero,
            # Nothing comes home before the first host update has ended.
            "idle_home_s": both * (first_s if early_home else 0.0),
            "no_early_home_s": np.where(both & (not early_home), 0.0, -anything_s),
        }
        return np.stack([needed[name] for name in REQUIREMENTS], axis=1)

    def _leaving_beside_s(self, host: Ints, device: Ints, slots: Ints) -> Floats:
        """Of the visit before the last, what leaves at the least while the last one comes in: with
        two slots or more nothing else keeps it but updates on the device in front of its own.

        Both cross the one link: it goes as fast as the other one, or as its own way lets it.
        """
        largest = np.cumsum(np.sort(self.times.workload.subgroups)[::-1])
        before = np.maximum(self.times.count - host - device + slots - 1, 1)
        updates_s = (
            before * self.times.machine.launch_latency_s + largest[before - 1] * self.times.device_s
        )
        beside_s = self.times.visit_in.one_s - self.times.stretch("device", "cores") * updates_s
        part = min(1.0, self.times.limits["d2h"] / self.times.machine.rate("d2h_bytes_per_s"))
        leaving_s = np.clip(part * beside_s, 0.0, self.times.visit_out.alone_s[1])
        least_s: Floats = np.where(slots > 1, leaving_s, 0.0)
        return least_s

    def _lag_s(self, host: Ints, elements: Floats) -> Floats:
        """How long behind the norm the first write-back can begin: gradients are home."""
        micro = self.times.workload.gradient_accumulation_steps
        home = np.maximum(self.times.gradient.lane_s[host], elements * self.times.home_s)
        all_home = self.times.backward[-1] + micro * home
        if micro > 1:  # the last fetches share the way in with the first visit
            early_s = self.times.rest_s - float(self.times.backward[:-1].sum())
            all_home = np.maximum(
                all_home, early_s + elements * self.times.fetch_s + self.times.visit_in.one_s
            )
        lag: Floats = np.maximum(0.0, all_home - self.times.rest_s)
        return lag
