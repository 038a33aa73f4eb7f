"""The compiled simulator: numba code that gives the same results as `simulate`, thousands of times per second.

Import it explicitly (``from ebbtide.simulator.engines.compiled import simulate_fast``), because it loads numba.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Self

import numpy as np
from ebbtide.simulator.engines import kernel, summary
from ebbtide.simulator.engines.kernel import CAPACITIES, Floats, Ints
from ebbtide.simulator.engines.reference import capacities
from ebbtide.simulator.engines.repeating import repeat
from ebbtide.simulator.machine import Machine
from ebbtide.simulator.quantity import THREADED, RateName
from ebbtide.simulator.schedule import Op, Schedule, Span
from ebbtide.simulator.timeline import Timeline

_COPIED = {  # column -> field of the op whose value is copied unchanged
    kernel.ITERATION: "iteration",
    kernel.WORK: "work",
    kernel.LATENCY: "latency_s",
    kernel.DRAM: "dram_bytes",
    kernel.CORES: "cores",
    kernel.DEVICE_SHARE: "device_share",
    kernel.DEVICE_ALLOC: "device_alloc_bytes",
    kernel.DEVICE_FREE: "device_free_bytes",
    kernel.HOST_ALLOC: "host_alloc_bytes",
    kernel.HOST_FREE: "host_free_bytes",
}


@dataclass(frozen=True, slots=True)
class SimResult:
    """The times and memory peaks of a simulated schedule. The fields have the same meaning as those of `Timeline`."""

    iteration_s: float
    forward_s: float
    backward_s: float
    step_s: float
    update_s: float
    loop_s: float
    makespan_s: float
    device_peak_bytes: int
    host_peak_bytes: int
    storage_bytes: int
    start_s: Floats = field(compare=False, repr=False)
    end_s: Floats = field(compare=False, repr=False)

    @property
    def phases(self) -> dict[str, float]:
        """Return a dict of the seconds of a simulated iteration's phases (forward, backward ...), as `Timeline.phases`
        does.
        """
        return {
            "forward_s": self.forward_s,
            "backward_s": self.backward_s,
            "step_s": self.step_s,
            "update_s": self.update_s,
            "loop_s": self.loop_s,
        }


@dataclass(frozen=True, slots=True)
class CompiledSchedule:
    """A schedule of ops as arrays, converted once and then simulated on any number of machines.

    Attributes:
        ops: Array with one row for each op: shape (n, kernel.OP_COLUMNS).
        after_first, after: Op i waits for the ops after[after_first[i]:after_first[i + 1]].
        rate_keys: Pairs (name of one of the machine's speeds, number of CPU cores). The column RATE of ``ops`` has the
            index of the op's pair in this tuple. The number of cores matters only for the speed of CPU updates.
    """

    schedule: Schedule
    ops: Floats
    after_first: Ints
    after: Ints
    rate_keys: tuple[tuple[RateName, float], ...]

    def repeating(self, micro_batches: Sequence[tuple[int, int]], times: int) -> Self:
        """Return a copy without op objects, with one micro-batch of each iteration repeated.

        Args:
            micro_batches: First op, and the op after the last, of the micro-batch in each iteration. The micro-batch
                before it has as many ops.
            times: Number of times that the micro-batch is in each iteration of the copy.
        """
        ops, after_first, after = self.ops, self.after_first, self.after
        for first, last in reversed(micro_batches):  # from the last one, so that the numbers of earlier ops stay valid
            of, after_first, after = repeat(after_first, after, first, last, times)
            ops = ops[of]
        schedule = replace(self.schedule, ops=())
        return replace(self, schedule=schedule, ops=ops, after_first=after_first, after=after)


def compile_schedule(schedule: Schedule) -> CompiledSchedule:
    """Convert a schedule to arrays for the compiled simulator."""
    keys: dict[tuple[RateName, float], int] = {}
    table = np.zeros((len(schedule.ops), kernel.OP_COLUMNS))
    waits: list[tuple[int, ...]] = []
    if schedule.ops:
        fields = dict(zip(Op._fields, zip(*schedule.ops, strict=True), strict=True))
        waits = list(fields["after"])
        for column, name in _COPIED.items():
            table[:, column] = fields[name]
        table[:, kernel.LANE] = [kernel.LANE_NUMBERS[lane] for lane in fields["lane"]]
        table[:, kernel.KIND] = [kernel.KIND_NUMBERS[kind] for kind in fields["kind"]]
        table[:, kernel.RATE] = [
            # Only the rate of a CPU update depends on its number of cores.
            keys.setdefault((rate, cores if rate in THREADED else 0.0), len(keys))
            for rate, cores in zip(fields["rate"], fields["cores"], strict=True)
        ]
    return CompiledSchedule(
        schedule=schedule,
        ops=table,
        after_first=np.cumsum([0, *map(len, waits)]).astype(np.int64),
        after=np.array(list(chain.from_iterable(waits)), dtype=np.int64),
        rate_keys=tuple(keys),
    )


def simulate_fast(schedule: Schedule | CompiledSchedule, machine: Machine) -> SimResult:
    """Predict the times and memory peaks of a schedule on a machine, with the compiled simulator.

    Raises:
        ValueError: The machine lacks a rate that the schedule needs.
    """
    if isinstance(schedule, Schedule):
        schedule = compile_schedule(schedule)
    count = schedule.ops.shape[0]
    start_s, end_s = np.zeros(count), np.zeros(count)
    rates = np.array([machine.op_rate(*key) for key in schedule.rate_keys], dtype=np.float64)
    on = rates, capacity_vector(machine, schedule.schedule.ranks_per_node)
    waits = schedule.after_first, schedule.after
    row = run(schedule.ops, waits, (*on, machine_vector(machine)), (start_s, end_s), schedule.schedule.iterations)
    row[summary.DEVICE_PEAK] += schedule.schedule.device_base_bytes
    row[summary.HOST_PEAK] += schedule.schedule.host_base_bytes
    row[summary.STORED] = schedule.schedule.storage_bytes
    return result(row, start_s, end_s)


def run(
    ops: Floats,
    waits: tuple[Ints, Ints],
    on: tuple[Floats, Floats, Floats],
    times: tuple[Floats, Floats],
    iterations: int,
    warm_up: int = summary.WARM_UP,
) -> Floats:
    """Simulate compiled ops, and return their times and memory peaks as a row of `engines.summary`.

    Args:
        on: Arrays of the ops' speeds in the order of ``rate_keys``, of `capacity_vector` and of `machine_vector`.
        times: Two arrays that receive the start and the end of each op, in seconds.
        warm_up: Number of first iterations that do not count for the mean time of an iteration.
    """
    row = np.zeros(summary.SUMMARY_COLUMNS)
    peaks = kernel.run(ops, *waits, *on, *times)
    summary.summarise(ops, *times, iterations, row, warm_up)
    row[summary.DEVICE_PEAK], row[summary.HOST_PEAK] = peaks
    return row


def result(row: Floats, start_s: Floats, end_s: Floats) -> SimResult:
    """Return the times (s) and memory peaks (bytes) of a simulated schedule."""
    times, sizes = np.split(row, [summary.DEVICE_PEAK])
    fields = [*times.tolist(), *sizes.astype(np.int64).tolist(), start_s, end_s]
    return SimResult(*fields)


def capacity_vector(machine: Machine, ranks: int) -> Floats:
    """Return one rank's share of each capacity that the ranks of a node have in common, such as DRAM bandwidth."""
    known = capacities(machine, ranks)
    return np.array([known.get(name, np.inf) for name in CAPACITIES])


def machine_vector(machine: Machine) -> Floats:
    """Return, as an array, the properties of a machine that the compiled simulator needs in addition to rates and
    capacities.

    They are the number of CPU cores, the node's DRAM bandwidth, the latencies of copies and of kernel launches, and
    two flags: whether GPU memory is host memory, and whether forward and backward run on the CPU cores.
    """
    return np.array(
        [
            machine.cpu_cores,
            machine.dram_bytes_per_s.median,
            machine.copy_latency_s,
            machine.launch_latency_s,
            float(machine.unified_memory),
            float(machine.device_shares_host_cores),
        ]
    )


def timeline(schedule: CompiledSchedule, simulated: SimResult) -> Timeline:
    """Return the timeline of a schedule: the start and end of each op, as the compiled simulator has computed them.

    The timeline lacks the memory in use over time, because the compiled simulator returns only memory peaks.
    """
    spans = [
        Span(op.kind, op.lane, float(start), float(end), op.subgroup, op.layer, op.iteration)
        for op, start, end in zip(schedule.schedule.ops, simulated.start_s, simulated.end_s, strict=True)
    ]
    spans.sort(key=lambda s: (s.end_s, s.start_s))
    return Timeline(
        tuple(spans), "predicted", strategy=schedule.schedule.strategy, storage_bytes=schedule.schedule.storage_bytes
    )
