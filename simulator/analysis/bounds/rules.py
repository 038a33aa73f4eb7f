"""The constraints of the linear program for the lower bound of an iteration's time.

Each function adds one kind of constraint that every plan obeys, and its docstring proves the constraint. The
constraints count elements of optimizer state. So they hold for subgroups of any size, also if DeepSpeed's subgroups are
split. No element is updated before its gradient is complete, and no forward uses an element before its update.

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

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Self

import numpy as np
from ebbtide.simulator.analysis.bounds.rows import Floats, Rows, Term
from ebbtide.simulator.analysis.bounds.work import Costs, Resource, Since, work_of
from ebbtide.simulator.analysis.serial import serial
from ebbtide.simulator.limits import MEMORIES, Limits
from ebbtide.simulator.machine import Machine
from ebbtide.simulator.optimizer import FP32_BYTES
from ebbtide.simulator.schedule import Lane, Memory
from ebbtide.simulator.schedules.footprint import fetches_of_a_step
from ebbtide.simulator.update.holding import GRADIENTS_UNDER_WAY_BYTES, Holding
from ebbtide.simulator.update.tiers import TIERS
from ebbtide.simulator.update.way import Way, plain_ways
from ebbtide.simulator.workload import Workload

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
class Problem:
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
    """

    given: Workload
    machine: Machine
    limits: Limits
    ways: Sequence[Way]
    rows: Rows = field(default_factory=Rows)
    most_blocks: int = MOST_BLOCKS

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
        """Return terms of the linear program that add up to the seconds of work that a resource must do for updates.

        The updates are those of some blocks of layers. Only work counts that must be done between the moment ``least``
        of a step and the next forward of these blocks:

        - An op that the next forward waits for, if the op cannot start before ``least``.
        - A copy of state into a buffer, if the copy can start before ``least``, but is not made before the gradient
          norm is known.
        - A copy of state out of a buffer, if the state does not stay in the buffer until the next forward has ended.
          These copies only count if ``blocks`` are all blocks.

        Args:
            resource: Lane or shared capacity, such as DRAM bandwidth, that does the work.
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
        """Yield terms of the linear program that add up to a resource's busy seconds for copies of parameters to the
        GPU.

        The copies bring parameters from host memory to the GPU, for forward and backward.

        Args:
            resource: Lane or shared capacity, such as DRAM bandwidth, that the copies use.
        """
        each = self.costs.fetch().get(resource, 0.0) * self.work.params
        for n, way in enumerate(self.ways):
            if each and way.parameters == "host":
                yield self.x[blocks, n], each * (times[blocks] if isinstance(times, np.ndarray) else times)


def every_element_is_updated_once(p: Problem) -> None:
    """Add constraints to the linear program for the lower bound of an iteration's time: each parameter element of a
    block of layers is updated in exactly one way.
    """
    for columns, share in zip(p.x, p.blocks.share, strict=True):
        p.rows.equal(float(share), (columns, 1.0))


def buffers_hold_what_is_in_them(p: Problem) -> None:
    """Add constraints to the linear program for the lower bound of an iteration's time: buffers have room for their
    contents.

    The contents are optimizer state. The constraints are for two moments. When the gradient norm is known, a buffer
    holds all state that was copied into the buffer before and that is updated after the norm. When the next forward
    has ended, a buffer holds all updated state that has not been copied out yet.
    """
    for some in (p.early, p.kept):
        for slot, size in p.slots.items():
            p.rows.at_most(0.0, *((some[way], 1.0) for way, kind in p.held.items() if kind == slot), (size, -1.0))
        for way, columns in some.items():
            for held, there in zip(columns, p.x[:, way], strict=True):
                p.rows.at_most(0.0, (int(held), 1.0), (int(there), -1.0))


def the_window_has_a_forward(p: Problem) -> None:
    """Add a constraint to the linear program for the lower bound of an iteration's time: the window is at least as long
    as a forward and the idle time of pipeline parallelism together.
    """
    p.rows.at_most(-p.forward_s - p.work.pipeline_idle_s, (p.window, -1.0), name="training loop")


def work_follows_what_it_waits_for(p: Problem) -> None:
    """Add constraints to the linear program for the lower bound of an iteration's time: updates fit between the moment
    at which they can start and the next forward.

    There is one constraint for each resource (a queue of ops or a shared capacity), each number k of blocks of layers,
    and each of three start moments:

    - The end of the last layer's backward.
    - The moment at which all gradients of the first k blocks are complete.
    - The gradient norm.

    The updates of the first k blocks that cannot begin before the start moment must end before the next forward reaches
    the last layer of block k. So the time in between must be at least the time for which these updates use the
    resource. Copies of these blocks' parameters from host memory to the GPU are added to the updates. Of the copies of
    state, only those are added that `Problem.seconds` counts.

    If the start moment is before the norm, the time for which forward and backward wait is added to the time in
    between. If forward and backward leave nothing of the resource for other work, the time in which they run does not
    count.
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


def all_work_fits_into_the_iteration(p: Problem) -> None:
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


def backward_waits_for_gradients(p: Problem) -> None:
    """Add constraints to the linear program for the lower bound of an iteration's time: backward waits for copies of
    gradients.

    Blocks of layers are numbered in the order of forward, so backward ends with block 1. For each k, the constraint is
    A <= B + C + D:

    - A: time to copy the gradients of blocks 1 to k to the host
    - B: time from the end of the backward of block k's last layer to the end of backward. None of these gradients is
      complete before this time starts.
    - C: time for which backward waits for copies
    - D: time of the copies that are still to be made when backward ends

    The runtime limits the bytes of gradients that are being copied to the host (`EbbtideLoop._make_room`), so D is
    limited too. If the largest layer's gradient has g bytes, and u is the constant `GRADIENTS_UNDER_WAY_BYTES`, D is
    the time to copy max(g, u + min(u, g / 2)) bytes.

    The constraints are added for the last micro-batch alone, and for all micro-batches together. The last micro-batch
    also copies the gradient sums that the GPU accumulates.
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


def what_is_held_fits_into_memory(p: Problem) -> None:
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
