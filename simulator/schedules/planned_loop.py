"""The iteration under any plan: passes, reductions of gradients, and waits for updates.

The ops of a subgroup's gradient and state are left to the interpreters of recipes: the builder
of schedules op by op (`ebbtide.simulator.schedules.ebbtide`), the compiled sweep from a recording
(`ebbtide.simulator.schedules.tape`). So the passes are written once.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from ebbtide.simulator.schedule import Lane, OpKind
from ebbtide.simulator.schedules.loop import TrainingLoop
from ebbtide.simulator.update.footprint import fetched_elements, fetched_for
from ebbtide.simulator.update.tiers import Memory
from ebbtide.simulator.workload import Workload


class Part(NamedTuple):
    """A layer's part of a subgroup's gradient, which leaves when the layer's backward is done.

    Attributes:
        number: Position among all parts of a workload.
        last: True for the part of the subgroup's first layer, which completes the gradient.
    """

    number: int
    subgroup: int
    elements: int
    last: bool


def parts_of(workload: Workload) -> tuple[tuple[Part, ...], ...]:
    """Return the parts of each layer, in the order in which training sends them."""
    first = [layers[0] if layers else -1 for layers in workload.layers_of_subgroups()]
    number = 0
    result = []
    for layer, held in enumerate(workload.shares()):
        some = []
        for subgroup, elements in reversed(held):
            some.append(Part(number, subgroup, elements, layer == first[subgroup]))
            number += 1
        result.append(tuple(some))
    return tuple(result)


class PlannedLoop(TrainingLoop):
    """Forward, backward and step of a plan with placements that are not known here.

    Attributes:
        homes: location of each subgroup's 16-bit parameters.
        ends: each subgroup's last op in the latest step.
    """

    def __init__(self, workload: Workload, locations: Sequence[Memory], *, overlaps: bool) -> None:
        """``overlaps``: the step returns while updates still run."""
        super().__init__(workload)
        self.locations, self.overlaps = locations, overlaps
        self.fetched = fetched_elements(workload, locations)
        self.parts = parts_of(workload)
        self.ends: list[int] = []

    @abstractmethod
    def gradient_reduced(self, part: Part, micro_step: int, after: int) -> None:
        """Append what happens to a part of a gradient that the op ``after`` has reduced."""

    @abstractmethod
    def prefetch(self) -> None:
        """Let the first staged subgroups come in: the last layer's backward of the last micro-batch is done.

        The runtime sees that micro-batch begin with this layer's gradient.
        """

    @abstractmethod
    def updates(self, norm: int) -> tuple[dict[int, int], list[int]]:
        """Append the updates after the barrier. Return the op that publishes each subgroup's parameters, and its
        last op.
        """

    def before_pass(self, layer: int, waits: list[int], *, backward: bool = False) -> list[int]:
        """Parameters that live in host memory come in while the pass before this one runs. They
        wait for their own updates; those of the layer's other parameters the pass waits for. What
        is still there from an earlier pass does not come in again.
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
        """The training thread itself waits, for an update until its last op has been issued, for
        what comes in (DeepSpeed's handles). Nothing of the layer is queued on the device before.
        """
        return self.out.add(OpKind.ISSUE, Lane.ISSUE, self.workload.module_issue_s, after=waits, layer=layer)

    def gradients(self, layer: int, micro_step: int, after: int) -> None:
        if layer == len(self.workload.layers) - 1 and micro_step == self.boundary:
            self.prefetch()
        for part in self.parts[layer]:
            self.gradient_reduced(part, micro_step, after)

    def step(self) -> None:
        """Norm barrier, then all queues at once, each in the plan's order."""
        norm = self.out.add(OpKind.NORM, Lane.COMPUTE, 0.0, after=[*self.gradients_done, *self.issued_behind()])
        new, self.ends = self.updates(norm)
        if self.overlaps:
            self.parameters_new = new
            self.step_ends([norm])
        else:
            self.step_ends([norm, *new.values(), *self.ends])
