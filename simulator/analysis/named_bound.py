"""How fast a plan of few subgroups could be, by name: which ones are hosted, visit and stay.

`simulator.analysis.counted_bound` takes any k subgroups for the k smallest, and any last one for
the last layer's. Of few and large subgroups that gives too much away: here every choice of them is
looked at. What follows holds for every order in which the queues update them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from simulator.analysis.host_sequence import lowest_end_s
from simulator.analysis.window_times import Times
from simulator.update.recipes import PARAMETER_SLOTS, RECIPES, Placement

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
MOST_CHOSEN = 13  # subgroups: 3**13 choices
PLACEMENTS: tuple[Placement, ...] = tuple(RECIPES)
HOST, VISIT, RESIDENT = (PLACEMENTS.index(p) for p in ("host", "device", "resident"))


class NamedBounds:
    """The lowest bound of all choices of so many host, visiting and resident subgroups."""

    def __init__(self, times: Times, device_bytes: float) -> None:
        """Of at most MOST_CHOSEN subgroups."""
        self.times, w = times, times.workload
        self.sizes = np.array(w.subgroups, dtype=np.float64)
        self.codes, self.key = _choices(len(self.sizes))
        activations = sum(layer.activation_bytes for layer in w.layers)
        self.room = device_bytes - w.device_base_bytes - activations

    def lowest_s(self, host: int, device: int, slots: int) -> float:
        """The least iteration of any choice that fits; ``inf`` where none does."""
        codes = self._fitting(host, device, slots)
        return _Chosen(self.times, codes, slots).lowest_s() if len(codes) else np.inf

    def most_promising(
        self, host: int, device: int, slots: int, most: int
    ) -> list[tuple[Placement, ...]]:
        """At most so many of the choices that fit, lowest bound first."""
        codes = self._fitting(host, device, slots)
        order = np.argsort(_Chosen(self.times, codes, slots).floors(), kind="stable")
        return [tuple(PLACEMENTS[code] for code in codes[i]) for i in order[:most]]

    def _fitting(self, host: int, device: int, slots: int) -> NDArray[np.int8]:
        codes = self.codes[self.key == host * (len(self.sizes) + 1) + device]
        w = self.times.workload
        stays, visits = codes == RESIDENT, codes == VISIT
        largest = (visits * self.sizes).max(axis=1)
        held = w.optimizer_state.state_bytes * (stays @ self.sizes + slots * largest)
        held += w.grad_bytes_per_param * ((stays | visits) @ self.sizes)
        fitting: NDArray[np.int8] = codes[held <= self.room]
        return fitting


@lru_cache(maxsize=2)
def _choices(count: int) -> tuple[NDArray[np.int8], NDArray[np.int16]]:
    """All placements of so many subgroups, and how many hosts and visits each has, as one number.

    Of 13 subgroups they take 24 MB, and a tenth of a second to make: kept, as who looks at a model
    asks for its bound again at each move.
    """
    numbers = np.arange(3**count, dtype=np.int32)
    codes = np.empty((len(numbers), count), dtype=np.int8)
    key = np.zeros(len(numbers), dtype=np.int16)
    for i in range(count):
        codes[:, i] = numbers // 3**i % 3
        key += (codes[:, i] == HOST) * np.int16(count + 1) + (codes[:, i] == VISIT)
    for made in (codes, key):
        made.flags.writeable = False
    return codes, key


@dataclass
class _Prefix:
    """What is asked for up to one subgroup, in the order of the layers: arrays over choices."""

    hosts: Floats
    visits: Floats
    update_s: Floats  # on the host, in all
    copy_s: Floats
    shortest_update_s: Floats
    shortest_copy_s: Floats
    longest_s: list[Floats]  # host updates: as many as there are slots
    device_s: Floats
    in_s: Floats

    @classmethod
    def empty(cls, choices: int) -> _Prefix:
        def zero() -> Floats:
            return np.zeros(choices)

        never = np.full(choices, np.inf)
        longest = [zero() for _ in range(PARAMETER_SLOTS)]
        return cls(zero(), zero(), zero(), zero(), never, never, longest, zero(), zero())


class _Chosen:
    """Bounds of some choices with so many slots. Seconds are behind the end of a first forward."""

    def __init__(self, times: Times, codes: NDArray[np.int8], slots: int) -> None:
        self.times, self.slots = times, slots
        self.hosted, self.visiting = codes == HOST, codes == VISIT
        sizes = self.sizes = np.array(times.workload.subgroups, dtype=np.float64)
        visit = times.bytes.visit / times.bytes.gradient
        self.update_s, self.copy_s = sizes * times.update_s, sizes * times.copy_s
        self.home_s, self.fetch_s = sizes * times.home_s, sizes * times.fetch_s
        self.in_s, self.out_s = visit * self.fetch_s, visit * self.home_s
        self.device_s = sizes * times.device_s
        self.behind = np.array(times.tails[::-1])
        self.tails_s = self.copy_s + self.behind  # of a host update
        self.norm_s = times.rest_s
        self.released_s, self.fetched_s = self._gradients()
        fetches = times.workload.gradient_accumulation_steps - 1
        # Visits come in behind the last micro-batch's first layer, beside what is still fetched.
        fetch_s = self.hosted @ self.fetch_s
        self.fetching_s = (times.fetch_begin_s if fetches else 0.0) + fetches * fetch_s
        self.last_fetch_s = fetch_s if fetches else np.zeros(len(codes))
        self.in_rate, self.out_rate = visit * times.fetch_s, visit * times.home_s
        least = np.sort(np.where(self.visiting, sizes, np.inf), axis=1)
        sums = np.cumsum(np.where(np.isinf(least), 0.0, least), axis=1)
        self.least = least
        self.sums = np.concatenate([np.zeros((len(codes), 1)), sums], axis=1)
        all_home = (self.hosted * self.released_s).max(axis=1)
        first = np.where(self.visiting, self.device_s, np.inf).min(axis=1)
        # The first write-back: behind its update, on its lane behind all gradients; and of the way
        # in, behind the last micro-batch's fetches and its own visit.
        self.early_s = self.norm_s - float(times.backward[:-1].sum())
        arrived = (
            self.early_s
            + self.last_fetch_s
            + self.in_rate * np.where(self.visiting.any(axis=1), self.least[:, 0], 0.0)
        )
        self.back_s = np.maximum(np.maximum(self.norm_s, arrived) + first, all_home)
        self._last_host()

    def _last_host(self) -> None:
        """Of the hosted subgroup that forward needs last: what follows from its being updated last,
        and from another one's being that. Only where copies end before the next update does.
        """
        times, rows = self.times, np.arange(len(self.hosted))
        last = self.hosted.shape[1] - 1 - self.hosted[:, ::-1].argmax(axis=1)
        others = self.hosted.copy()
        others[rows, last] = False
        self.other_copies_s = others @ self.copy_s
        behind_s = np.where(others, self.tails_s, np.inf).min(axis=1)
        self.other_last_s = self.norm_s + self.hosted @ self.update_s + behind_s
        self.behind_others_s = (self.update_s + self.copy_s + self.behind)[last]
        self.slow_copy_s = np.where(self.hosted, times.slowest_copies_s, 0.0).max(axis=1)
        shortest_s = np.where(self.hosted, self.update_s, np.inf).min(axis=1)
        accumulates = times.workload.gradient_accumulation_steps > 1
        self.keeps_pace = others.any(axis=1) & (self.slow_copy_s <= shortest_s) & (not accumulates)

    def _gradients(self) -> tuple[Floats, Floats]:
        """When each hosted gradient is home, shape (choices, subgroups), and the last fetch done.

        Both lanes keep to the order of backward, so this is no choice of a plan's.
        """
        times, micro = self.times, self.times.workload.gradient_accumulation_steps
        pass_s = float(times.backward.sum())
        down, up = (np.zeros(len(self.hosted)) for _ in range(2))
        released = np.zeros(self.hosted.shape)
        for micro_batch in range(micro):
            begin_s = micro_batch * (pass_s + times.forward_s) + pass_s
            for i in reversed(range(self.hosted.shape[1])):
                on, ready = self.hosted[:, i], np.full(len(down), begin_s - times.left_s[i])
                if micro_batch:
                    ready = np.maximum(np.maximum(up, ready), released[:, i]) + self.fetch_s[i]
                    up = np.where(on, ready, up)
                down = np.where(on, np.maximum(down, ready) + self.home_s[i], down)
                released[:, i] = np.where(on, down, 0.0)
        return released, up

    def lowest_s(self) -> float:
        """Of all choices, with their host updates in the best of sequences."""
        floors = self.floors()
        ready = np.maximum(self.norm_s, self.released_s)
        order = np.argsort(floors, kind="stable")
        return lowest_end_s(self.hosted, ready, self.update_s, self.tails_s, floors, order)

    def floors(self) -> Floats:
        """Of each choice: of all subgroups up to one, the last is followed by its forward."""
        w = self.times.workload
        on_device = (~self.hosted) @ self.device_s
        # Updates go on in a pipeline's bubble.
        least_s: Floats = np.maximum(w.pipeline_idle_s, on_device) + self.times.forward_s
        least_s = self.norm_s + least_s
        # A slot is taken from where a visit begins to come in until it has been written back.
        held = self.visiting @ (self.in_s + self.device_s + self.out_s)
        least_s = np.maximum(least_s, held / max(1, self.slots))
        least_s = np.maximum(least_s, self._resources())
        prefix = _Prefix.empty(len(self.hosted))
        for i in range(self.hosted.shape[1]):
            self._add(prefix, i)
            ended = np.max([*self._hosts(prefix, i), *self._visits(prefix, i)], axis=0)
            least_s = np.maximum(least_s, ended + self.behind[i])
        floors: Floats = np.maximum(least_s, self._first_visit())
        return floors

    def _first_visit(self) -> Floats:
        """Of visits beside accumulated gradients: the first one comes in behind the norm; or once
        the last micro-batch's first layer is through, beside what is fetched then, and new
        parameters come behind that; or it waits for its slot even then, and all gradients have gone
        home behind that slot's last write-back.
        """
        times, micro = self.times, self.times.workload.gradient_accumulation_steps
        if micro == 1:
            return np.zeros(len(self.hosted))
        hosts = self.hosted.sum(axis=1)
        first = self.hosted.argmax(axis=1)  # whose gradient comes home last
        last = self.hosted.shape[1] - 1 - self.hosted[:, ::-1].argmax(axis=1)
        update_behind_s = (self.update_s + self.tails_s)[first]
        hindered_s = self.early_s + micro * (self.hosted @ self.home_s) + update_behind_s
        # Ops that ask for the same capacities run at the same part of their full speeds.
        fetch = self.hosted @ self.sizes * times.bytes.gradient
        visit = np.where(np.isinf(self.least[:, 0]), 0.0, self.least[:, 0]) * times.bytes.visit
        largest = (self.hosted * self.sizes).max(axis=1) * times.bytes.gradient
        part = np.minimum(1.0, times.copy_speed(visit) / times.copy_speed(largest))
        both_s = (fetch + np.minimum(part * fetch, visit)) / times.limits["h2d"]
        fetched_s = np.maximum(self.fetched_s, self.early_s + both_s)
        updates_s = np.sort(self.hosted * self.update_s, axis=1)[:, :-PARAMETER_SLOTS].sum(axis=1)
        copy_s = np.where(self.hosted, self.copy_s, np.inf).min(axis=1)
        held_s = np.where(hosts > PARAMETER_SLOTS, updates_s + copy_s, 0.0) + copy_s
        begun_early_s = np.maximum(
            fetched_s + np.maximum(self.hosted @ self.copy_s, held_s) + self.behind[last],
            fetched_s + self.home_s[first] + update_behind_s,
        )
        beyond = np.maximum(self.visiting.sum(axis=1) - self.slots, 0).astype(np.int64)
        behind_norm_s = self._one_way(
            np.maximum(self.norm_s, self.fetched_s), self.hosted @ self.copy_s, beyond
        )
        behind_norm_s = np.where(beyond > 0, behind_norm_s + self._least_behind(), 0.0)
        least_s = np.minimum(behind_norm_s, np.minimum(begun_early_s, hindered_s))
        some: Floats = np.where((hosts > 0) & self.visiting.any(axis=1), least_s, 0.0)
        return some

    def _least_behind(self) -> Floats:
        """The least forward behind any subgroup that is on the link."""
        moved = self.hosted | self.visiting
        tail_s = np.where(moved, self.behind, np.inf).min(axis=1)
        least_s: Floats = np.where(moved.any(axis=1), tail_s, 0.0)
        return least_s

    def _resources(self) -> Floats:
        """All updates and new parameters, and the visits beyond the slots, and behind the last of
        them its forward; in an iteration, all visits and gradients too.
        """
        t, sizes = self.times, self.sizes
        micro = t.workload.gradient_accumulation_steps
        hosted, visiting = self.hosted @ sizes, self.visiting @ sizes
        count = self.visiting.sum(axis=1)
        beyond = self._sum(np.maximum(count - self.slots, 0))
        tail_s = self._least_behind()
        least_s = np.zeros(len(self.hosted))
        for name in ("dram", "cores", "h2d", "d2h", "link"):
            crossing = t.visit_in.per_element(name) + t.visit_out.per_element(name)
            updates = min(work.per_element(name) for work in t.on_host)
            updates += t.parameter.per_element(name)
            home = micro * t.gradient.per_element(name) + (micro - 1) * t.fetch.per_element(name)
            device = (sizes.sum() - hosted) * t.on_device.per_element(name)
            inside = self.norm_s + beyond * crossing + hosted * updates + device
            whole = visiting * crossing + hosted * (updates + home)
            if name == "cores":  # which backward takes too, and updates of those that stay
                least_s = np.maximum(least_s, inside)
            else:
                least_s = np.maximum(least_s, np.maximum(inside + tail_s, whole))
        return least_s

    def _add(self, p: _Prefix, i: int) -> None:
        on, visits = self.hosted[:, i], self.visiting[:, i]
        p.hosts, p.visits = p.hosts + on, p.visits + visits
        p.update_s = p.update_s + on * self.update_s[i]
        p.copy_s = p.copy_s + on * self.copy_s[i]
        shorter = np.where(on, self.update_s[i], np.inf), np.where(on, self.copy_s[i], np.inf)
        p.shortest_update_s = np.minimum(p.shortest_update_s, shorter[0])
        p.shortest_copy_s = np.minimum(p.shortest_copy_s, shorter[1])
        longer = on * self.update_s[i]
        for place, longest in enumerate(p.longest_s):
            p.longest_s[place] = np.maximum(longest, longer)
            longer = np.minimum(longest, longer)
        p.device_s = p.device_s + ~on * self.device_s[i]
        p.in_s = p.in_s + visits * self.in_s[i]

    def _hosts(self, p: _Prefix, i: int) -> list[Floats]:
        """Gradients arrive in the reverse order, so none of these updates begins before this one's
        is home; behind the last update there is its copy, before the first copy its update.
        """
        begin_s = np.maximum(self.norm_s, self.released_s[:, i])
        ended = [
            begin_s + p.update_s + p.shortest_copy_s,
            begin_s + p.shortest_update_s + p.copy_s,
            self.fetched_s + p.copy_s,
            # Copies follow all fetches on their lane, and all updates but the first few wait for a
            # slot that an earlier one's copy has left.
            np.where(
                p.hosts > PARAMETER_SLOTS,
                self.fetched_s + self.copy_s.min() + p.update_s - sum(p.longest_s)
                + p.shortest_copy_s,
                0.0,
            ),
        ]  # fmt: skip
        return [np.where(self.hosted[:, i], seconds, 0.0) for seconds in ended]

    def _visits(self, p: _Prefix, i: int) -> list[Floats]:
        """Visits beyond the slots come in behind the write-back of an earlier one; they share the
        way in with new parameters.
        """
        times = self.times
        on_device = self.norm_s + p.device_s
        coming = p.in_s + p.copy_s
        fetched = np.maximum(self.early_s + self.last_fetch_s, self.fetching_s)
        coming = coming + np.where(p.hosts > 0, fetched, self.early_s)
        coming = np.where(p.in_s > 0, coming, 0.0)
        beyond = np.maximum(p.visits - self.slots, 0).astype(np.int64)
        some = beyond > 0
        one_s, first = float(self.device_s.min()), np.where(some, self.least[:, 0], 0.0)
        more, last = self._sum(beyond + 1), self._nth(beyond)
        # Write-backs of others and its own way in; the first write-back and all ways in.
        swapped = np.where(self.in_rate >= self.out_rate, first, last)
        in_turn = self.back_s + self.out_rate * more + (self.in_rate - self.out_rate) * swapped
        swapped = np.where(self.out_rate >= self.in_rate, first, last)
        in_line = self.back_s + self.in_rate * more + (self.out_rate - self.in_rate) * swapped
        # New parameters that can have come in before any of those visits: a later first write-back
        # lets no more of them through than it takes itself.
        back_s = self.back_s + self.out_rate * last
        before = np.minimum(
            np.maximum(0.0, back_s - np.maximum(self.norm_s, self.fetched_s)),
            (back_s - self.norm_s) / times.update_s * times.copy_s,
        )
        shared = in_line + np.maximum(0.0, p.copy_s - before)
        # With the last host subgroup updated last, the others' copies share the way with visits;
        # else more of forward follows.
        others = in_line + np.maximum(0.0, self.other_copies_s - before) + one_s + self.behind[i]
        in_time = others - self.behind_others_s + self.slow_copy_s <= in_line
        others = np.where(self.keeps_pace & in_time, np.minimum(others, self.other_last_s), 0.0)
        by_slot = (self.in_rate + self.out_rate) * self._sum(beyond) / max(1, self.slots)
        crossing = [in_turn + one_s, in_line + one_s, shared, self.norm_s + by_slot + one_s]
        begun_s = self.early_s + self.last_fetch_s
        crossing += [others - self.behind[i], self._one_way(begun_s, p.copy_s, beyond)]
        return [on_device, coming, *(np.where(some, seconds, 0.0) for seconds in crossing)]

    def _one_way(self, begun_s: Floats, copied_s: Floats, beyond: NDArray[np.int64]) -> Floats:
        """All that comes in from ``begun_s`` on: visits and parameters. While the first write-back
        leaves, no visit can: and of parameters only what is updated then, and what waits in the
        slots.
        """
        out_s = self.out_rate * np.where(beyond > 0, self.least[:, 0], 0.0)
        meanwhile = out_s / self.times.update_s * self.times.copy_s
        waiting = PARAMETER_SLOTS * self.copy_s.max()
        copies_s = np.maximum(0.0, copied_s - np.minimum(out_s, meanwhile + waiting))
        ended_s: Floats = begun_s + self.in_rate * self._sum(beyond + 1) + out_s + copies_s
        return ended_s

    def _sum(self, number: NDArray[np.int64]) -> Floats:
        """Of so many smallest visits."""
        chosen = np.minimum(number, self.sums.shape[1] - 1)
        result: Floats = np.take_along_axis(self.sums, chosen[:, None], axis=1)[:, 0]
        return result

    def _nth(self, number: NDArray[np.int64]) -> Floats:
        chosen = np.minimum(number, self.least.shape[1] - 1)
        nth = np.take_along_axis(self.least, chosen[:, None], axis=1)[:, 0]
        result: Floats = np.where(np.isinf(nth), 0.0, nth)
        return result
