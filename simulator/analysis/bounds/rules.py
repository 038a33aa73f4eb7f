"""The rules that no plan can break, as rows of a linear program for the lower bound of an iteration's time.

Each function adds one rule, and proves it. The rules hold for subgroups of any sizes, also for parts of
DeepSpeed's: they count elements, and no element is updated before its gradient is complete, or used by a
forward before it is updated.

Three moments divide an iteration: the end of the last micro-batch's backward of the last layer, the gradient
norm, and the end of the next forward (of its first micro-batch). The time between the last two is the
*window*. A steady iteration takes the window, the other passes, and the waits of those passes.
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
from ebbtide.simulator.limits import MEMORIES, Limits
from ebbtide.simulator.machine import Machine
from ebbtide.simulator.schedule import Lane
from ebbtide.simulator.update.footprint import GRADIENTS_UNDER_WAY_BYTES, Holding, fetches_of_a_step
from ebbtide.simulator.update.optimizer import FP32_BYTES
from ebbtide.simulator.update.tiers import TIERS, Memory
from ebbtide.simulator.update.way import Way, plain_ways
from ebbtide.simulator.workload import Workload

MOST_BLOCKS = 16  # of layers
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
        share: Fraction of this rank's elements in each block.
        tail_s: Seconds of a forward that remain when it reaches the last layer of each block.
        head_s: Seconds of a backward that remain when the gradients of that layer are complete.
        fetches: Least number of copies of a parameter to the GPU per step, if it is kept in host memory.
    """

    share: Floats
    tail_s: Floats
    head_s: Floats
    fetches: Floats

    @classmethod
    def of(cls, w: Workload) -> Self:
        layers = len(w.layers)
        ends = np.unique(np.linspace(0, layers, min(layers, MOST_BLOCKS) + 1).round().astype(int))
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
    """The linear program for the lower bound of an iteration's time: the facts that it follows from, and its
    variables.

    Attributes:
        given: The workload as it trains.
        work: A ZeRO-3 workload that takes no longer under any plan (`Workload.serial`).
        ways: Ways of updating that plans may use.
        x: Fraction of all elements that are in a block and are updated in a way: shape (blocks, ways).
        window: Seconds from the gradient norm to the end of the next forward.
        waited: Seconds for which forward and backward wait outside the window.
        slots: By kind of buffer, the fraction of all elements that all buffers of this kind can hold.
        held: By way of updating, the kind of buffer that its state is copied to.
        early, kept: By way, the fraction of all elements that are in a block, and in such a buffer when the
            norm is known (``early``), or when the next forward has ended (``kept``).
    """

    given: Workload
    machine: Machine
    limits: Limits
    ways: Sequence[Way]
    rows: Rows = field(default_factory=Rows)

    def __post_init__(self) -> None:
        self.work = w = self.given.serial
        self.blocks, self.costs = Blocks.of(w), Costs(w, self.machine)
        micro = w.gradient_accumulation_steps
        self.ops = [op for n, way in enumerate(self.ways) for op in work_of(n, way, self.costs, micro)]
        self.forward_s = w.forward_s / micro
        self.rest_s = w.backward_s + w.forward_s - self.forward_s
        self.late_s = w.backward_s / micro - w.layers[-1].backward_s  # of a backward, behind the last layer's
        self.window, self.waited = self.rows.one(), self.rows.one()
        shape = (len(self.blocks.share), len(self.ways))
        self.x = self.rows.new(shape[0] * shape[1]).reshape(shape)
        self.held = {op.way: op.taken for op in self.ops if op.taken is not None}
        self.slots = {slot: self.rows.one() for slot in sorted(set(self.held.values()))}
        self.early, self.kept = ({way: self.rows.new(shape[0]) for way in self.held} for _ in range(2))

    def mean(self, weight: float) -> list[Term]:
        """Return the linear program's terms for the mean seconds of a step, without its forwards and backwards outside
        the window.

        The terms are the window, from the gradient norm to the end of the next forward, and waits outside the
        window.

        Args:
            weight: Fraction of all steps that are of this program's kind (steps that clip, or steps that do not).
        """
        return [(self.window, weight), (self.waited, weight)]

    @cached_property
    def resources(self) -> list[Resource]:
        return list(dict.fromkeys(r for op in self.ops for r, seconds in op.seconds.items() if seconds))

    def used_by_passes(self, resource: Resource) -> bool:
        """Return True if forward and backward use all of a resource: of the GPU, or of the cores without a GPU."""
        return resource == "device" or (resource == "cores" and self.machine.device_shares_host_cores)

    def seconds(self, resource: Resource, least: Since, blocks: slice) -> list[Term]:
        """Return the linear program's terms for a resource's work (in seconds) before the next forward of some blocks.

        Args:
            resource: Lane or shared capacity that does the work.
            least: Moment of the step. Work that can start before this moment does not count.
            blocks: Blocks of layers that are updated by the work. If these are all, work is included that may end
                after the next forward, if a buffer must be emptied for another subgroup.
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
        """Yield the linear program's terms for copying parameters from host memory to the GPU for forward and backward.

        Args:
            resource: Lane or shared capacity whose seconds are counted.
            blocks: Blocks of layers whose parameters are copied.
            times: Number of copies of each parameter, for all blocks or by block.
        """
        each = self.costs.fetch().get(resource, 0.0) * self.work.params
        for n, way in enumerate(self.ways):
            if each and way.parameters == "host":
                yield self.x[blocks, n], each * (times[blocks] if isinstance(times, np.ndarray) else times)


def every_element_is_updated_once(p: Problem) -> None:
    """Add the rule to the lower bound that each element of a block is updated in exactly one way, once per iteration.

    A way of updating is a combination of placement, parameter location and flags.
    """
    for columns, share in zip(p.x, p.blocks.share, strict=True):
        p.rows.equal(float(share), (columns, 1.0))


def buffers_hold_what_is_in_them(p: Problem) -> None:
    """Add the rule to the lower bound that buffers never hold more elements of optimizer state than fit into them.

    The rule holds at two moments. When the gradient norm is known, state that was copied in before is still in
    a buffer, since its update follows the norm. When the next forward has ended, state that has not been copied
    out is still in a buffer, since its update came before.
    """
    for some in (p.early, p.kept):
        for slot, size in p.slots.items():
            p.rows.at_most(0.0, *((some[way], 1.0) for way, kind in p.held.items() if kind == slot), (size, -1.0))
        for way, columns in some.items():
            for held, there in zip(columns, p.x[:, way], strict=True):
                p.rows.at_most(0.0, (int(held), 1.0), (int(there), -1.0))


def the_window_has_a_forward(p: Problem) -> None:
    """Add the rule to the lower bound that the window is at least a forward and the idle time of a pipeline.

    The window is the time from the gradient norm to the end of the next forward. Forward and idle time both
    follow the norm, and run on the GPU's lane one after the other.
    """
    p.rows.at_most(-p.forward_s - p.work.pipeline_idle_s, (p.window, -1.0), name="training loop")


def work_follows_what_it_waits_for(p: Problem) -> None:
    """Add the rule to the lower bound that a resource has time for its work between a moment and the next forward.

    Consider the elements of the first few blocks. Their work must end before forward reaches the last layer of
    these blocks, when ``tail_s`` of the window is left. The work cannot start before the moment. Between the
    moment and the norm there are only passes and their waits: none if the moment is the norm, the rest of the
    backward after the last of these layers if it is the completion of their gradients. A resource that the
    passes use entirely has no time for other work while they run.

    State that is copied in early needs no time after the norm. State that stays in a buffer need not leave. If
    all blocks are considered, state must leave for what comes in after the norm: in a buffer for each element
    that comes in, either no other element was before, or its state has left.
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
    """Add the rule to the lower bound that each resource has time for all work of an iteration within the iteration.

    In a steady state an iteration contains one iteration's amount of work, though some belongs to the step
    before. A resource that forward and backward use entirely has no time for other work while they run.
    """
    for resource in p.resources:
        each = [(p.x[:, op.way], op.times * op.seconds.get(resource, 0.0) * p.work.params) for op in p.ops]
        terms = [*each, *p.fetched(resource, slice(None), p.blocks.fetches)]
        left_s = -p.forward_s if p.used_by_passes(resource) else p.rest_s
        name = NAMES.get(resource, str(resource))
        p.rows.at_most(left_s, (p.window, -1.0), (p.waited, -1.0), *terms, name=name)


def backward_waits_for_gradients(p: Problem) -> None:
    """Add the rule to the lower bound that few gradients are still being copied to the host when backward has ended.

    A pass starts only if the gradients under way take no more than `GRADIENTS_UNDER_WAY_BYTES` and half of the
    oldest one, or if there is only one (`EbbtideLoop._make_room`). One is at most a layer's. All others were
    copied after the last layer's backward of their micro-batch, and before its end: within the backward of the
    other layers and its waits. Elements of the first few blocks have even less of it. So it is in the last
    micro-batch, which copies the sums that the GPU accumulates, and in all micro-batches together.
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
    """Add the rule to the lower bound that state, gradients, parameters and buffers fit into each memory.

    They are the bytes that `Holding` counts, but for some that are not linear or not common to all plans. All
    buffers of a kind together hold at least the elements that are in them. Only plans for parts of DeepSpeed's
    subgroups keep space in host memory for state on the GPU (`Workload.state_stays`). Gradients under way take the
    smaller of their bytes and a limit, which is at least that limit's share of all gradients. Of parameters that are
    kept in host memory, those of two layers are on the GPU at a time: of the largest ones, so at least two of all
    layers' mean.
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
