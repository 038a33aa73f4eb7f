"""The ops that update one parameter element, with their least seconds, for the lower bound of an iteration's time.

The ops depend on the combination of placement, parameter location and flags (`Way`). The seconds are given for each
resource that an op occupies, such as a copy direction or DRAM.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum

from ebbtide.simulator.engines.reference import alone_s, capacities, demands
from ebbtide.simulator.machine import Machine
from ebbtide.simulator.schedule import Lane, Op, OpKind
from ebbtide.simulator.update.recipes import Recipe
from ebbtide.simulator.update.steps import Bytes, Slot, Step, Wait
from ebbtide.simulator.update.way import Way
from ebbtide.simulator.workload import Workload

Resource = Lane | str  # a lane, or a shared capacity such as "dram"


class Since(IntEnum):
    """Moments of an iteration, such as the gradient norm. An op can start at one of these moments or later.

    Earlier moments are smaller numbers.
    """

    ANY = 0  # at any time of the iteration
    BACKWARD = 1  # after the backward of the last layer in the last micro-batch
    GRADIENT = 2  # after the element's gradient of the last micro-batch is complete
    NORM = 3  # after the gradient norm is known


@dataclass(frozen=True)
class Work:
    """One op of an update, such as a copy, with its cost per parameter element.

    The op belongs to a way of updating: a combination of placement, parameter location and flags (`Way`). An op
    occupies resources: its lane, and shared capacities such as DRAM bandwidth.

    Attributes:
        way: Index of the way of updating among the ways that the lower bound considers.
        seconds: For each resource, the least seconds per element for which the op occupies it. For a shared capacity,
            these are the seconds if no other op uses it.
        since: Earliest moment of an iteration at which the op can start.
        published: True if the op must end before the next forward of the layer that it updates.
        times: Number of such ops in an iteration.
        taken: Kind of buffer that the op fills, or None. If such a buffer is free, the op can run before the gradient
            norm is known.
        given: Kind of buffer that the op empties, or None. If no other subgroup needs the buffer, the op may end after
            the next forward.
        gradient: True for a copy of a gradient between GPU and host memory.
    """

    way: int
    seconds: Mapping[Resource, float]
    since: Since
    published: bool
    times: float = 1.0
    taken: Slot | None = None
    given: Slot | None = None
    gradient: bool = False


class Costs:
    """A calculator of the least seconds that an op takes per parameter element, for the lower bound of an iteration's
    time.

    Latencies of copies and kernel launches are left out. A plan may have subgroups of any size, so the number of
    copies and launches per element can be arbitrarily small.
    """

    def __init__(self, w: Workload, machine: Machine) -> None:
        self.bytes = Bytes.of(w)
        self.machine = machine.model_copy(update={"copy_latency_s": 0.0, "launch_latency_s": 0.0})
        self.limits = capacities(machine, w.ranks_per_node)
        # Between the measured numbers of threads, the rate of an update is interpolated linearly.
        measured = machine.host_adam_by_threads or (1,)
        self.threads = sorted({float(machine.cpu_cores), self.limits["cores"], *map(float, measured)})

    def step(self, step: Step) -> dict[Resource, float]:
        """Return the least time that one op of an update occupies each of its resources, as a dict by resource.

        The times are in seconds per parameter element. A resource is the lane in which the op runs, or a capacity that
        several ops share, such as DRAM bandwidth:

        - The time of a shared capacity is the op's amount of work divided by the whole capacity.
        - The time of the lane is the op's duration if no other op runs. If a shared capacity has a longer time, the
          lane has the same time as that capacity.

        For an op on the CPU, each time is the smallest over all numbers of threads.
        """
        some = [
            self._of(
                Op(
                    0,
                    step.kind,
                    step.lane,
                    step.work(self.bytes),
                    step.rate,
                    dram_bytes=step.dram(self.bytes),
                    cores=cores,
                    device_share=step.device_share,
                )
            )
            for cores in (self.threads if step.threads else (0.0,))
        ]
        return {resource: min(each[resource] for each in some) for resource in some[0]}

    def fetch(self) -> dict[Resource, float]:
        """Return the least time that the copy of one parameter to the GPU occupies each resource."""
        wire = self.bytes.wire
        return self._of(Op(0, OpKind.PARAMETER_FETCH, Lane.H2D_FETCH, wire, "h2d_bytes_per_s", dram_bytes=wire))

    def _of(self, op: Op) -> dict[Resource, float]:
        alone = alone_s(op, self.machine)
        taken = demands(op, self.machine, alone)
        shares = {name: taken.get(name, 0.0) / limit for name, limit in self.limits.items()}
        return {op.lane: alone * max(1.0, *shares.values())} | {name: alone * n for name, n in shares.items()}


def work_of(number: int, way: Way, costs: Costs, micro_batches: int) -> Iterator[Work]:
    """Yield the ops of an update, with their seconds per parameter element, for a given way of updating.

    A way of updating is a combination of placement, parameter location and flags (`Way`). Copies of gradients are
    included. Copies of 16-bit parameters from host memory to the GPU, for forward and backward, are not.

    Args:
        number: Index of ``way`` among the ways that the lower bound considers.
    """
    recipe = way.recipe
    yield from _gradients(number, recipe, costs, micro_batches)
    new = next(i for i, step in enumerate(recipe.steps) if step.publishes)
    for i, step in enumerate(recipe.steps):
        seconds, held = costs.step(step), step.takes if step.early else None
        if i < recipe.before_norm:  # only early updates have ops before the norm
            since = Since.GRADIENT if any(Wait.GRADIENT in s.waits for s in recipe.steps[: i + 1]) else Since.BACKWARD
            yield Work(number, seconds, since, published=True)
        elif held is not None:
            since = Since.ANY if held.ahead else Since.BACKWARD
            yield Work(number, seconds, since, published=True, taken=held)
        else:
            given = step.gives_back if i > new else None
            yield Work(number, seconds, Since.NORM, published=i <= new, given=given)


def _gradients(number: int, recipe: Recipe, costs: Costs, micro_batches: int) -> Iterator[Work]:
    for step in recipe.gradient_steps:
        summed, last = (wait in step.waits for wait in (Wait.SUM, Wait.LAST))
        if micro_batches > 1 or not summed:
            yield Work(number, costs.step(step), Since.GRADIENT, published=True, gradient=True)
        earlier = 0 if last else micro_batches - 1 - summed
        if earlier > 0:
            yield Work(number, costs.step(step), Since.ANY, published=False, times=earlier, gradient=True)
