"""The classes `Layer` (of a workload) and `MemoryPoint` (memory in use at one moment of a profiled iteration)."""

from typing import Literal, Self

from ebbtide.simulator.page import Page
from ebbtide.simulator.rules import RuleError
from pydantic import Field, model_validator


class Layer(Page):
    """A layer of a workload: a unit of forward and backward, usually a transformer block.

    Attributes:
        params: Number of this rank's parameter elements whose gradients the layer's backward produces.
        forward_s, backward_s: Compute time of the forward, and of the backward, of one micro-batch on this rank.
        activation_bytes: GPU memory that is in use from this layer's forward until its backward.
        network_gather_bytes: Bytes that this rank receives from other nodes to gather the layer's parameters for a
            forward or backward of one micro-batch. They include other traffic that occupies the network at that time. 0
            if the node has all of the layer's parameters.
        network_reduce_bytes: Bytes that this rank exchanges with other nodes in the layer's backward of one
            micro-batch, for data, tensor and pipeline parallelism together.
        persistent_params: Number of elements in ``params`` that stay gathered until the end of the step.
        regathered_params: Number of elements that are gathered for the backward of one micro-batch. An element that is
            gathered twice counts twice. None: each element of ``params`` is gathered once. See
            `ebbtide.simulator.schedules.gathers`.
        params_of_others: Number of the layer's parameter elements with optimizer state on other ranks, under ZeRO-1 and
            2. While those ranks copy the gradients of these elements to the host, this rank's next reduction waits.
        unhidden_s: Seconds to add to ``backward_s`` if stock DeepSpeed runs on several ranks and keeps parameters in
            host memory. Gathers and reductions inside the node then do not overlap computation.
        bare_forward_s, bare_backward_s: ``forward_s`` and ``backward_s`` without DeepSpeed's module hooks, which a plan
            takes off on one rank if the parameters stay in GPU memory. None: not known, so the same.
    """

    name: str = ""
    params: int = Field(ge=0)
    forward_s: float = Field(ge=0)
    backward_s: float = Field(ge=0)
    bare_forward_s: float | None = Field(None, ge=0)
    bare_backward_s: float | None = Field(None, ge=0)
    activation_bytes: int = Field(0, ge=0)
    network_gather_bytes: int = Field(0, ge=0)
    network_reduce_bytes: int = Field(0, ge=0)
    persistent_params: int = Field(0, ge=0)
    regathered_params: int | None = Field(None, ge=0)
    params_of_others: int = Field(0, ge=0)
    unhidden_s: float = Field(0.0, ge=0)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.persistent_params > self.params:
            raise RuleError(
                f"persistent_params must be at most the layer's {self.params} params, but got {self.persistent_params}",
                key="persistent_params",
            )
        return self


class MemoryPoint(Page):
    """The GPU and host memory in use at one moment of a profiled iteration, and the layer that was running then."""

    t_s: float = Field(ge=0)
    phase: Literal["forward", "backward", "step", "other"]
    device_bytes: int = Field(ge=0)
    host_bytes: int = Field(0, ge=0)
    layer: str = ""
