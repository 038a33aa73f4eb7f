"""The simulated forward and backward of a training iteration, as ops of a schedule, for all offloading strategies."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable

from ebbtide.simulator.rules import RuleError
from ebbtide.simulator.schedule import Lane, OpKind, ScheduleBuilder
from ebbtide.simulator.schedules.buckets import leavings
from ebbtide.simulator.workload import Workload

ALL_CORES = math.inf  # the simulator limits this to the machine's number of cores


MOST_PASSES = 1_000_000  # forwards and backwards of a layer: simulating them takes a minute or two, and 2 GB


class TrainingLoop(ABC):
    """The base class of simulated training loops, which append one training iteration after the other to a schedule.

    A subclass implements a strategy: what happens to gradients (`gradients`), and how the optimizer steps
    (`step`). With gradient accumulation, an iteration has a forward and a backward for each micro-batch.

    Attributes:
        parameters_new: For some subgroups, the op after which a forward may read their parameters. Parameters of
            all other subgroups are new when `step()` returns.
    """

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.out = ScheduleBuilder()
        self.sizes = workload.subgroups
        self.shares = workload.shares()
        self.layers_of = workload.layers_of_subgroups()
        self.leavings = leavings(workload, self.bucket)
        self.parameters_new: dict[int, int] = {}
        self.step_end: int | None = None
        self.backward_done = -1
        self.reduce_done: int | None = None
        self.passes: list[int] = []  # all forwards and backwards so far
        self.micro_step = 0

    def run(self, iterations: int) -> None:
        """Append the ops of a number of training iterations to a schedule.

        Raises:
            ValueError: There are too many forwards and backwards of layers to simulate in reasonable time and memory.
        """
        check_passes(self.workload, iterations)
        for iteration in range(iterations):
            self.out.iteration = iteration
            if self.workload.pipeline_idle_s:
                self.out.add(OpKind.IDLE, Lane.COMPUTE, self.workload.pipeline_idle_s)
            for micro_step in range(self.workload.gradient_accumulation_steps):
                self.micro_step = micro_step
                self.forward(micro_step)
                self.backward(micro_step)
            self.step()

    @property
    def bucket(self) -> int:
        """Return the number of gradient elements that DeepSpeed collects in its bucket before it reduces them."""
        return self.workload.reduce_bucket_params

    @abstractmethod
    def gradients(self, layer: int, micro_step: int, after: int) -> None:
        """Append what a strategy does with one layer's reduced gradients in a micro-batch, after the op ``after``.

        It is called for the layers in the order in which their gradients leave DeepSpeed's bucket.
        """

    @abstractmethod
    def step(self) -> None:
        """Append the end of an iteration, and set the attribute step_end to the op that marks the return of `step()`.

        If updates run after the return, set also parameters_new: the ops after which a forward may read new parameters.
        """

    def gradient_alloc_bytes(self, layer: int, micro_step: int) -> int:
        """Return the bytes of GPU memory that a layer's backward allocates for gradients that stay on the GPU."""
        return 0

    @property
    def boundary(self) -> int:
        """Return the number of the last micro-batch of a step, from 0. Its backward completes the gradients."""
        return self.workload.gradient_accumulation_steps - 1

    @property
    def gradients_done(self) -> list[int]:
        """Return the ops that must end before the gradient norm: the last backward, and the last network reduction."""
        return [self.backward_done, *([] if self.reduce_done is None else [self.reduce_done])]

    def forward(self, micro_step: int) -> None:
        """Append a micro-batch's forward to a schedule, layer by layer. A layer waits only for updates of its own
        parameters.
        """
        w = self.workload
        for number, layer in enumerate(w.layers):
            waits = self._parameter_waits(number) if micro_step == 0 else []
            waits = [*self.before_pass(number, waits), *self.issued_behind()]
            op = self.out.add(
                OpKind.FORWARD,
                Lane.COMPUTE,
                layer.forward_s,
                after=waits,
                device_share=1.0,
                device_alloc_bytes=layer.activation_bytes,
                layer=number,
            )
            self.passes.append(op)
            self.after_forward(number, op)

    def issued_behind(self) -> list[int]:
        """Return the ops of the training thread that must end before the next layer's forward or backward starts."""
        return []

    def before_pass(self, layer: int, waits: list[int], *, backward: bool = False) -> list[int]:
        """Append the ops that bring a layer's parameters to the GPU, and return those that its pass awaits."""
        size = self.workload.layers[layer].network_gather_bytes
        return [self._gather(size, layer, waits)] if size else waits

    def after_forward(self, layer: int, op: int) -> None:
        """Append what a strategy does after a layer's forward, if a subclass overrides this method."""

    def _parameter_waits(self, layer: int) -> list[int]:
        waits = [] if self.step_end is None else [self.step_end]
        new = self.parameters_new
        waits.extend(new[s] for s, _ in self.shares[layer] if s in new)
        return waits

    def _gather(self, size_bytes: int, layer: int, waits: list[int]) -> int:
        ahead = self.passes[-2:-1]
        return self.out.add(
            OpKind.PARAMETER_GATHER, Lane.NETWORK, size_bytes, "network_bytes_per_s", [*waits, *ahead], layer=layer
        )

    def backward(self, micro_step: int) -> None:
        """Append the backward of one micro-batch to the schedule, layer by layer, with the last layer first."""
        w = self.workload
        waits = self.before_pass(len(w.layers) - 1, [], backward=True)
        for number in reversed(range(len(w.layers))):
            layer = w.layers[number]
            op = self.out.add(
                OpKind.BACKWARD,
                Lane.COMPUTE,
                layer.backward_s,
                after=[*waits, *self.issued_behind()],
                device_share=1.0,
                device_alloc_bytes=self.gradient_alloc_bytes(number, micro_step),
                device_free_bytes=layer.activation_bytes,
                layer=number,
            )
            self.passes.append(op)
            self.backward_done = op
            # Gathers and reductions run on separate CUDA streams, but share one lane here. The next layer's gather is
            # issued first, so that it does not wait in the lane for a reduction that waits for this layer's backward.
            waits = self.before_pass(number - 1, [], backward=True) if number else []
            for left in self.leavings[number] if w.zero_stage > 1 else ():
                waited_for, reduced = self._reduced(left.layer, op)
                self.gradients(left.layer, micro_step, reduced)
                if waited_for != op:
                    waits = [*waits, waited_for]
        if w.zero_stage == 1 and micro_step == self.boundary:
            # ZeRO-1 reduces once per step, in hooks that run after the whole backward.
            for number in reversed(range(len(w.layers))):
                _, reduced = self._reduced(number, self.backward_done)
                self.gradients(number, micro_step, reduced)

    def step_ends(self, waits: list[int], pieces: Iterable[tuple[float, list[int]]] | None = None) -> None:
        """Append an op that marks the return of the optimizer's `step()`, after the ranks' exchange of parameters.

        Args:
            pieces: Share of the parameters and awaited ops of each exchanged piece. None: all at once, after ``waits``.
        """
        pieces = [(1.0, waits)] if pieces is None else pieces
        exchanged = [op for share, updated in pieces for op in self._exchanged(share, updated)]
        self.step_end = self.out.add(OpKind.STEP_END, Lane.COMPUTE, 0.0, after=[*waits, *exchanged])

    def _exchanged(self, share: float, waits: list[int]) -> list[int]:
        w, ops = self.workload, []
        if w.network_step_gather_bytes:
            size = share * w.network_step_gather_bytes
            ops.append(self.out.add(OpKind.PARAMETER_GATHER, Lane.NETWORK, size, "network_bytes_per_s", waits))
        if w.step_gather_s:  # at the same time as the network's part, because a ring does both
            ops.append(self.out.add(OpKind.PARAMETER_GATHER, Lane.COMPUTE, share * w.step_gather_s, after=waits))
        return ops

    def _reduced(self, layer: int, after: int) -> tuple[int, int]:
        # The first op is what the next layer's backward waits for, and the second the last op of the reduction.
        waited_for, beside = reduce_parts(self.workload, layer)
        after = self._reduce(layer, waited_for, after)
        return after, self._reduce(layer, beside, after)

    def _reduce(self, layer: int, size_bytes: int, after: int) -> int:
        if not size_bytes:
            return after
        self.reduce_done = self.out.add(
            OpKind.GRADIENT_REDUCE, Lane.NETWORK, size_bytes, "network_bytes_per_s", [after], layer=layer
        )
        return self.reduce_done


def reduce_parts(workload: Workload, layer: int) -> tuple[int, int]:
    """Return two parts of a layer's gradient reduction over the network, in bytes."""
    # The next layer's backward waits for the first part, and runs at the same time as the second.
    size = workload.layers[layer].network_reduce_bytes
    beside = round(size * workload.reduced_beside)
    return size - beside, beside


def check_passes(workload: Workload, iterations: int) -> None:
    """Refuse a workload with too many forwards and backwards of layers to simulate in reasonable time and memory.

    Raises:
        ValueError: There are too many forwards and backwards in this number of iterations.
    """
    w = workload
    passes = 2 * iterations * w.gradient_accumulation_steps * len(w.layers)
    if passes > MOST_PASSES:
        most = max(1, MOST_PASSES // (2 * iterations * len(w.layers)))
        raise RuleError(
            f"gradient_accumulation_steps must be at most {most:,} to simulate {iterations} iterations of "
            f"{len(w.layers):,} layers, but got {w.gradient_accumulation_steps:,}. Lower it (--accumulation): "
            "further micro-batches only repeat earlier ones",
            key="accumulation",
        )
