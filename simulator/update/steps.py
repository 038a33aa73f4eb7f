"""The parts of a recipe, which is the sequence of ops that updates a subgroup.

The parts are the ops, the queues and buffers that the ops use, the events that they wait for, and the numbers of bytes
and elements that they move or update.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntFlag, StrEnum
from typing import Literal, Self

from ebbtide.simulator.optimizer import ADAM, FP32_BYTES
from ebbtide.simulator.quantity import RateName
from ebbtide.simulator.schedule import Lane, Memory, OpKind
from ebbtide.simulator.update.tiers import TIERS
from ebbtide.simulator.workload import Workload

Placement = Literal["host", "device", "resident", "stored"]
PARAMETER_SLOTS = 2  # buffers in which new parameters wait for their copy to the other memory
HOST_SLOTS = 3  # default: one that is read into, one that is updated, and one that is written from


class Queue(StrEnum):
    """The queue to which a subgroup's update belongs: updates on the CPU ("host") or updates on the GPU ("device").

    The subgroups of a queue are updated one after the other, in the plan's order.
    """

    HOST = "host"
    DEVICE = "device"


class Slot(StrEnum):
    """An enumeration of the kinds of buffers that subgroups use in turn for their updates, such as staging buffers in
    GPU memory.
    """

    STAGING = "staging"  # GPU memory for the state of a staged update
    PARAMETER = "parameter"  # host memory for parameters that are copied to the GPU
    OUTGOING = "outgoing"  # GPU memory for parameters that are copied to the host
    STATE = "state"  # host memory for the state of a stored subgroup

    @property
    def memory(self) -> Memory:
        """Return the memory (host or device) that contains buffers of this kind."""
        return "host" if self in (Slot.PARAMETER, Slot.STATE) else "device"

    @property
    def ahead(self) -> bool:
        """Return True if a buffer of this kind may be filled for the next optimizer step as soon as the buffer is free.

        That is not so for buffers in GPU memory, because activations need the memory until the end of their backward.
        """
        return self.memory == "host"

    @property
    def holds_state(self) -> bool:
        """Return True if a buffer of this kind holds the fp32 state of a subgroup, and False if it holds parameters."""
        return self in (Slot.STAGING, Slot.STATE)


class Wait(IntFlag):
    """The events that an op of a subgroup's update waits for, in addition to the previous op of its lane."""

    NORM = 1  # the gradient norm is known, and with it the factor that unscales and clips
    GRADIENT = 2  # the gradient is complete, in the memory where the update reads it
    PREVIOUS = 4  # the previous step of the recipe. For the first step of a gradient: its reduction
    GATE = 8  # a checkpoint has copied or written the live state
    SUM = 16  # the sum of the earlier micro-batches is on the host (from the second micro-batch on)
    LAST = 32  # not a wait: the step exists only in the last micro-batch


@dataclass(frozen=True, slots=True)
class Bytes:
    """The bytes per parameter that the ops of an update copy, read or write, for one workload.

    The amount of work of each op is computed from them.

    Attributes:
        state: Bytes of fp32 optimizer state, which are also copied to the GPU or read from a drive for an update.
        wire: Bytes of the parameter itself, in the training precision.
        host_traffic: Bytes of host memory traffic of ebbtide's fused update on the CPU.
        adams: Cost of an update relative to Adam's. It is a ratio, not a number of bytes. See `OptimizerState.adams`.
    """

    state: int
    wire: int
    gradient: int
    host_traffic: int
    adams: float

    @classmethod
    def of(cls, workload: Workload) -> Self:
        optimizer = workload.optimizer_state
        gradient, wire = workload.grad_bytes_per_param, workload.wire_bytes
        traffic = optimizer.host_traffic_bytes(gradient, wire)
        return cls(optimizer.state_bytes, wire, gradient, traffic, optimizer.adams(gradient, wire))


Amount = Callable[[Bytes], float]


def no_amount(_: Bytes) -> float:
    return 0.0


def adam_passes(amounts: Bytes) -> float:
    return amounts.adams


def unfused_passes(amounts: Bytes) -> float:
    """Return the bytes of host memory traffic per parameter of DeepSpeed's unscale, update and conversion passes."""
    # The conversion reads the fp32 master and writes the 16-bit parameter. The CPU reads each cache line of the 16-bit
    # parameter before it writes to the line, so the parameter counts twice.
    return 2 * FP32_BYTES + 2 * amounts.state + FP32_BYTES + FP32_BYTES + 2 * amounts.wire


@dataclass(frozen=True, slots=True)
class Step:
    """A step of a recipe: one op in the sequence of ops for a subgroup's gradient or update.

    Attributes:
        rate: Name of the machine's speed at which the op runs, such as a copy bandwidth.
        work: Function that returns the op's work per parameter, such as the bytes of a copy.
        dram: Function that returns the op's host memory traffic per parameter, in bytes.
        takes: Kind of buffer that the op writes to. The op waits until such a buffer is free.
        gives_back: Kind of buffer that becomes free when the op ends.
        threads: True if the op runs on the plan's CPU threads.
        device_share: Fraction of the GPU's compute that the op takes.
        early: True if the op may fill its buffer before the gradient norm is known. `early_limits` returns how many
            buffers of each kind may be filled this early. An op that fills a buffer in GPU memory starts during
            backward. An op that fills a buffer in host memory may already start after the previous optimizer step.
        publishes: True if a forward may read the subgroup's new parameters after the op.
        overwrites: True if the op overwrites state, so that it must wait for checkpoints that still read the state.
    """

    kind: OpKind
    lane: Lane
    rate: RateName
    work: Amount
    waits: Wait
    dram: Amount = no_amount
    takes: Slot | None = None
    gives_back: Slot | None = None
    threads: bool = False
    device_share: float = 0.0
    early: bool = False
    publishes: bool = False

    @property
    def overwrites(self) -> bool:
        return Wait.GATE in self.waits


def unfused(step: Step) -> Step:
    """Return an update on the CPU as DeepSpeed's separate passes instead of ebbtide's fused kernel.

    The passes are unscale, update and conversion to 16 bits. They run together at the machine's rate for DeepSpeed. It
    shows what fusing saves. The runtime does not execute it. Other ops are returned unchanged.
    """
    if step.kind not in (OpKind.UPDATE_HOST, OpKind.UPDATE_HOST_EARLY):
        return step
    return replace(
        step,
        rate="stock_host_adam_params_per_s",
        work=lambda b: unfused_passes(b) / unfused_passes(replace(b, state=ADAM.state_bytes)),
        dram=unfused_passes,
    )


def into(memory: Memory, kind: OpKind, size: Amount, waits: Wait, lane: Lane | None = None, **fields: object) -> Step:
    """Return an op that copies from host memory to the GPU or to storage, as part of a recipe."""
    way = TIERS[memory].into
    assert way is not None
    return Step(kind, lane or way.lane, way.rate, size, waits, size, **fields)  # type: ignore[arg-type]


def out_of(memory: Memory, kind: OpKind, size: Amount, waits: Wait, lane: Lane | None = None, **fields: object) -> Step:
    """Return an op that copies from GPU memory or storage to host memory, as part of a recipe."""
    way = TIERS[memory].out_of
    assert way is not None
    return Step(kind, lane or way.lane, way.rate, size, waits, size, **fields)  # type: ignore[arg-type]
