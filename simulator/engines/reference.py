"""The reference simulator, written for readers: it computes step by step when each op runs on a machine."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from ebbtide.simulator.machine import Machine, ShareName
from ebbtide.simulator.rules import checked
from ebbtide.simulator.schedule import D2H_LANES, FREE_WHERE_UNIFIED, H2D_LANES, Lane, Op, Schedule, Span
from ebbtide.simulator.timeline import MemorySample, Timeline


def max_min_speeds(demands: Sequence[Mapping[str, float]], capacities: Mapping[str, float]) -> list[float]:
    """Return the speeds of ops that run at the same time under max-min fair sharing: a list, from 0 to 1 (full speed).

    All ops speed up together until a capacity is full (progressive filling). The ops that use this capacity
    keep their speed, and the others continue. See Bertsekas & Gallager, Data Networks, section 6.5.2.

    Args:
        demands: For each op, the amount of each capacity that it uses at full speed, per second.
        capacities: Size of each capacity, per second. A capacity that is not named is unlimited.
    """
    speeds = [0.0] * len(demands)
    left = dict(capacities)
    growing = set(range(len(demands)))
    while growing:
        load = _load(demands, growing, left)
        to_full = [left[name] / load[name] for name in load]
        step = min([*to_full, *(1.0 - speeds[i] for i in growing)])
        for i in growing:
            speeds[i] += step
        full = set()
        for name, total in load.items():
            left[name] -= total * step
            if left[name] <= 1e-12 * capacities[name]:
                full.add(name)
        growing = {
            i for i in growing if speeds[i] < 1.0 - 1e-12 and not any(demands[i].get(name, 0.0) > 0 for name in full)
        }
    return speeds


def _load(
    demands: Sequence[Mapping[str, float]], growing: set[int], capacities: Mapping[str, float]
) -> dict[str, float]:
    load: dict[str, float] = {}
    for i in growing:
        for name, demand in demands[i].items():
            if name in capacities and demand > 0:
                load[name] = load.get(name, 0.0) + demand
    return load


_OF_THE_NODE = ("dram", "storage")  # capacities that all ranks of a node share. The other shares are of links


def rank_share(machine: Machine, capacity: ShareName, ranks: int) -> float:
    """Return the fraction of a single rank's speed that each of several concurrent ranks gets, from measurements.

    The total speed of all ranks is interpolated linearly between measured numbers of ranks. Beyond the largest, that of
    DRAM and storage stays constant, and that of copies grows as between the two largest. If nothing was measured, DRAM
    and storage are divided equally, and every rank has a link of its own. The fraction never grows with the ranks.
    """
    known = _known_shares(machine, capacity)
    if ranks <= 1 or ranks in known:
        return known[max(1, ranks)]
    counts = sorted(known)
    for fewer, more in pairwise(counts):
        if ranks < more:
            pace = (more * known[more] - fewer * known[fewer]) / (more - fewer)
            return (fewer * known[fewer] + pace * (ranks - fewer)) / ranks
    most = counts[-1]
    pace = 0.0 if capacity in _OF_THE_NODE else _last_pace(known, counts)
    return (most * known[most] + pace * (ranks - most)) / ranks


def _known_shares(machine: Machine, capacity: ShareName) -> dict[int, float]:
    # Measurement noise is removed. A fraction is lowered if it is larger than that of fewer ranks, or if all ranks
    # together would exceed the capacity of the node.
    known, least = {1: 1.0}, 1.0
    for ranks in sorted(machine.rank_shares):
        measured = machine.rank_shares[ranks].get(capacity)
        if measured is not None and ranks > 1:
            whole = 1 / ranks if capacity in _OF_THE_NODE else 1.0
            least = min(least, measured.median, whole)
            known[ranks] = least
    return known


def _last_pace(known: Mapping[int, float], counts: Sequence[int]) -> float:
    if len(counts) < 2:
        return 1.0
    fewer, more = counts[-2:]
    return max(0.0, (more * known[more] - fewer * known[fewer]) / (more - fewer))


_COPY_LANES = D2H_LANES | H2D_LANES
_LANE_ORDER = {lane: position for position, lane in enumerate(Lane)}


@checked
def simulate(schedule: Schedule, machine: Machine) -> Timeline:
    """Simulate a schedule on a machine, and return its timeline: the start and end of each op.

    Each lane, such as a copy direction, runs its ops one after the other. An op starts when its lane is free and
    all ops that it waits for have ended. Ops that run at the same time share DRAM, the link, the CPU cores, the
    GPU and storage by max-min fairness (`ebbtide.simulator.engines.reference`).

    Args:
        schedule: Result of `build_schedule` or `build_strategy`.

    Raises:
        ValueError: The machine lacks a rate that the schedule needs, or an argument has the wrong type.
    """
    return _Simulation(schedule, machine).run()


def capacities(machine: Machine, ranks: int) -> dict[str, float]:
    """Return the capacities that one rank gets if ``ranks`` equal ranks run on a node, as a dict by name.

    A capacity is an amount per second, such as DRAM bandwidth. The bandwidth of DRAM, storage and copies is multiplied
    by `rank_share`. CPU cores are divided among the ranks only if forward and backward run on the CPU.
    Otherwise each rank gets all cores: DRAM bandwidth limits the updates, and a few cores can already use a rank's
    share of it. To divide the cores too would count the other ranks twice.
    """
    h2d, d2h = machine.h2d_bytes_per_s.median, machine.d2h_bytes_per_s.median
    sharers = max(1, ranks)
    link = machine.duplex_factor.median * (h2d + d2h)
    both = 1.0 if (measured := machine.storage_duplex_factor) is None else measured.median
    shared = {
        "dram": machine.dram_bytes_per_s.median * rank_share(machine, "dram", sharers),
        "cores": machine.cpu_cores / (sharers if machine.device_shares_host_cores else 1),
        "h2d": h2d * rank_share(machine, "h2d", sharers),
        "d2h": d2h * rank_share(machine, "d2h", sharers),
        "link": link * rank_share(machine, "link", sharers),
        "device": 1.0,
        "storage": machine.storage_write_bytes_per_s.median * rank_share(machine, "storage", sharers),
        "storage_read": machine.rate("storage_read_bytes_per_s") * rank_share(machine, "storage", sharers),
        # Unit: seconds of reading or writing alone. A drive that takes turns does 1 such second per second, a duplex
        # drive 2.
        "storage_both": max(1.0, 2 * both) * rank_share(machine, "storage", sharers),
    }
    if machine.network_bytes_per_s is not None:
        shared["network"] = machine.network_bytes_per_s.median / sharers
    return shared


def latency_of(op: Op, machine: Machine) -> float:
    """Return the latency of an op in seconds.

    The latency is the op's own latency plus, for a copy or an update on the GPU, the machine's latency of a copy or of
    a kernel launch.
    """
    latency = op.latency_s
    if op.lane in _COPY_LANES:
        latency += machine.copy_latency_s
    elif op.lane == Lane.DEVICE_UPDATE:
        latency += machine.launch_latency_s
    return latency


def alone_s(op: Op, machine: Machine) -> float:
    """Return the seconds that an op of a schedule takes on a machine if no other op runs at the same time."""
    if machine.unified_memory and op.kind in FREE_WHERE_UNIFIED:
        return 0.0
    if not op.work:
        return op.latency_s
    return latency_of(op, machine) + op.work / machine.op_rate(op.rate, op.cores)


def demands(op: Op, machine: Machine, duration_s: float) -> dict[str, float]:
    """Return how much of each shared capacity of a node an op uses per second at full speed, as a dict.

    A shared capacity is, for example, DRAM bandwidth. The use of DRAM bandwidth is the op's bytes divided by its
    duration, but at most the node's measured bandwidth. The op's speed was measured with one rank alone on such a node,
    so the op cannot use more.

    Args:
        duration_s: Seconds that the op takes at full speed.
    """
    if duration_s <= 0:
        return {}
    cores = min(op.cores, machine.cpu_cores)
    if machine.device_shares_host_cores:
        cores += op.device_share * machine.cpu_cores + (op.lane in _COPY_LANES)
    dram = min(op.dram_bytes / duration_s, machine.dram_bytes_per_s.median)
    demand = {"dram": dram, "cores": min(cores, machine.cpu_cores)}
    if op.lane in _COPY_LANES:
        speed = op.work / duration_s
        demand["d2h" if op.lane in D2H_LANES else "h2d"] = speed
        demand["link"] = speed
    if op.device_share:
        demand["device"] = op.device_share
    if op.lane == Lane.STORAGE:
        demand["storage"] = op.work / duration_s
    if op.lane == Lane.STORAGE_READ:
        demand["storage_read"] = op.work / duration_s
    if op.lane in (Lane.STORAGE, Lane.STORAGE_READ):
        demand["storage_both"] = (duration_s - op.latency_s) / duration_s
    if op.lane == Lane.NETWORK:
        demand["network"] = op.work / duration_s
    return demand


@dataclass
class _Running:
    op: Op
    left_s: float  # seconds left at full speed
    started_s: float
    demand: dict[str, float]


@dataclass
class _Simulation:
    schedule: Schedule
    machine: Machine
    now: float = 0.0
    running: list[_Running] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    memory: list[MemorySample] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.queues: dict[Lane, deque[Op]] = {lane: deque() for lane in Lane}
        for op in self.schedule.ops:
            self.queues[op.lane].append(op)
        self.ended = [False] * len(self.schedule.ops)
        self.met = [0] * len(self.schedule.ops)  # for each op, how many entries of its `after` have ended
        self.capacities = capacities(self.machine, self.schedule.ranks_per_node)
        self.device_bytes = self.schedule.device_base_bytes
        self.host_bytes = self.schedule.host_base_bytes

    def run(self) -> Timeline:
        self.memory.append(MemorySample(0.0, self.device_bytes, self.host_bytes))
        self._start_ready()
        while self.running:
            self._advance()
            self._start_ready()
        return Timeline(
            spans=tuple(self.spans),
            source="predicted",
            memory=tuple(self.memory),
            strategy=self.schedule.strategy,
            storage_bytes=self.schedule.storage_bytes,
        )

    def _start_ready(self) -> None:
        busy = {r.op.lane for r in self.running}
        for lane, queue in self.queues.items():
            if lane not in busy and queue and self._ready(queue[0]):
                self._start(queue.popleft())
        # A fixed order of lanes, so that sums round the same in every engine.
        self.running.sort(key=lambda r: _LANE_ORDER[r.op.lane])

    def _ready(self, op: Op) -> bool:
        met = self.met[op.id]
        while met < len(op.after) and self.ended[op.after[met]]:
            met += 1
        self.met[op.id] = met
        return met == len(op.after)

    def _start(self, op: Op) -> None:
        duration = alone_s(op, self.machine)
        demand = demands(op, self.machine, duration)
        self.running.append(_Running(op, duration, self.now, demand))
        self._note_memory(op.device_alloc_bytes, op.host_alloc_bytes)

    def _advance(self) -> None:
        speeds = max_min_speeds([r.demand for r in self.running], self.capacities)
        step = min(r.left_s / speed if r.left_s > 0 else 0.0 for r, speed in zip(self.running, speeds, strict=True))
        self.now += step
        still: list[_Running] = []
        for r, speed in zip(self.running, speeds, strict=True):
            r.left_s -= step * speed
            if r.left_s > 1e-12 * (1.0 + step):
                still.append(r)
            else:
                self._end(r)
        self.running = still

    def _end(self, r: _Running) -> None:
        op = r.op
        self.ended[op.id] = True
        self.spans.append(Span(op.kind, op.lane, r.started_s, self.now, op.subgroup, op.layer, op.iteration))
        self._note_memory(-op.device_free_bytes, -op.host_free_bytes)

    def _note_memory(self, device_bytes: int, host_bytes: int) -> None:
        if device_bytes or host_bytes:
            self.device_bytes += device_bytes
            self.host_bytes += host_bytes
            self.memory.append(MemorySample(self.now, self.device_bytes, self.host_bytes))
