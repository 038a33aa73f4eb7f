"""How fast any plan with so many host, visiting and resident subgroups could be.

The linear program of `simulator.analysis.bound` treats parameters as a fluid. Here subgroups are
whole, and lanes have to fill and to drain: what follows holds for every order of the placements,
and for every order in which each queue updates its subgroups.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from simulator.analysis.named_bound import MOST_CHOSEN, NamedBounds
from simulator.analysis.window_program import Window
from simulator.analysis.window_times import Times
from simulator.machine import Machine
from simulator.workload import Workload

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Counts = tuple[Ints, Ints, Ints, Ints]  # of host, visiting and resident subgroups, and of slots
MOST_CUTS = 60
MOST_ROWS = 100_000  # that are asked for cuts: those with the lowest bounds without
INTERVALS, FINE_INTERVALS = 12, 60
BATCH, MOST_BATCHES = 64, 12  # counts that are looked at in fine intervals
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
      any that come last follow the first of them (`Times.late_s`);
    - with accumulation, new parameters come home behind all fetched sums (`Times._fetching_s`);
    - with more visits than slots, the last visit comes in behind the write-back of an earlier one,
      behind the first device update; each slot's visits follow one another, in an iteration too.

    Subgroups of unequal size: any k of them are taken for the k smallest; of few, the lowest bounds
    are those of the best choice by name (`simulator.analysis.named_bound`).

    Raises:
        ValueError: the workload has more than MOST_SUBGROUPS subgroups.
    """
    workload = workload.serial
    count = len(workload.subgroups)
    if count > MOST_SUBGROUPS:
        raise ValueError(
            f"at most {MOST_SUBGROUPS} subgroups can be counted out, but got {count}: use the "
            "linear program (simulator.analysis.bound.bound), or a larger sub_group_size"
        )
    counts = _fitting(workload, device_bytes)
    times = Times(workload, machine)
    seconds = times.iteration_s(*counts)
    if len(seconds):
        dealt = _dealt_out(times, device_bytes, counts, INTERVALS)
        window = Window(times)
        seconds = _shared(window, seconds, counts, dealt)
        seconds = _finer(window, device_bytes, seconds, counts)
    if len(workload.subgroups) <= MOST_CHOSEN:
        seconds = _named(NamedBounds(times, device_bytes), seconds, counts)
    order = np.argsort(seconds, kind="stable")[: np.isfinite(seconds).sum()]
    host, device, resident, slots = (column[order] for column in counts)
    return CountBounds(host, device, resident, slots, seconds[order])


def _raised(
    seconds: Floats, again: Callable[[Ints], Floats], batch: int, most_batches: int
) -> Floats:
    """The lowest raised to what ``again`` says of them, until one of those stays the lowest."""
    seconds, left = seconds.copy(), seconds.copy()
    for _ in range(most_batches):
        if left.min() > seconds.min() or left.min() == np.inf:
            break
        some = np.argsort(left, kind="stable")[:batch]
        seconds[some] = np.maximum(seconds[some], again(some))
        left[some] = np.inf
    return seconds


def _finer(window: Window, device_bytes: float, seconds: Floats, counts: Counts) -> Floats:
    """The lowest in more intervals."""
    times = window.times
    if len(set(times.workload.subgroups)) == 1:
        return seconds

    def again(some: Ints) -> Floats:
        few = (counts[0][some], counts[1][some], counts[2][some], counts[3][some])
        return _shared(
            window, seconds[some], few, _dealt_out(times, device_bytes, few, FINE_INTERVALS)
        )

    return _raised(seconds, again, BATCH, MOST_BATCHES)


def _named(named: NamedBounds, seconds: Floats, counts: Counts) -> Floats:
    """The lowest by what the best choice of subgroups allows."""
    hosts, visits, _, slots = counts

    def again(some: Ints) -> Floats:
        return np.array([named.lowest_s(int(hosts[i]), int(visits[i]), int(slots[i]))
                         for i in some])  # fmt: skip

    return _raised(seconds, again, batch=1, most_batches=len(seconds))


@dataclass(frozen=True)
class _Dealt:
    """Sizes dealt out among the counts, interval by interval: shapes (intervals, counts).

    Attributes:
        elements, beyond_elements: so many at least on the host, and in visits beyond the slots.
        seconds: a bound.
    """

    elements: Floats
    beyond_elements: Floats
    seconds: Floats


def _shared(window: Window, seconds: Floats, counts: Counts, dealt: _Dealt) -> Floats:
    """Cuts of the window's linear program, until the lowest bound is as high as it gets.

    The last subgroup is a visit, or it is not; the first host update has ended before the first
    write-back has, or it has not: the shortest window of these cases counts.
    """
    program, times = window.program, window.times
    rows = np.maximum(seconds, dealt.seconds).ravel()
    looked_at = np.argsort(rows, kind="stable")[:MOST_ROWS]
    _, number = np.divmod(looked_at, len(seconds))
    hosts, visits, _, slots = (column[number] for column in counts)
    sizes = dealt.elements.ravel()[looked_at], dealt.beyond_elements.ravel()[looked_at]
    requirements = [
        window.requirements((hosts, visits, slots), *sizes, visit_last, early_home)
        for visit_last, early_home in product((False, True), repeat=2)
    ]
    windows = [np.zeros(len(looked_at)) for _ in requirements]
    known = raised = rows[looked_at]
    for _ in range(MOST_CUTS):
        lowest = int(np.argmin(raised))
        before = raised[lowest]
        for case in requirements:
            cut = program.cut(case[lowest])
            windows = [np.maximum(w, a @ cut) for w, a in zip(windows, requirements, strict=True)]
        raised = np.maximum(known, np.min(windows, axis=0) + times.rest_s)
        if raised.min() <= before * (1 + 1e-7):
            break
    rows[looked_at] = raised
    least_s: Floats = rows.reshape(dealt.seconds.shape).min(axis=0)
    return least_s


def _fitting(w: Workload, device_bytes: float) -> Counts:
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


def _dealt_out(times: Times, device_bytes: float, counts: Counts, most_intervals: int) -> _Dealt:
    """What the elements ask for, however sizes are dealt out among the counts.

    Memory says how many elements are on the host at least. It is fewer the more elements visit
    beyond what the slots hold, each of which has to be written back behind all gradients: interval
    by interval of their number.
    """
    w, (host, device, resident, slots) = times.workload, counts
    sizes = np.sort(np.array(w.subgroups, dtype=np.float64))
    least, most = (np.concatenate([[0.0], np.cumsum(order)]) for order in (sizes, sizes[::-1]))
    state, grad = w.optimizer_state.state_bytes, w.grad_bytes_per_param
    room = device_bytes - w.device_base_bytes - sum(layer.activation_bytes for layer in w.layers)
    beyond = np.maximum(_spared(sizes, least)[device, slots], 0.0)
    # The largest visit is no smaller than their mean, nor than so many of the smallest's largest.
    stay, mean = state * least[resident], state * slots / np.maximum(device, 1)
    largest = slots * np.concatenate([[0.0], sizes])[device]
    fitting = np.minimum(
        (room - stay + mean * least[resident]) / (grad + mean),
        (room - stay - state * largest) / grad,
    )
    fitting = np.where(device > 0, fitting, np.inf)
    intervals = most_intervals if sizes[0] < sizes[-1] else 1  # of one size, numbers say all
    hosted, lowest, seconds = [], [], []
    for step in range(intervals):
        low, high = beyond * step / intervals, beyond * (step + 1) / intervals
        # state * (residents + slots * largest visit) + grad * (residents + visits) <= room
        on_device = (room + state * high) / (state + grad)
        on_device = np.minimum(np.minimum(most[device + resident], on_device), fitting)
        elements = np.maximum(least[host], w.params - on_device)
        hosted.append(elements)
        lowest.append(low)
        seconds.append(
            np.maximum(
                times.elements_s(host, device, slots, elements, low),
                times.behind_gradients_s(device, slots, elements, low),
            )
        )
    return _Dealt(np.array(hosted), np.array(lowest), np.array(seconds))


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
