"""The least work of an update's ops: their seconds on a lane, and their use of shared capacities.

A lane is a queue of ops, such as a copy direction. A shared capacity is, for example, DRAM bandwidth.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ebbtide.simulator.engines.reference import alone_s, capacities, demands
from ebbtide.simulator.machine import Machine
from ebbtide.simulator.schedule import Lane, Op, OpKind
from ebbtide.simulator.update.recipes import Bytes, Step
from ebbtide.simulator.workload import Workload


@dataclass(frozen=True)
class Least:
    """The least work of one op, such as a copy, for the lower bound of an iteration's time.

    Attributes:
        seconds: Least seconds on the op's lane, whatever other ops run at the same time.
        alone_s: Seconds if the op shares nothing, not even with other ranks of the node.
        taken_s: By shared capacity, such as DRAM bandwidth: seconds for which the op would use all of it.
    """

    seconds: float
    alone_s: float
    taken_s: Mapping[str, float]


class Work:
    """A calculator of the least work of an update's ops, on a machine that the ranks of a node share."""

    def __init__(self, w: Workload, machine: Machine) -> None:
        self.bytes, self.machine = Bytes.of(w), machine
        self.limits = capacities(machine, w.ranks_per_node)
        # Between these an update's rate is linear in the threads; shared cores add one more.
        measured = machine.host_adam_by_threads or (1,)
        counts = {float(machine.cpu_cores), self.limits["cores"], *map(float, measured)}
        self.threads = sorted(counts)
        self._known: dict[tuple[Step, int], Least] = {}

    def ops(self, step: Step, size: int) -> list[Op]:
        """Return the ops that can run one step of a subgroup's update: one op for each useful number of threads."""
        return [
            Op(
                0,
                step.kind,
                step.lane,
                size * step.work(self.bytes),
                step.rate,
                dram_bytes=size * step.dram(self.bytes),
                cores=cores,
                device_share=step.device_share,
            )
            for cores in (self.threads if step.threads else (0.0,))
        ]

    def least(self, step: Step, size: int) -> Least:
        """Return the least work of one step (op) of a subgroup's update, with the best number of CPU threads."""
        known = self._known.get((step, size))
        if known is None:
            some = [self._of(op) for op in self.ops(step, size)]
            taken_s = {name: min(each.taken_s[name] for each in some) for name in self.limits}
            known = self._known[step, size] = Least(
                min(each.seconds for each in some), min(each.alone_s for each in some), taken_s
            )
        return known

    def fetched(self, size_bytes: float) -> Least:
        """Return the least work of copying parameters from host memory to the GPU for a forward or backward.

        The parameters may be copied in pieces of any size.
        """
        op = Op(0, OpKind.PARAMETER_FETCH, Lane.H2D_FETCH, size_bytes, "h2d_bytes_per_s", dram_bytes=size_bytes)
        return self._of(op, size_bytes / self.machine.rate("h2d_bytes_per_s"))

    def _of(self, op: Op, alone: float | None = None) -> Least:
        alone = alone_s(op, self.machine) if alone is None else alone
        taken = demands(op, self.machine, alone)
        shares = {name: taken.get(name, 0.0) / limit for name, limit in self.limits.items()}
        return Least(alone * max(1.0, *shares.values()), alone, {name: share * alone for name, share in shares.items()})
