"""The base of simulated training loops under a plan: forward, backward, gradient reductions and waits for updates.

Subclasses add the ops of subgroups' gradients and updates. One subclass builds a plan's schedule
(`ebbtide.simulator.schedules.ebbtide`). Another one records an iteration with markers in place of these ops
(`ebbtide.simulator.schedules.tape`). The compiled simulator inserts each plan's ops there.
"""

from abc import abstractmethod
from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

from ebbtide.simulator.schedule import Lane, Memory, OpKind
from ebbtide.simulator.schedules.buckets import Leavings, bucket_of, in_order
from ebbtide.simulator.schedules.footprint import fetched_elements, fetched_for
from ebbtide.simulator.schedules.loop import TrainingLoop
from ebbtide.simulator.workload import Workload


class Part(NamedTuple):
    """The part of a subgroup's gradient that belongs to one layer.

    Gradients that go to host memory are copied in such parts.

    Attributes:
        number: Position among all parts of a workload.
        last: True for the part that completes the subgroup's gradient, because it is the last one to leave DeepSpeed's
            bucket.
    """

    number: int
    subgroup: int
    elements: int
    last: bool


def parts_of(workload: Workload, leave: Leavings) -> tuple[tuple[Part, ...], ...]:
    """Return, for each layer, a tuple of the parts of subgroups' gradients that belong to the layer.

    The parts of a layer are in the order of their transfer to the host. This is the order in which backward computes
    them, or the order of the layer's parameters if ``leave`` says so (`Leaving.ascending`).

    Args:
        leave: For each layer, the layers whose gradients leave DeepSpeed's bucket after the backward of that layer (the
            result of `leavings`).
    """
    ascending = {left.layer for some in leave for left in some if left.ascending}
    held = [some if n in ascending else some[::-1] for n, some in enumerate(workload.shares())]
    last = {subgroup: layer for layer in in_order(leave) for subgroup, _ in held[layer]}
    numbers = count()
    return tuple(
        tuple(Part(next(numbers), subgroup, elements, layer == last[subgroup]) for subgroup, elements in some)
        for layer, some in enumerate(held)
    )


class PlannedLoop(TrainingLoop):
    """A simulated training loop under a plan, to which subclasses add the ops that depend on the plan's placements.

    Attributes:
        locations: Memory that holds each subgroup's 16-bit parameters.
        ends: Last op of each subgroup's update in the latest step.
    """

    def __init__(self, workload: Workload, locations: Sequence[Memory], *, overlaps: bool) -> None:
        """Set up a simulated training loop under a plan.

        Args:
            locations: Memory that holds each subgroup's 16-bit parameters.
            overlaps: True if a step returns while updates are still running.
        """
        super().__init__(workload if "host" in locations else workload.bare)
        self.locations, self.overlaps = locations, overlaps
        self.fetched = fetched_elements(workload, locations)
        self.parts = parts_of(workload, self.leavings)
        leave = in_order(self.leavings)
        self.first_to_leave = next(n for n in leave if self.shares[n]) if self.bucket else leave[0]
        self.ends: list[int] = []

    @property
    def bucket(self) -> int:
        return bucket_of(self.workload)

    @abstractmethod
    def gradient_reduced(self, part: Part, micro_step: int, after: int) -> None:
        """Append to the schedule the ops for one layer's part of a subgroup's gradient, such as its copy to the host.

        The op ``after`` has reduced this part over the ranks.
        """

    @abstractmethod
    def prefetch(self) -> None:
        """Start copying optimizer state from host memory to the GPU, for updates on the GPU in this step.

        The copies begin when the first gradients of the last micro-batch leave DeepSpeed's bucket. The runtime cannot
        begin earlier, because only the arrival of a gradient tells it that the backward of this micro-batch has begun.
        """

    @abstractmethod
    def updates(self, norm: int) -> tuple[dict[int, int], list[int]]:
        """Append to the schedule the ops of updates that are issued once the gradient norm is known.

        Returns:
            A dict from each subgroup to the op after which its updated parameters are ready, and a list with the last
            op of each subgroup's update.
        """

    def before_pass(self, layer: int, waits: list[int], *, backward: bool = False) -> list[int]:
        """Append to the schedule the copy of a layer's parameters from host memory to the GPU before a pass.

        A pass is a forward or backward. The copy runs during the previous layer's pass, and after the updates of the
        copied parameters. Parameters that are still on the GPU from an earlier pass are not copied again. The pass also
        waits until the layer's parameters in GPU memory are updated.

        Returns:
            The ops that the pass waits for.
        """
        elements, of = self.fetched[layer], self.workload.layers[layer]
        size = fetched_for(of, elements, self.micro_step, backward=backward)
        size *= self.workload.wire_bytes
        if size:
            new, locations = self.parameters_new, self.locations
            others = {new[s] for s, _ in self.shares[layer] if locations[s] == "device" and s in new}
            fetch = self.out.add(
                OpKind.PARAMETER_FETCH,
                Lane.H2D_FETCH,
                size,
                "h2d_bytes_per_s",
                [*(op for op in waits if op not in others), *self.passes[-2:-1]],
                dram_bytes=size,
                layer=layer,
            )
            waits = [fetch, *(op for op in waits if op in others)]
        updated = self.overlaps and not backward and self.micro_step == 0 and self.shares[layer]
        if self.workload.module_issue_s and (size or updated):
            waits = [self._issued(layer, waits)]
        return super().before_pass(layer, waits, backward=backward)

    def _issued(self, layer: int, waits: list[int]) -> int:
        return self.out.add(OpKind.ISSUE, Lane.ISSUE, self.workload.module_issue_s, after=waits, layer=layer)

    def gradients(self, layer: int, micro_step: int, after: int) -> None:
        if layer == self.first_to_leave and micro_step == self.boundary:
            self.prefetch()
        for part in self.parts[layer]:
            self.gradient_reduced(part, micro_step, after)

    def step(self) -> None:
        """Append to the schedule the gradient norm, and then all CPU and GPU updates in the plan's order."""
        waits = [*self.gradients_done, *self.issued_behind()]
        norm = self.out.add(OpKind.NORM, Lane.COMPUTE, self.workload.step_issue_s, after=waits)
        new, self.ends = self.updates(norm)
        if self.overlaps:
            self.parameters_new = new
            self.step_ends([norm])
        else:
            self.step_ends([norm, *new.values(), *self.ends])
