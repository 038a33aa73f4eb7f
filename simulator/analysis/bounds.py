"""The lower bound of a training iteration's time: a time that no plan for a job can beat on a machine.

It holds for every plan that stays within given memory limits. The plan may have any subgroup sizes, placements,
parameter locations, early updates, gradient sums on the GPU and order of updates, and any numbers of buffers and CPU
threads.

The bound is the least time of a linear program. Each rule below adds one kind of constraint that every plan obeys, and
its docstring proves the constraint. The constraints count elements of optimizer state. So they hold for subgroups of
any size, also if DeepSpeed's subgroups are split. No element is updated before its gradient is complete, and no forward
uses an element before its update.

The constraints use three moments of an iteration:

- The end of the last layer's backward in the last micro-batch. Each backward pass begins with the last layer.
- The gradient norm.
- The end of the next forward (of its first micro-batch).

The time between the last two moments is the *window*. The time of a steady iteration is the sum of three parts:

- The window.
- The forward and backward passes outside the window.
- All other time outside the window. During this time, a pass or the gradient norm waits for other work, such as
  copies. For example, the time from the end of backward to the gradient norm belongs to this part.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from itertools import pairwise
from typing import Any, Self

import numpy as np
from ebbtide.simulator.analysis.many_plans import PlanSweep
from ebbtide.simulator.engines import summary
from ebbtide.simulator.engines.reference import alone_s, capacities, demands
from ebbtide.simulator.limits import MEMORIES, Limits
from ebbtide.simulator.machine import Machine
from ebbtide.simulator.optimizer import FP32_BYTES
from ebbtide.simulator.quantity import Quantity
from ebbtide.simulator.schedule import Lane, Memory, Op, OpKind
from ebbtide.simulator.schedules.footprint import fetches_of_a_step
from ebbtide.simulator.update.holding import GRADIENTS_UNDER_WAY_BYTES, Holding
from ebbtide.simulator.update.recipes import RECIPES, Recipe
from ebbtide.simulator.update.steps import Bytes, Placement, Slot, Step, Wait
from ebbtide.simulator.update.tiers import TIERS
from ebbtide.simulator.update.way import PLACEMENT_CODES, Way, plain_ways, ways
from ebbtide.simulator.workload import Workload
from numpy.typing import NDArray


def serial(workload: Workload) -> Workload:
    """Return a ZeRO-3 workload with iterations that take no longer than those of ``workload``, under any plan.

    The result is used to compute lower bounds and to choose the order of updates. Where a step below ZeRO-3 waits for
    its updates (`Workload.overlaps_forward`), nothing may overlap the next forward in the result either. So its forward
    takes no time. Instead, the time of forward and the idle time of the pipeline are added to the last layer's
    backward, before any gradient is complete. The exchange of updated parameters between ranks takes no time, because
    updates may run beside it.

    If gradients leave the GPU only once per step, the time of all passes before the last micro-batch's backward is
    added there too, except for the first forward if updates overlap it.

    A ZeRO-3 workload is returned with its times without DeepSpeed's module hooks.
    """
    workload = workload.planned
    if workload.zero_stage == 3:
        return workload
    overlaps = workload.overlaps_forward
    steps = 1 if workload.adds_on_device else workload.gradient_accumulation_steps
    left_s = steps * sum(layer.backward_s + overlaps * layer.forward_s for layer in workload.layers)
    moved_s = workload.forward_s + workload.backward_s - left_s
    fields: dict[str, Any] = {"network_reduce_bytes": 0}
    gone: dict[str, Any] = {"step_gather_s": 0.0, "network_step_gather_bytes": 0}
    gone |= {"reduce_bucket_params": 0, "planned_bucket_params": 0}
    if not overlaps:
        moved_s += workload.pipeline_idle_s
        fields["forward_s"] = gone["pipeline_idle_s"] = 0.0
    layers = [layer.model_copy(update=fields) for layer in workload.layers]
    layers[-1] = layers[-1].model_copy(update={"backward_s": layers[-1].backward_s + moved_s / steps})
    kept = {"layers": tuple(layers), "zero_stage": 3, "gradient_accumulation_steps": steps}
    return workload.model_copy(update=gone | kept)


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


Floats = NDArray[np.float64]
Columns = NDArray[np.int64]
Term = tuple[Columns | int, Floats | float]  # variables, and the coefficients that they are multiplied by


@dataclass
class Rows:
    """The variables and rows of a linear program. A row says that a sum of terms is at most, or exactly, a limit.

    Variables are at least 0.

    Attributes:
        names: Names of the rows, such as "DRAM bandwidth", for reports of what limits the result. Rows
            without a name are not reported.
    """

    upper: list[float] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    least: list[float] = field(default_factory=list)
    most: list[float] = field(default_factory=list)
    _columns: list[int] = field(default_factory=list)
    _values: list[float] = field(default_factory=list)
    _ends: list[int] = field(default_factory=lambda: [0])
    _made: Any = None  # the matrix of all rows and variables, if none was added since

    def new(self, count: int) -> Columns:
        """Add ``count`` variables to a linear program, and return the numbers of their columns."""
        first, self._made = len(self.upper), None
        self.upper += [np.inf] * count
        return np.arange(first, first + count)

    def one(self) -> int:
        """Add one variable to a linear program, and return the number of the variable's column."""
        return int(self.new(1)[0])

    def at_most(self, limit: float, *terms: Term, name: str = "", least: float = -np.inf) -> None:
        """Add a row to a linear program: the sum of ``terms`` is at most ``limit`` and at least ``least``.

        Args:
            name: Name of the row, for reports of what limits the result. Rows without a name are not reported.
        """
        for some, factor in terms:
            columns = some.tolist() if isinstance(some, np.ndarray) else [int(some)]
            self._columns += columns
            if isinstance(factor, np.ndarray):
                self._values += factor.tolist()
            else:
                self._values += [float(factor)] * len(columns)
        self._made = None
        self._ends.append(len(self._columns))
        self.names.append(name)
        self.most.append(limit)
        self.least.append(least)

    def equal(self, value: float, *terms: Term) -> None:
        self.at_most(value, *terms, least=value)

    def lowest(self, *terms: Term) -> tuple[float, Floats] | None:
        """Solve a linear program: return the minimum of a sum of terms, and the values of all variables at this
        minimum.

        Return None if no values satisfy all constraints of the program.
        """
        from scipy.optimize import Bounds, LinearConstraint, milp

        cost = np.zeros(len(self.upper))
        for columns, factor in terms:
            cost[columns] += factor
        limits = LinearConstraint(self._matrix(), self.least, self.most)
        solved = milp(cost, bounds=Bounds(0.0, np.array(self.upper)), constraints=limits)
        return None if solved.x is None else (float(solved.fun), np.asarray(solved.x))

    def full(self, x: Floats) -> tuple[str, ...]:
        """Return the names of the rows of a linear program that hold with equality in a solution, and so limit it."""
        left = np.array(self.most) - self._matrix() @ x
        scale = 1e-7 * max(1.0, float(np.abs(x).max()))
        names = (n for n, rest in zip(self.names, left, strict=True) if n and rest <= scale)
        return tuple(dict.fromkeys(names))

    def _matrix(self) -> Any:  # Any, because scipy's sparse arrays have no types
        from scipy.sparse import csr_array

        if self._made is None:
            rows = (self._values, self._columns, self._ends)
            self._made = csr_array(rows, shape=(len(self.most), len(self.upper)))
            self._made.sum_duplicates()
        return self._made


MOST_BLOCKS = 16  # largest number of blocks of layers
LIVE_LAYERS = 2
NAMES: Mapping[Resource, str] = {
    "dram": "DRAM bandwidth",
    "h2d": "host-to-device copies",
    "d2h": "device-to-host copies",
    "link": "copies in both directions",
    "cores": "CPU cores",
    "storage_read": "storage reads",
    "storage": "storage writes",
    "storage_both": "storage reads and writes",
    "device": "GPU compute",
    Lane.H2D_FETCH: "copies of parameters to the GPU",
    Lane.H2D_PARAMETERS: "copies of updated parameters to the GPU",
    Lane.H2D: "copies of state to the GPU",
    Lane.H2D_GRADIENTS: "copies of gradients to the GPU",
    Lane.D2H: "copies of state to the host",
    Lane.D2H_GRADIENTS: "copies of gradients to the host",
    Lane.COMPUTE: "GPU compute",
    Lane.DEVICE_UPDATE: "updates on the GPU",
    Lane.HOST: "updates on the CPU",
    Lane.STORAGE: "storage writes",
    Lane.STORAGE_READ: "storage reads",
}


@dataclass(frozen=True)
class Blocks:
    """Groups of neighboring layers ("blocks") in the linear program for the lower bound of an iteration's time.

    Attributes:
        share: For each block, its fraction of this rank's elements.
        tail_s: For each block, the seconds from the start of its last layer's forward to the end of the whole forward.
        head_s: For each block, the seconds from the end of its last layer's backward to the end of the whole backward.
        fetches: For each block, how often per step a parameter that is kept in host memory is copied to the GPU: the
            minimum over the block's layers.
    """

    share: Floats
    tail_s: Floats
    head_s: Floats
    fetches: Floats

    @classmethod
    def of(cls, w: Workload, most: int = MOST_BLOCKS) -> Self:
        layers = len(w.layers)
        ends = np.unique(np.linspace(0, layers, min(layers, most) + 1).round().astype(int))
        forward, backward, params = (
            np.array([getattr(layer, name) for layer in w.layers], dtype=float)
            for name in ("forward_s", "backward_s", "params")
        )
        last, often = ends[1:] - 1, np.array(fetches_of_a_step(w))
        held = [often[first:end][params[first:end] > 0] for first, end in pairwise(ends)]
        return cls(
            np.add.reduceat(params, ends[:-1]) / params.sum(),
            np.cumsum(forward[::-1])[::-1][last],
            np.concatenate([[0.0], np.cumsum(backward)])[last],
            np.array([some.min(initial=0.0 if not some.size else np.inf) for some in held]),
        )


@dataclass
class BoundProblem:
    """The linear program for the lower bound of an iteration's time: its variables, and the data of its constraints.

    All fractions are fractions of the rank's parameter elements.

    Attributes:
        work: The workload from which times are computed, the result of `serial` for ``given``: a ZeRO-3 workload with
            iterations that take no longer than those of ``given`` under any plan. A lower bound for ``work`` is
            therefore one for ``given`` too.
        ways: Ways of updating that plans may use.
        most_blocks: Largest number of blocks of layers. With fewer, the bound is lower and found sooner.
        x: Variables of shape (blocks of layers, ways): the fraction that belongs to the block and is updated in this
            way.
        window: Variable: seconds from the gradient norm to the end of the next forward.
        waited: Variable: seconds for which forward and backward passes wait outside this window.
        slots: For each kind of buffer, a variable: the fraction that fits into all buffers of this kind together.
        held: Dict from each way that can copy state to a buffer before the gradient norm is known, to the kind of this
            buffer.
        early: For each way in ``held``, one variable per block: the fraction with state in the buffer when the gradient
            norm becomes known.
        kept: For each way in ``held``, one variable per block: the fraction with state still in the buffer when the
            next forward has ended.
        located: Number of the row with the fraction whose 16-bit parameters are in host memory. -1: any fraction.
    """

    given: Workload
    machine: Machine
    limits: Limits
    ways: Sequence[Way]
    rows: Rows = field(default_factory=Rows)
    most_blocks: int = MOST_BLOCKS
    located: int = -1

    def __post_init__(self) -> None:
        self.work = w = serial(self.given)
        self.blocks, self.costs = Blocks.of(w, self.most_blocks), Costs(w, self.machine)
        micro = w.gradient_accumulation_steps
        self.ops = [op for n, way in enumerate(self.ways) for op in work_of(n, way, self.costs, micro)]
        self.forward_s = w.forward_s / micro
        self.rest_s = w.backward_s + w.forward_s - self.forward_s
        # Seconds of a backward after that of the last layer.
        self.late_s = w.backward_s / micro - w.layers[-1].backward_s
        self.window, self.waited = self.rows.one(), self.rows.one()
        shape = (len(self.blocks.share), len(self.ways))
        self.x = self.rows.new(shape[0] * shape[1]).reshape(shape)
        self.held = {op.way: op.taken for op in self.ops if op.taken is not None}
        self.slots = {slot: self.rows.one() for slot in sorted(set(self.held.values()))}
        self.early, self.kept = ({way: self.rows.new(shape[0]) for way in self.held} for _ in range(2))

    def mean(self, weight: float) -> list[Term]:
        """Return the terms that one kind of step adds to the objective of the linear program."""
        # The first term is the time from the gradient norm to the end of the next forward pass. The second term is the
        # time for which the step's backward passes and its other forward passes wait for copies or updates. The compute
        # time of these passes is constant, so it is left out.
        return [(self.window, weight), (self.waited, weight)]

    @cached_property
    def resources(self) -> list[Resource]:
        return list(dict.fromkeys(r for op in self.ops for r, seconds in op.seconds.items() if seconds))

    def used_by_passes(self, resource: Resource) -> bool:
        """Return True if forward and backward leave nothing of a resource for other work while they run."""
        return resource == "device" or (resource == "cores" and self.machine.device_shares_host_cores)

    def seconds(self, resource: Resource, least: Since, blocks: slice) -> list[Term]:
        """Return terms that add up to the seconds of work that a resource must do for updates of some blocks of layers.

        Only work counts that must be done between the moment ``least`` of a step and the next forward of these blocks:

        - An op that the next forward waits for, if the op cannot start before ``least``.
        - A copy of state into a buffer, if it can start before ``least``, but is not made before the gradient norm is
          known.
        - A copy of state out of a buffer, if the state does not stay there until the next forward has ended. These
          copies only count if ``blocks`` are all blocks.
        """
        terms: list[Term] = []
        total = self.work.params
        for op in self.ops:
            each = op.seconds.get(resource, 0.0) * total
            if not each or op.times != 1:
                continue
            if op.published and op.since >= least:
                terms.append((self.x[blocks, op.way], each))
            elif op.taken:
                terms += [(self.x[blocks, op.way], each), (self.early[op.way][blocks], -each)]
            elif op.given and blocks == slice(None):
                terms += [(self.x[:, op.way], each), (self.kept[op.way], -each)]
        return terms

    def fetched(self, resource: Resource, blocks: slice, times: Floats | float) -> Iterator[Term]:
        """Yield terms that add up to a resource's seconds for copies of parameters to the GPU."""
        each = self.costs.fetch().get(resource, 0.0) * self.work.params
        for n, way in enumerate(self.ways):
            if each and way.parameters == "host":
                yield self.x[blocks, n], each * (times[blocks] if isinstance(times, np.ndarray) else times)


def every_element_is_updated_once(p: BoundProblem) -> None:
    """Add constraints: each parameter element of a block of layers is updated in exactly one way."""
    for columns, share in zip(p.x, p.blocks.share, strict=True):
        p.rows.equal(float(share), (columns, 1.0))


def buffers_hold_what_is_in_them(p: BoundProblem) -> None:
    """Add constraints: buffers have room for the optimizer state in them.

    When the gradient norm is known, a buffer holds all state that was copied into it before and is updated after the
    norm. When the next forward has ended, it holds all updated state that has not been copied out yet.
    """
    for some in (p.early, p.kept):
        for slot, size in p.slots.items():
            p.rows.at_most(0.0, *((some[way], 1.0) for way, kind in p.held.items() if kind == slot), (size, -1.0))
        for way, columns in some.items():
            for held, there in zip(columns, p.x[:, way], strict=True):
                p.rows.at_most(0.0, (int(held), 1.0), (int(there), -1.0))


def the_window_has_a_forward(p: BoundProblem) -> None:
    """Add a constraint: the window is at least a forward plus the idle time of pipeline parallelism."""
    p.rows.at_most(-p.forward_s - p.work.pipeline_idle_s, (p.window, -1.0), name="training loop")


def work_follows_what_it_waits_for(p: BoundProblem) -> None:
    """Add constraints: updates fit between the moment at which they can start and the next forward.

    There is one for each resource, each number k of blocks of layers, and each of three start moments:

    - The end of the last layer's backward.
    - The moment at which all gradients of the first k blocks are complete.
    - The gradient norm.

    The updates of the first k blocks that cannot begin before the start moment must end before the next forward reaches
    the last layer of block k. Copies of these blocks' parameters to the GPU are added to them. Of the copies of state,
    only those are added that `BoundProblem.seconds` counts.

    If the start moment is before the norm, the time for which forward and backward wait is added to the time in
    between. If forward and backward leave nothing of the resource for other work, their time does not count.
    """
    for resource in p.resources:
        busy = p.used_by_passes(resource)
        for block, (tail_s, head_s) in enumerate(zip(p.blocks.tail_s, p.blocks.head_s, strict=True)):
            blocks = slice(None) if block == len(p.blocks.tail_s) - 1 else slice(block + 1)
            fetched = list(p.fetched(resource, blocks, 1.0))
            for since, before_s in ((Since.NORM, 0.0), (Since.GRADIENT, head_s), (Since.BACKWARD, p.late_s)):
                left_s = -p.forward_s if busy else float(before_s - tail_s)
                waited = [] if since == Since.NORM else [(p.waited, -1.0)]
                terms = [*p.seconds(resource, since, blocks), *fetched]
                name = f"{NAMES.get(resource, str(resource))} (update)" if blocks == slice(None) else ""
                p.rows.at_most(left_s, (p.window, -1.0), *waited, *terms, name=name)


def all_work_fits_into_the_iteration(p: BoundProblem) -> None:
    """Add constraints to the linear program for the lower bound of an iteration's time: a resource's work fits into
    the iteration.

    In a steady state, an iteration contains the amount of work of one step, though some of the work belongs to the
    previous step. A resource that forward and backward use completely has no time for other work while they run.
    """
    for resource in p.resources:
        each = [(p.x[:, op.way], op.times * op.seconds.get(resource, 0.0) * p.work.params) for op in p.ops]
        terms = [*each, *p.fetched(resource, slice(None), p.blocks.fetches)]
        left_s = -p.forward_s if p.used_by_passes(resource) else p.rest_s
        name = NAMES.get(resource, str(resource))
        p.rows.at_most(left_s, (p.window, -1.0), (p.waited, -1.0), *terms, name=name)


def backward_waits_for_gradients(p: BoundProblem) -> None:
    """Add constraints: backward waits for copies of gradients.

    Blocks of layers are numbered in the order of forward, so backward ends with block 1. For each k, the constraint is
    A <= B + C + D:

    - A: time to copy the gradients of blocks 1 to k to the host
    - B: time from the end of the backward of block k's last layer to the end of backward. None of these gradients is
      complete before this time starts.
    - C: time for which backward waits for copies
    - D: time of the copies that are still to be made when backward ends

    The runtime limits the bytes of gradients that are being copied (`EbbtideLoop._make_room`), so D is limited too: to
    the time for max(g, u + min(u, g / 2)) bytes, where g is the largest layer's gradient and u is
    `GRADIENTS_UNDER_WAY_BYTES`.

    The constraints are added for the last micro-batch alone, and for all together. The last one also copies the
    gradient sums that the GPU accumulates.
    """
    w, each = p.work, p.costs.bytes.gradient
    largest = max(layer.params for layer in w.layers) * each
    left = max(largest, GRADIENTS_UNDER_WAY_BYTES + min(GRADIENTS_UNDER_WAY_BYTES, largest / 2)) / each
    every = [op for op in p.ops if op.gradient]
    last = [op for op in every if op.since == Since.GRADIENT]
    for ops, times in ((last, 1), (every, w.gradient_accumulation_steps)):
        for resource in p.resources:
            longest_s = max((op.seconds.get(resource, 0.0) for op in ops), default=0.0) * left
            for block, head_s in enumerate([*p.blocks.head_s[:-1], p.late_s] if longest_s else ()):
                terms = [(p.x[: block + 1, op.way], op.times * op.seconds.get(resource, 0.0) * w.params) for op in ops]
                p.rows.at_most(times * (float(head_s) + longest_s), (p.waited, -1.0), *terms)


def what_is_held_fits_into_memory(p: BoundProblem) -> None:
    """Add constraints to the linear program for the lower bound of an iteration's time: all data fits into each memory.

    The data are optimizer state, gradients, parameters and buffers, with the bytes that `Holding` counts. Some of these
    bytes are not linear in the program's variables, or they differ between plans. The constraints count fewer bytes for
    them, or the same number, so that the bound stays a lower bound:

    - Buffers: a buffer counts as no larger than the state that is in it at two moments. One is when the gradient norm
      becomes known, and the other is the end of the next forward (see `buffers_hold_what_is_in_them`).
    - Host memory reserved for state that lives in GPU memory: zero bytes, because only plans that split DeepSpeed's
      subgroups reserve any (`Workload.state_stays`).
    - Gradients that are being copied to the host: if all gradients are copied, their bytes or the runtime's limit for
      such copies, whichever is less. If only a fraction of the gradients is copied, this fraction of these bytes.
    - GPU copies of parameters that live in host memory: two layers of mean size, although the GPU may hold the two
      largest layers.
    """
    w = p.given
    held = Holding.of_workload(w.model_copy(update={"state_stays": False}))
    live = w.live_params / max(1, w.params) if w.live_params is not None else min(1.0, LIVE_LAYERS / len(w.layers))
    under_way = held.sending_bytes(w.params, 0) / w.params
    terms: dict[Memory, list[Term]] = {memory: [] for memory in TIERS}
    for n, way in enumerate(p.ways):
        each = {memory: float(held.per_param[memory][plain_ways().index(way.plain)]) for memory in TIERS}
        each["host"] += held.early_bytes * way.early - held.gradient_bytes * way.sum_on_device
        each["device"] += held.gradient_bytes if way.sum_on_device else under_way * bool(way.recipe.gradient_steps)
        each["device"] -= w.wire_bytes * (1 - live) * (way.parameters == "host")
        for memory in TIERS:
            terms[memory].append((p.x[:, n], each[memory]))
    for slot, size in p.slots.items():
        terms[slot.memory].append((size, float(held.optimizer.tensor_count * FP32_BYTES)))
    base = w.device_base_bytes + w.activation_bytes
    for memory, most in p.limits.by_memory.items():
        both = memory == "host" and p.limits.unified  # GPU memory is host memory
        some = [*terms[memory], *terms["device"]] if both else terms[memory]
        left = most - (base if both or memory == "device" else 0)
        p.rows.at_most(left / w.params, *some, name=MEMORIES[memory])


RULES = (
    every_element_is_updated_once,
    buffers_hold_what_is_in_them,
    the_window_has_a_forward,
    work_follows_what_it_waits_for,
    all_work_fits_into_the_iteration,
    backward_waits_for_gradients,
    what_is_held_fits_into_memory,
)


AT_ONCE = 1e18  # parameters/s: practically no time
ROUGH_BLOCKS = 1
ROUNDING, ROUNDING_S = 1e-5, 1e-6  # allowance for the solver's tolerances: relative, and in seconds


@dataclass(frozen=True)
class Bound:
    """A lower bound of a training iteration's time under any plan, and the placement of parameters that would reach it.

    Attributes:
        iteration_s: The bound, in mean seconds of an iteration in a steady state.
        binding: Names of the limits that determine the bound, such as GPU memory or DRAM bandwidth. The suffix
            ``(update)`` marks a resource that updates and their copies keep busy during all of the time that they have.
            This time starts when the gradient norm is known or, if some of the work can be done earlier, at the end of
            the last layer's backward. It ends when the next forward reaches the last layer.
    """

    iteration_s: float
    params: Mapping[Placement, float]
    binding: tuple[str, ...]


Programs = dict[tuple[Limits, bool], tuple[BoundProblem, list[Term]]]  # by limits and whether locations are given


def lower_bound(
    workload: Workload,
    machine: Machine,
    limits: Limits | None = None,
    *,
    away: float | None = None,
    programs: Programs | None = None,
) -> Bound:
    """Return a lower bound for the mean iteration time of every plan that stays within given memory limits.

    The bound is for long training without checkpoints. The first few iterations may take less time than the bound,
    because each of them may postpone some copies to the GPU until a later iteration. So a simulation of only three
    iterations can give a time below the bound. Computing the bound takes some 40 milliseconds.

    Args:
        limits: Memory limits of one rank. Plans may store optimizer state on drives only if ``limits`` has a limit for
            drives. None: all memory of the machine, and no drives.
        away: Number of parameter elements with their 16-bit copy in host memory. None: plans may choose this number.
        programs: Linear programs of earlier bounds for the same job and machine, to which this one's is added.

    Raises:
        ValueError: No plan fits into memory.
    """
    limits = limits or Limits.of(workload, machine, margin=0.0)
    programs, key = {} if programs is None else programs, (limits, away is not None)
    if key not in programs:
        programs[key] = _program(workload, machine, limits, located=away is not None)
    p, terms = programs[key]
    if away is not None:
        p.rows.least[p.located] = p.rows.most[p.located] = away / workload.params
    solved = p.rows.lowest(*terms)
    if solved is None:
        raise ValueError(
            "parameters, gradients, state and activations must fit into memory, but no plan fits into "
            f"{limits.device_bytes} bytes of GPU memory and {limits.host_bytes} of host memory"
        )
    seconds, x = solved
    split = dict.fromkeys(RECIPES, 0.0)
    for n, way in enumerate(p.ways):
        split[way.placement] += float(x[p.x[:, n]].sum()) * workload.params
    least_s = max(_rounded_down(p.rest_s + seconds), _passes_s(workload, machine))
    return Bound(least_s, split, p.rows.full(x))


def _program(workload: Workload, machine: Machine, limits: Limits, *, located: bool) -> tuple[BoundProblem, list[Term]]:
    p = problem(workload, machine, limits, early=_updates_early(workload, machine))
    if located:
        there = [n for n, way in enumerate(p.ways) if way.parameters == "host"]
        p.located = len(p.rows.most)
        p.rows.equal(0.0, (p.x[:, there].ravel(), 1.0))
    clipping = workload.expected_clip_rate
    return p, [*p.mean(1 - clipping), *clipping_steps(p).mean(clipping)]


def rough_bound_s(workload: Workload, machine: Machine, limits: Limits) -> float:
    """Return a time that is no longer than the bound of `lower_bound`, found in a tenth of its time.

    All layers are one block, and steps that clip count as steps that do not.

    Raises:
        ValueError: No plan fits into memory.
    """
    chosen = _ways(workload, machine, limits, early=_updates_early(workload, machine))
    p = _with_rules(BoundProblem(workload, machine, limits, chosen, most_blocks=ROUGH_BLOCKS))
    solved = p.rows.lowest(*p.mean(1.0))
    if solved is None:
        raise ValueError("parameters, gradients, state and activations must fit into memory, but no plan fits")
    return _rounded_down(p.rest_s + solved[0])


def _updates_early(workload: Workload, machine: Machine) -> bool:
    return workload.zero_stage > 1 and not machine.unified_memory


def problem(workload: Workload, machine: Machine, limits: Limits, *, early: bool) -> BoundProblem:
    """Return the linear program for the lower bound of the time of an iteration that clips no gradients."""
    return _with_rules(BoundProblem(workload, machine, limits, _ways(workload, machine, limits, early=early)))


def clipping_steps(p: BoundProblem) -> BoundProblem:
    """Extend the linear program by steps that clip gradients, and return the variables of a second plan for them.

    Such a step redoes early updates, so it takes at least as long as one under a plan without them. The second plan
    therefore has no early updates, but as many elements in each placement and the same buffers. Its time is a lower
    bound for these steps.
    """
    ways = [way for way in p.ways if not way.early]
    q = _with_rules(BoundProblem(p.given, p.machine, p.limits, ways, p.rows))
    for n, way in enumerate(ways):
        same = [m for m, other in enumerate(p.ways) if other._replace(early=False) == way]
        for block, column in enumerate(q.x[:, n]):
            p.rows.equal(0.0, (int(column), -1.0), (p.x[block, same], 1.0))
    for slot, size in q.slots.items():
        p.rows.equal(0.0, (size, 1.0), (p.slots[slot], -1.0))
    return q


def _with_rules(p: BoundProblem) -> BoundProblem:
    for rule in RULES:
        rule(p)
    return p


def _ways(workload: Workload, machine: Machine, limits: Limits, *, early: bool) -> list[Way]:
    moves = workload.zero_stage == 3 and not machine.unified_memory
    stores = limits.storage_bytes is not None and workload.zero_stage == 3
    sums = Holding.of_workload(workload).sums
    return [
        way
        for way in ways()
        if (early or not way.early)
        and (sums or not way.sum_on_device)
        and (moves or way.parameters == "device")
        and (stores or way.recipe.state != "storage")
    ]


def _passes_s(workload: Workload, machine: Machine) -> float:
    over_network = (n.network_gather_bytes + n.network_reduce_bytes for n in workload.layers)
    if not (workload.step_gather_s or workload.network_step_gather_bytes or any(over_network)):
        return 0.0
    at_once = {"device_adam_params_per_s": Quantity.exact(AT_ONCE), "launch_latency_s": 0.0}
    # The bound leaves out the issue time of modules, because some plans do not wait for it.
    work = workload.one_subgroup.model_copy(update={"module_issue_s": 0.0})
    sweep = PlanSweep(work, machine.model_copy(update=at_once))
    placed = np.array([PLACEMENT_CODES["resident"]], dtype=np.int8)
    row = sweep.evaluate(placed, 0, overlap_forward=workload.overlaps_forward)
    return _rounded_down(float(row[summary.ITERATION_S]))


def _rounded_down(seconds: float) -> float:
    return max(0.0, seconds * (1 - ROUNDING) - ROUNDING_S)


LINE_ROUNDING = 1e-4  # relative, far larger than the solver's tolerances


class Bounds:
    """The lower bounds of one job's iteration time that were computed so far.

    A bound holds for plans with any subgroup size, so the workload may be cut into any subgroups. All calls must be for
    one job on one machine, because bounds are remembered by the limits and ``away`` only.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[Limits, int | None], Bound | ValueError] = {}
        self._programs: Programs = {}

    def of(self, workload: Workload, machine: Machine, limits: Limits, away: int | None) -> Bound:
        """Return a lower bound of the iteration time under any plan within memory limits.

        Args:
            away: Number of elements with their 16-bit parameters in host memory. None: any number.

        Raises:
            ValueError: The job does not fit into memory with any plan.
        """
        key = limits, away
        if key not in self._known:
            try:
                self._known[key] = lower_bound(workload, machine, limits, away=away, programs=self._programs)
            except ValueError as error:
                self._known[key] = error
        found = self._known[key]
        if isinstance(found, ValueError):
            raise found.with_traceback(None)
        return found

    def seconds(self, workload: Workload, machine: Machine, limits: Limits, away: int | None) -> float:
        """Return a lower bound in seconds, or ``inf`` if the job does not fit into memory."""
        try:
            return self.of(workload, machine, limits, away).iteration_s
        except ValueError:
            return math.inf

    def may_take_less(self, workload: Workload, machine: Machine, limits: Limits, away: int, seconds: float) -> bool:
        """Return True if the lower bound is less than ``seconds``.

        The bound is a convex function of ``away``, the right side of a row of the linear program. So lines through two
        known bounds limit a third one: from above between the two, and from below elsewhere.
        """
        least_s, most_s = self._lines(limits, away)
        # Drives make no plan slower, so the limit without drives holds too.
        if min(most_s, self._lines(limits.in_memory, away)[1]) < seconds:
            return True
        return least_s < seconds and self.seconds(workload, machine, limits, away) < seconds

    def _lines(self, limits: Limits, away: int) -> tuple[float, float]:
        pairs = ((key[1], found) for key, found in self._known.items() if key[0] == limits)
        known = sorted((n, found.iteration_s) for n, found in pairs if n is not None and isinstance(found, Bound))
        place = bisect_left(known, (away, 0.0))
        least_s, most_s = 0.0, math.inf
        for first in {place - 2, place - 1, place} & {*range(len(known) - 1)}:
            line_s, rounding_s = _line(known[first], known[first + 1], away)
            if first == place - 1:
                most_s = line_s + rounding_s
            else:
                least_s = max(least_s, line_s - rounding_s)
        return least_s, most_s


def _line(one: tuple[int, float], other: tuple[int, float], at: int) -> tuple[float, float]:
    part = (at - one[0]) / (other[0] - one[0])
    rounding_s = LINE_ROUNDING * max(one[1], other[1]) * (abs(part) + abs(1 - part))
    return one[1] + part * (other[1] - one[1]), rounding_s
