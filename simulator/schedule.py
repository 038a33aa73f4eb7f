"""The schedule: a graph of ops (copies, updates, passes) that the simulator times and the runtime executes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, NamedTuple, get_args

from ebbtide.simulator.quantity import RateName


class OpKind(StrEnum):
    """The kind of an op in a schedule, such as a forward, a copy or an update.

    ``BACKWARD`` produces gradients. ``NORM`` is the moment when the gradient norm is known, before the updates.
    """

    FORWARD = "forward"
    BACKWARD = "backward"
    PARAMETER_GATHER = "parameter gather"  # between nodes. A gather inside a node is part of the compute op
    GRADIENT_REDUCE = "gradient reduce"  # between nodes
    GRADIENT_D2H = "gradient D2H"
    GRADIENT_H2D = "gradient H2D"  # to add the next micro-batch's gradient, or in DeepSpeed alone to convert it to fp32
    GRADIENT_PASS = "gradient pass"
    NORM = "norm"
    STATE_H2D = "state H2D"
    UPDATE_DEVICE = "update device"
    STATE_D2H = "state D2H"
    UPDATE_HOST = "update host"
    UPDATE_HOST_EARLY = "update host, early"  # before the norm is known, assuming that the step does not clip
    UPDATE_DEVICE_EARLY = "update device, early"
    PARAMETER_CAST = "parameter cast"  # DeepSpeed's separate pass that converts fp32 to 16 bits
    PARAMETER_H2D = "parameter H2D"
    PARAMETER_D2H = "parameter D2H"  # updated parameters that live in host memory
    SNAPSHOT = "snapshot"
    PERSIST = "persist"
    IDLE = "outside the phases"  # the training loop between iterations, and the idle time of the pipeline
    STEP_END = "step end"  # optimizer.step() returns to the training loop
    PARAMETER_FETCH = "parameter fetch"  # offloaded parameters are copied to the GPU for a forward or backward
    ACTIVATION_D2H = "activation D2H"  # offloaded until the backward of their layer
    ACTIVATION_H2D = "activation H2D"
    STATE_READ = "state read"  # optimizer state is read from a drive (and written to it)
    STATE_WRITE = "state write"
    ISSUE = "issue"  # host time from the end of a wait to the launch of the waiter's first kernel

    __hash__ = str.__hash__  # engines look up the kind of every op, and Enum's own hash is slow Python code


class Lane(StrEnum):
    """A lane: a stream or a worker thread that runs its ops one after the other, such as a copy direction.

    Several lanes may share one link. They are separate so that an op never waits in line for an unrelated op:

    - New parameters are copied to the device on their own lane, where they may wait for updates on the CPU. State for
      staged updates is copied on another lane, so it does not wait for these updates.
    - Parameters in host memory are copied to the device for forward and backward on a third lane. So the copy of the
      first layer's parameters does not wait for the last layer's update.
    - Gradients have their own lane in each direction. So backward does not wait for copies for updates or for a
      checkpoint.

    The training thread is a lane too, because it launches the GPU's kernels and may wait for parameters.
    """

    COMPUTE = "device compute"
    DEVICE_UPDATE = "device update"
    H2D = "H2D state"
    H2D_PARAMETERS = "H2D parameters"
    D2H = "D2H"
    HOST = "host compute"
    STORAGE = "storage write"
    NETWORK = "network"
    STORAGE_READ = "storage read"
    H2D_FETCH = "H2D fetch"
    D2H_GRADIENTS = "D2H gradients"
    H2D_GRADIENTS = "H2D gradients"
    ISSUE = "host issue"

    __hash__ = str.__hash__  # fast, as in `OpKind`


D2H_LANES = frozenset({Lane.D2H, Lane.D2H_GRADIENTS})
H2D_LANES = frozenset({Lane.H2D, Lane.H2D_PARAMETERS, Lane.H2D_FETCH, Lane.H2D_GRADIENTS})
# Copies that do not happen if GPU memory is host memory.
FREE_WHERE_UNIFIED = (OpKind.GRADIENT_D2H, OpKind.GRADIENT_H2D, OpKind.PARAMETER_H2D, OpKind.PARAMETER_D2H)


# The use of a byte of memory. "buckets": DeepSpeed's buckets, and memory that a profile cannot explain. "staging":
# buffers for data that is being copied.
Memory = Literal["device", "host", "storage"]
Kind = Literal["parameters", "gradients", "state", "activations", "buckets", "staging"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Held = Mapping[str, Mapping[Kind, int]]  # bytes of one rank, by memory (key of `TIERS`) and use


def taken_for(kind: OpKind) -> Kind:
    """Return the kind of memory (gradients or activations) that an op of the given kind allocates at its start."""
    return "gradients" if kind in (OpKind.BACKWARD, OpKind.UPDATE_DEVICE) else "activations"


def freed_of(kind: OpKind) -> Kind:
    """Return the kind of memory (gradients or activations) that an op of the given kind frees at its end."""
    return "gradients" if kind == OpKind.UPDATE_DEVICE else "activations"


def op_label(kind: OpKind, subgroup: int, layer: int) -> str:
    """Return the label of an op in drawings and tables of a timeline, such as ``update host s3`` for subgroup 3."""
    part = f" s{subgroup}" if subgroup >= 0 else ""
    part += f" l{layer}" if layer >= 0 else ""
    return f"{kind.value}{part}"


@dataclass(frozen=True, slots=True)
class Span:
    """The start and the end of one op on its lane, in seconds from the timeline's origin."""

    kind: OpKind
    lane: Lane
    start_s: float
    end_s: float
    subgroup: int = -1
    layer: int = -1
    iteration: int = 0

    @property
    def label(self) -> str:
        return op_label(self.kind, self.subgroup, self.layer)


def makespan_s(spans: Sequence[Span]) -> float:
    """Return the seconds from the first start to the last end of the given spans, or 0 if there are none."""
    if not spans:
        return 0.0
    return max(s.end_s for s in spans) - min(s.start_s for s in spans)


class Op(NamedTuple):
    """An op of a schedule: one piece of work on a lane, such as a copy. Ops are tuples, since a schedule has thousands.

    Attributes:
        id: Position in the schedule. ``after`` contains only smaller ids, so that the graph has no cycle.
        work: Amount of work in the unit of ``rate`` (bytes, params, flops, or seconds for ``wall_s``).
        after: Ids of the ops that must end before this op starts, in addition to the previous op of its lane.
        dram_bytes: Host memory traffic of the whole op, reads plus writes.
        cores: Number of CPU cores that the op keeps busy at full speed.
        device_share: Fraction of the GPU's compute (or memory bandwidth) that the op takes at full speed, 0 to
            1.
        device_alloc_bytes, host_alloc_bytes: Memory that is allocated when the op starts.
        device_free_bytes, host_free_bytes: Memory that is freed when the op ends.
        subgroup, layer: Subgroup and layer that the op belongs to. -1 if none.
    """

    id: int
    kind: OpKind
    lane: Lane
    work: float
    rate: RateName = "wall_s"
    after: tuple[int, ...] = ()
    latency_s: float = 0.0
    dram_bytes: float = 0.0
    cores: float = 0.0
    device_share: float = 0.0
    device_alloc_bytes: int = 0
    device_free_bytes: int = 0
    host_alloc_bytes: int = 0
    host_free_bytes: int = 0
    subgroup: int = -1
    layer: int = -1
    iteration: int = 0

    @property
    def label(self) -> str:
        return op_label(self.kind, self.subgroup, self.layer)


@dataclass(frozen=True, slots=True)
class Schedule:
    """A schedule: the ops of one or more training iterations.

    Each lane runs its ops in the order in which ``ops`` lists them.

    Attributes:
        held: Bytes that are in use throughout an iteration, by memory and kind (parameters, state ...).

    Raises:
        ValueError: The id of an op is not its position, or an op waits for a later op.
    """

    ops: tuple[Op, ...]
    iterations: int = 1
    ranks_per_node: int = 1
    strategy: str = "ebbtide"
    held: Held = field(default_factory=dict)

    def __post_init__(self) -> None:
        for position, op in enumerate(self.ops):
            if op.id != position:
                raise ValueError(f"the id of each op must be its position in ops, but ops[{position}].id is {op.id}")
            if op.after and not (min(op.after) >= 0 and max(op.after) < position):
                late = [other for other in op.after if not 0 <= other < op.id]
                raise ValueError(f"an op may wait only for earlier ops, but op {op.id} ({op.label}) waits for {late}")

    @property
    def device_base_bytes(self) -> int:
        return sum(self.held.get("device", {}).values())

    @property
    def host_base_bytes(self) -> int:
        return sum(self.held.get("host", {}).values())

    @property
    def storage_bytes(self) -> int:
        return sum(self.held.get("storage", {}).values())

    def of_kind(self, kind: OpKind, iteration: int | None = None) -> list[Op]:
        """Return the ops of a schedule that have a given kind, in order."""
        return [op for op in self.ops if op.kind == kind and (iteration is None or op.iteration == iteration)]


@dataclass(slots=True)
class ScheduleBuilder:
    """A builder of schedules, to which ops are added one by one. `add` returns the id of the new op."""

    ops: list[Op] = field(default_factory=list)
    iteration: int = 0

    def add(
        self,
        kind: OpKind,
        lane: Lane,
        work: float,
        rate: RateName = "wall_s",
        after: Sequence[int] = (),
        **fields: float,
    ) -> int:
        """Append an op to a schedule, to start after the ops with the ids ``after``, and return the op's id.

        See `Op` for the other fields.
        """
        position = len(self.ops)
        waits = tuple(after) if len(after) < 2 else tuple(sorted(set(after)))
        self.ops.append(
            Op(position, kind, lane, work, rate, waits, iteration=self.iteration, **fields)  # type: ignore[arg-type]
        )
        return position
