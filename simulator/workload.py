"""The class of workloads. A workload is one rank's training iteration: its layers, its subgroups of optimizer state,
and its settings. The functions cut a rank's parameters into subgroups, as DeepSpeed and plans do.
"""

import operator
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, Literal, Protocol, Self, TypeVar

from ebbtide.simulator.display import Shown
from ebbtide.simulator.optimizer import ADAM, OPTIMIZERS, OptimizerState
from ebbtide.simulator.page import Page, digest_of
from ebbtide.simulator.quantity import Quantity
from ebbtide.simulator.rules import RuleError
from pydantic import Field, NonNegativeInt, model_validator

PASSES = ("forward_s", "backward_s")
UNDER_PLANS = ("planned_", "fetched_")  # prefixes of the fields with times under a plan
PASSES_UNDER_PLANS = tuple(kind + name for kind in UNDER_PLANS for name in PASSES)
# Every vector width of DeepSpeed's kernels for x86 and NEON divides this number, so a plan is valid for all of them.
ALIGNMENT = 16


class Cut(Protocol):
    """The interface of objects that say how a workload's parameters are divided into subgroups, such as plans."""

    @property
    def subgroups(self) -> Sequence[int]:
        """Return the number of elements of each subgroup of optimizer state under a plan. Empty if unknown."""
        ...

    @property
    def subgroup_size(self) -> int:
        """Return the least number of elements of a complete subgroup under a plan."""
        ...

    @property
    def deepspeed_subgroup_size(self) -> int:
        """Return DeepSpeed's own subgroup size if a plan's subgroups are parts of DeepSpeed's, otherwise 0."""
        ...


def cut(partitions: Iterable[int], subgroup_size: int) -> list[int]:
    """Return the elements of each subgroup of a parameter group. A subgroup ends with the parameter that fills it.

    Source: ``DeepSpeedZeroOptimizer_Stage3._create_fp16_sub_groups``.
    """
    return [sum(held) for held in grouped(partitions, subgroup_size)]


def grouped(partitions: Iterable[int], subgroup_size: int) -> list[list[int]]:
    """Return the subgroups that DeepSpeed's ZeRO-3 forms, each as a list of the numbers of elements of its
    parameters.
    """
    result, held, size = list[list[int]](), list[int](), 0
    for elements in partitions:
        held.append(elements)
        size += elements
        if size >= subgroup_size:
            result.append(held)
            held, size = [], 0
    return [*result, held] if size else result


def pieces_of(parameters: Iterable[int], least: int) -> list[int]:
    """Return the sizes of the parts into which a subgroup is divided.

    A part grows parameter by parameter. It is complete when it has at least ``least`` elements and ends at a multiple
    of the vector length (see `cut_flat`). The elements after the last complete part are added to that part if they are
    fewer than half of ``least``. Otherwise they form a smaller part.

    Args:
        least: Smallest number of elements of a complete part.
    """
    found, size = list[int](), 0
    for elements in parameters:
        size += elements
        if size >= least and not size % ALIGNMENT:  # so each part begins at a multiple of ALIGNMENT
            found.append(size)
            size = 0
    if size and found and 2 * size < least:
        size += found.pop()
    return [*found, size] if size or not found else found


def cut_flat(partitions: Sequence[int], subgroup_size: int) -> list[int]:
    """Return the sizes of the subgroups into which a flat partition of ZeRO-1 or 2 is divided."""
    # Each has ``subgroup_size`` elements, rounded up to a multiple of 16, and the last one has the rest. A parameter
    # may lie in two subgroups. The rounding keeps results bit-identical to those of the undivided partition:
    # DeepSpeedCPUAdam computes the elements after a tensor's last whole vector in another way, and only the last
    # subgroup has such elements.
    size = max(1, -(-subgroup_size // ALIGNMENT)) * ALIGNMENT
    return [min(size, elements - offset) for elements in partitions for offset in range(0, elements, size)]


LEAST_GATHERED = 1 << 20  # elements
GATHERS = 32  # so many all-gathers, if each has that many elements


def exchanged_pieces(sizes: Sequence[int], most: int | None = None) -> list[tuple[int, int, range]]:
    """Return first element, size and subgroups of the pieces of a ZeRO-1 or 2 partition, in the order of exchange.

    First elements and sizes depend on nothing that may differ between ranks, such as their subgroups. A piece has at
    most ``most`` elements.
    """
    ends = list(accumulate(sizes))
    elements = ends[-1] if ends else 0
    size = max(-(-elements // GATHERS), LEAST_GATHERED)
    size = size if most is None else min(size, most)
    begins = [*range(0, elements, size), elements]
    return [(a, b - a, range(bisect_right(ends, a), bisect_left(ends, b) + 1)) for a, b in pairwise(begins)]


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
        planned_forward_s, planned_backward_s: ``forward_s`` and ``backward_s`` under a plan that keeps all parameters
            in GPU memory. Its hooks on modules and gradients are not DeepSpeed's. None: not known, so the same.
        fetched_forward_s, fetched_backward_s: The same under a plan that keeps parameters in host memory.
    """

    name: str = ""
    params: int = Field(ge=0)
    forward_s: float = Field(ge=0)
    backward_s: float = Field(ge=0)
    planned_forward_s: float | None = Field(None, ge=0)
    planned_backward_s: float | None = Field(None, ge=0)
    fetched_forward_s: float | None = Field(None, ge=0)
    fetched_backward_s: float | None = Field(None, ge=0)
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


SCHEMA_VERSION = 2
OUTLIER = 2  # times the size of the median subgroup
WireDtype = Literal["bf16", "fp16", "fp32"]
ZeroStage = Literal[1, 2, 3]
BaseKind = Literal["parameters", "gradients", "activations"]
WIRE_BYTES: dict[WireDtype, int] = {"bf16": 2, "fp16": 2, "fp32": 4}
STEP = "step_issue_s"
STEPS = (STEP, *(kind + STEP for kind in UNDER_PLANS))
_Timed = TypeVar("_Timed", Layer, "Workload")


ASSUMED_CLIP_RATE = 0.10  # used if no clip rate is given


def adds_on_device(zero_stage: int, gradient_bytes: int, wire_bytes: int) -> bool:
    """Return True if DeepSpeed, without a plan, accumulates the gradients of micro-batches on the GPU."""
    # ZeRO-1 does, because it reduces gradients once per step.
    return zero_stage == 1 or (zero_stage == 2 and gradient_bytes > wire_bytes)


class TrainedAs(Page):
    """The settings of a training step that determine how much memory it needs. A plan is valid for these settings only.

    Attributes:
        precision: Data type of parameters and activations.
        micro_batch: Samples per rank and forward pass.
        accumulation: Micro-batches per optimizer step.
        sequence: Tokens per sample. None if unknown.
        recompute: True if activations are computed again in backward (``gradient_checkpointing=True``). None
            if unknown.
    """

    precision: WireDtype
    micro_batch: int = Field(ge=1)
    accumulation: int = Field(1, ge=1)
    sequence: int | None = Field(None, ge=1)
    recompute: bool | None = None

    @property
    def in_words(self) -> str:
        """Return the settings of a training step (precision, batch, sequence) as one line of text for messages."""
        parts = [self.precision, f"micro-batch {self.micro_batch}", f"accumulation {self.accumulation}"]
        if self.sequence is not None:
            parts.append(f"{self.sequence} tokens per sample")
        if self.recompute is not None:
            parts.append(f"gradient_checkpointing={self.recompute}")
        return ", ".join(parts)


class Workload(Shown, Page):
    """A workload: one rank's share of one training iteration, with the order of the model's layers.

    Attributes:
        layers: Layers in the order of the forward. The sum of their ``params`` is the number of this rank's trainable
            elements.
        subgroups: Number of elements of each of this rank's subgroups of optimizer state, in the order of the layers.
            The first subgroup begins with the first layer's parameters, and each layer's parameters follow those of the
            previous layer.
        wire_dtype: Data type of parameters. Gradients have it too, unless grad_bytes_per_param tells another size.
        optimizer: Name of the optimizer, as in `ebbtide.simulator.optimizer.OPTIMIZERS`.
        clip: True if gradients are clipped or fp16 overflows are checked. No update may start before the gradient norm
            is known then, except an early update.
        clip_rate: Fraction of steps that clip gradients or overflow, so that early updates are redone. None if it is
            unknown: see `expected_clip_rate`.
        device_base_bytes: GPU memory in use throughout an iteration, for parameters and gradient buckets. In a profile
            it includes the part of the measured peak that activations do not explain.
        device_base_parts: Known parts of ``device_base_bytes``, as bytes by kind. The rest of ``device_base_bytes``
            counts as gradient buckets. If empty, the only known part is this rank's partition of the parameters.
        stock_backward_extra_s: Measured time that DeepSpeed's copies of gradients add to backward. None: not measured,
            so the simulator computes it from the copies.
        tokens_per_iteration: Tokens of all ranks together. None if the model's inputs do not tell.
        samples_per_iteration: Samples of all ranks together: DeepSpeed's train_batch_size.
        micro_batch, sequence, recompute: See `TrainedAs`. None if unknown.
        parameters: Number of elements of each parameter's partition, by parameter group. Needed to form subgroups of
            other sizes (`recut`).
        phase_times: Measured seconds of each phase with their spread. ``iteration`` is a whole step, with the work of
            the training script between phases.
        memory_peaks: Measured peaks of ``device`` and ``host`` memory in the profiled steps, in bytes, with their
            spread.
        warnings: Reasons to doubt the profile.
        pipeline_idle_s: Seconds per iteration outside forward, backward and step. In this time, this rank waits for
            other pipeline stages, or the training script does other work, such as loading data. The script's part is
            the machine's ``loop_s``, which `tune calibrate` determines. CPU updates and copies continue in this time.
        stock_threads: Number of OpenMP threads of one rank's CPU updates in DeepSpeed. None: as many as there are
            cores. ebbtide uses the plan's ``threads`` instead.
        zero_stage: DeepSpeed's ZeRO stage. Below 3 each rank has all parameters. With several ranks, a step then waits
            for its updates, and the ranks exchange updated parameters. ZeRO-1 reduces gradients only after the last
            micro-batch.
        reduced_beside: Fraction of the network traffic of a layer's gradient reduction (network_reduce_bytes) that
            overlaps with the next layer's backward. The rest comes first, and that backward waits for it, because
            parameters for that backward are gathered over the network only after the rest.
        reduce_bucket_params: Number of gradient elements that DeepSpeed collects before it reduces them and sends them
            to the host: its ``reduce_bucket_size``. Under ZeRO-3 it is divided by the number of ranks, because
            ``params`` counts one rank's share. 0: gradients leave layer by layer.
        planned_bucket_params: The same in training under a plan. 0: as large as ``reduce_bucket_params``.
        step_gather_s: Time in which the ranks of one node exchange updated parameters at the end of a step.
        network_step_gather_bytes: Bytes that this rank receives from other nodes in that exchange.
        module_issue_s: Time in which the host launches the first kernel of a module, after it has waited for the
            module's parameters (for their update or their copy to the GPU). It is spent in DeepSpeed's hooks. 0 if
            unknown, or if the model runs on the CPU.
        step_issue_s: Time that the CPU spends in ``step()`` before the updates, in DeepSpeed's Python code: it releases
            the parameters one by one and adds up their gradient norms. 0 if unknown, or if the model runs on the CPU.
        planned_step_issue_s, fetched_step_issue_s: ``step_issue_s`` under a plan. See `Layer`.
        deepspeed_subgroup_size: DeepSpeed's sub_group_size if the subgroups are parts of DeepSpeed's subgroups. 0: they
            are DeepSpeed's own, of size ``subgroup_size``.
        state_stays: True if DeepSpeed's fp32 tensors in host memory have space for all state, even if it is in GPU
            memory. Below ZeRO-3 it is always so, under ZeRO-3 if the subgroups are parts of DeepSpeed's.
        live_params: Largest number of elements of ``params`` that are gathered at once. It is given only for a single
            data-parallel rank, which holds whole parameters. None: the parameters of two layers are assumed to be
            gathered at once.
    """

    schema_version: int = SCHEMA_VERSION
    name: str
    layers: tuple[Layer, ...] = Field(min_length=1)
    subgroups: tuple[int, ...] = Field(min_length=1)
    subgroup_size: int = Field(0, ge=0, description="DeepSpeed's sub_group_size. 0: unknown.")
    deepspeed_subgroup_size: int = Field(0, ge=0)
    parameters: tuple[tuple[int, ...], ...] = ()
    wire_dtype: WireDtype = "bf16"
    grad_bytes_per_param: int = Field(2, ge=2, le=4)
    optimizer: str = ADAM.name
    clip: bool = True
    clip_rate: float | None = Field(None, ge=0, le=1)
    gradient_accumulation_steps: int = Field(1, ge=1)
    ranks_per_node: int = Field(1, ge=1)
    nodes: int = Field(1, ge=1)
    stock_threads: int | None = Field(None, ge=1)
    tokens_per_iteration: int | None = Field(None, ge=1)
    samples_per_iteration: int | None = Field(None, ge=1)
    micro_batch: int | None = Field(None, ge=1)
    sequence: int | None = Field(None, ge=1)
    recompute: bool | None = None
    pipeline_idle_s: float = Field(0.0, ge=0)
    zero_stage: ZeroStage = 3
    reduced_beside: float = Field(1.0, ge=0, le=1)
    reduce_bucket_params: int = Field(0, ge=0)
    planned_bucket_params: int = Field(0, ge=0)
    step_gather_s: float = Field(0.0, ge=0)
    network_step_gather_bytes: int = Field(0, ge=0)
    device_base_bytes: int = Field(0, ge=0)
    device_base_parts: dict[BaseKind, NonNegativeInt] = Field(default_factory=dict)
    module_issue_s: float = Field(0.0, ge=0)
    step_issue_s: float = Field(0.0, ge=0)
    planned_step_issue_s: float | None = Field(None, ge=0)
    fetched_step_issue_s: float | None = Field(None, ge=0)
    live_params: int | None = Field(None, ge=0)
    state_stays: bool = False
    stock_backward_extra_s: float | None = Field(None, ge=0)
    memory_curve: tuple[MemoryPoint, ...] = ()
    model_checkpoint_bytes: int = Field(0, ge=0, description="Bytes of a checkpoint other than optimizer state.")
    provenance: str = ""
    phase_times: dict[str, Quantity] = Field(default_factory=dict)
    memory_peaks: dict[str, Quantity] = Field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _read_schema_1(cls, fields: Any) -> Any:
        if not isinstance(fields, dict) or fields.get("schema_version") != 1:
            return fields
        try:
            micro = int(fields.get("gradient_accumulation_steps", 1))
            layers = [dict(layer) for layer in fields["layers"]]
            for layer in layers:
                layer |= {k: float(layer[k]) / micro for k in ("forward_s", "backward_s") if k in layer}
        except (KeyError, TypeError, ValueError, ZeroDivisionError):
            return fields  # the rules of the individual fields report what is wrong
        return {**fields, "layers": layers, "schema_version": SCHEMA_VERSION}

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.optimizer not in OPTIMIZERS:
            raise RuleError(
                f"workload.optimizer must be one of {', '.join(OPTIMIZERS)}, but got {self.optimizer!r}",
                key="optimizer",
            )
        if any(size < 1 for size in self.subgroups):
            raise RuleError(f"every subgroup must hold >= 1 element, but got {self.subgroups}", key="subgroups")
        in_layers = sum(layer.params for layer in self.layers)
        if in_layers != self.params:
            raise RuleError(
                "the layers' params and the subgroups must sum up to the same number of elements, "
                f"but got {in_layers} in workload.layers and {self.params} in workload.subgroups",
                key="layers",
            )
        listed = sum(sum(group) for group in self.parameters)
        if self.parameters and listed != self.params:
            raise RuleError(
                f"workload.parameters must sum up to the subgroups' elements, but got {listed} and {self.params}",
                key="parameters",
            )
        self._check_stage()
        if self.schema_version > SCHEMA_VERSION:
            raise RuleError(
                f"workload.schema_version must be at most {SCHEMA_VERSION}, but got "
                f"{self.schema_version}: the workload file was written by a newer ebbtide. Upgrade ebbtide, or "
                "profile again with `tune profile`",
                key="schema_version",
            )
        return self

    def _check_stage(self) -> None:
        if self.zero_stage == 3 and (self.step_gather_s or self.network_step_gather_bytes):
            raise RuleError(
                "workload.step_gather_s and network_step_gather_bytes must be 0 under ZeRO-3, "
                "whose layers gather their parameters themselves, but got "
                f"{self.step_gather_s} and {self.network_step_gather_bytes}",
                key="step_gather_s",
            )
        if self.zero_stage < 3 and any(layer.network_gather_bytes for layer in self.layers):
            raise RuleError(
                f"workload.layers must not gather parameters under ZeRO-{self.zero_stage}, which "
                "keeps them whole, but got network_gather_bytes: use network_step_gather_bytes",
                key="layers",
            )

    @property
    def overlaps_forward(self) -> bool:
        """Return whether updates may continue in the next forward: not if steps end with an exchange."""
        return self.zero_stage == 3 or not (self.step_gather_s or self.network_step_gather_bytes)

    @property
    def activation_bytes(self) -> int:
        """Return the sum of all layers' activation bytes, which are in GPU memory when a micro-batch's forward ends."""
        return sum(layer.activation_bytes for layer in self.layers)

    @property
    def params(self) -> int:
        """Return the number of trainable elements in this rank's partition of the model."""
        return sum(self.subgroups)

    def recut(self, subgroup_size: int) -> "Workload":
        """Return a copy of the workload with the subgroups that DeepSpeed forms for another ``sub_group_size``.

        Raises:
            ValueError: The workload has no list of its parameters, or the size is not positive.
        """
        if not self.parameters:
            raise RuleError(
                "workload.parameters is needed to change the subgroup size, but workload "
                f"{self.name!r} has none: profile it again with `tune profile`",
                key="subgroup_size",
            )
        if subgroup_size < 1:
            raise RuleError(f"subgroup_size must be >= 1, but got {subgroup_size}", key="subgroup_size")
        if self.zero_stage == 3:
            subgroups = [n for group in self.parameters for n in cut(group, subgroup_size)]
        else:
            subgroups = cut_flat([sum(group) for group in self.parameters], subgroup_size)
        stays = {"deepspeed_subgroup_size": 0, "state_stays": False} if self.deepspeed_subgroup_size else {}
        made = self._with(subgroups=tuple(subgroups), subgroup_size=subgroup_size, **stays)
        return made.configured(self.offload, self.job and self.job.changed(sub_group_size=subgroup_size))

    def configured(self, offload: Any, job: Any = None) -> "Workload":
        """Return a copy that knows its ``offload`` and ``job``, which neither equality nor a file includes."""
        made = self.model_copy()
        made.__dict__.update(offload=offload, job=job)  # where `cached_property` keeps values
        return made

    @property
    def notes(self) -> tuple[str, ...]:
        """Return sentences on what was assumed and what was left out where the workload was estimated from a model."""
        return () if self.job is None else tuple(self.provenance.split("; ")[1:])

    def _with(self, **fields: Any) -> "Workload":
        made = Workload.model_validate({**self.model_dump(), **fields})
        return made.configured(self.offload, self.job)

    def in_pieces(self, subgroup_size: int) -> "Workload":
        """Return a copy of the workload with each of DeepSpeed's subgroups divided into parts.

        DeepSpeed itself keeps its ``sub_group_size``.

        Args:
            subgroup_size: Least number of elements of a part. Only the last part of a subgroup may have fewer.

        Raises:
            ValueError: The workload has no list of its parameters, DeepSpeed's size is unknown, or the ZeRO stage is
                not 3.
        """
        whole = self.deepspeed_subgroup_size or self.subgroup_size
        if self.zero_stage < 3 or not whole:
            raise RuleError(
                "DeepSpeed's subgroups can be divided only under ZeRO-3 and if workload.subgroup_size (DeepSpeed's "
                f"sub_group_size) is known, but got zero_stage {self.zero_stage} and subgroup_size "
                f"{self.subgroup_size}. Profile again with `tune profile`",
                key="subgroup_size",
            )
        own = self.recut(whole)
        groups = [held for group in self.parameters for held in grouped(group, whole)]
        subgroups = tuple(n for held in groups for n in pieces_of(held, subgroup_size))
        if len(subgroups) == len(own.subgroups):
            return own
        stays = {"deepspeed_subgroup_size": whole, "state_stays": True}
        return own._with(subgroups=subgroups, subgroup_size=subgroup_size, **stays)

    def cut_as(self, plan: Cut) -> "Workload":
        """Return a copy with the subgroups of a plan, or the workload unchanged if the plan does not fit it."""
        if tuple(plan.subgroups) in ((), self.subgroups) or not self.parameters:
            return self
        cut = self.cut_by(plan)
        return cut if cut.subgroups == tuple(plan.subgroups) else self

    def cut_by(self, plan: Cut) -> "Workload":
        """Return a copy that is divided into subgroups by a plan's subgroup size.

        Raises:
            ValueError: The workload has no list of its parameters, a size is not positive, or the plan divides
                DeepSpeed's subgroups although the ZeRO stage is not 3.
        """
        if not plan.deepspeed_subgroup_size:
            return self.recut(plan.subgroup_size)
        return self.recut(plan.deepspeed_subgroup_size).in_pieces(plan.subgroup_size)

    def paced(self, times: float) -> "Workload":
        """Return a copy of the workload with the time of each layer's forward and backward multiplied by ``times``."""
        layers = tuple(
            layer.model_copy(
                update={
                    name: s * times
                    for name in (*PASSES, *PASSES_UNDER_PLANS)
                    if (s := getattr(layer, name)) is not None
                }
            )
            for layer in self.layers
        )
        return self.model_copy(update={"layers": layers})

    @property
    def expected_clip_rate(self) -> float:
        """Return the ``clip_rate``, or 10% if it is unknown and gradients are clipped."""
        assumed = ASSUMED_CLIP_RATE if self.clip else 0.0
        return assumed if self.clip_rate is None else self.clip_rate

    @property
    def adds_on_device(self) -> bool:
        """Return True if DeepSpeed accumulates gradients on the GPU without a plan."""
        return adds_on_device(self.zero_stage, self.grad_bytes_per_param, self.wire_bytes)

    @property
    def one_subgroup(self) -> "Workload":
        """Return a copy of the workload with all optimizer state in one subgroup, as in DeepSpeed's ZeRO-1 and 2."""
        return self._with(subgroups=(self.params,))

    @property
    def planned(self) -> "Workload":
        """Return a copy with the times under a plan with parameters on the GPU, or DeepSpeed's if unknown."""
        return self._timed_as("planned_")

    @property
    def fetched(self) -> "Workload":
        """Return a copy with the times under a plan with parameters in host memory, or DeepSpeed's if unknown."""
        return self._timed_as("fetched_")

    def _timed_as(self, kind: str) -> "Workload":
        layers = tuple(_timed(layer, PASSES, kind) for layer in self.layers)
        made = _timed(self, (STEP,), kind)
        same = made is self and all(map(operator.is_, layers, self.layers))
        return self if same else made.model_copy(update={"layers": layers})

    @property
    def large_subgroups(self) -> list[int]:
        """Return the indices of the subgroups with more than twice the elements of the median subgroup."""
        typical = sorted(self.subgroups)[len(self.subgroups) // 2]
        return [i for i, n in enumerate(self.subgroups) if n > OUTLIER * typical]

    @property
    def optimizer_state(self) -> OptimizerState:
        """Return the description of the workload's optimizer: the fp32 tensors that it keeps for each parameter."""
        return OPTIMIZERS[self.optimizer]

    @property
    def wire_bytes(self) -> int:
        return WIRE_BYTES[self.wire_dtype]

    @property
    def forward_s(self) -> float:
        """Return the seconds of forward in a training step of one rank: the sum over all layers and micro-batches."""
        return self.gradient_accumulation_steps * sum(layer.forward_s for layer in self.layers)

    @property
    def backward_s(self) -> float:
        """Return the seconds of backward in a training step of one rank: the sum over all layers and micro-batches."""
        return self.gradient_accumulation_steps * sum(layer.backward_s for layer in self.layers)

    @property
    def checkpoint_bytes(self) -> int:
        """Return the bytes that one rank writes per checkpoint: optimizer state and parameters."""
        return self.params * self.optimizer_state.state_bytes + self.model_checkpoint_bytes

    def layers_of_subgroups(self) -> tuple[tuple[int, ...], ...]:
        """Return, for each subgroup of optimizer state, the numbers of the layers that have parameters in it."""
        result: list[list[int]] = [[] for _ in self.subgroups]
        for number, held in enumerate(self.shares()):
            for subgroup, _ in held:
                result[subgroup].append(number)
        return tuple(map(tuple, result))

    def shares(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Return, for each layer, a tuple of pairs: a subgroup, and the number of the layer's elements in it."""
        result: list[tuple[tuple[int, int], ...]] = []
        subgroup, left = 0, self.subgroups[0]
        for layer in self.layers:
            missing, held = layer.params, []
            while missing:
                taken = min(missing, left)
                held.append((subgroup, taken))
                missing, left = missing - taken, left - taken
                if left == 0 and subgroup + 1 < len(self.subgroups):
                    subgroup += 1
                    left = self.subgroups[subgroup]
            result.append(tuple(held))
        return tuple(result)

    def in_short(self) -> str:
        size = f"{self.params / 1e9:.3g} G parameters on this rank of {self.ranks_per_node * self.nodes}"
        cut_into = f"{len(self.layers)} layers, {len(self.subgroups)} subgroups"
        return f"{self.name}, {size}, {cut_into}, {self.wire_dtype}, accumulation {self.gradient_accumulation_steps}"

    def records(self) -> list[dict[str, Any]]:
        """Return a list of table rows, one for each layer of a workload, with times and memory of one micro-batch."""
        return [
            {
                "layer": layer.name,
                "params": layer.params,
                "forward_s": layer.forward_s,
                "backward_s": layer.backward_s,
                "activation_MiB": layer.activation_bytes / 2**20,
            }
            for layer in self.layers
        ]

    def drawn(self) -> tuple[str, ...]:
        return ("forward_s", "backward_s")

    @cached_property
    def job(self) -> Any:
        """Return the `Job` from which the workload was estimated. None if it was profiled or read from a file."""
        return None

    @cached_property
    def offload(self) -> Any:
        """Return the `Offloading` of the DeepSpeed config. None if no config is known."""
        return None if self.job is None else self.job.offload

    @property
    def trained_as(self) -> TrainedAs | None:
        """Return the training settings that a workload describes, such as precision and micro-batch size.

        A caller compares these settings with the settings of a plan. The result is None if they are unknown.
        """
        if self.micro_batch is None:
            return None
        shared: dict[str, Any] = {name: getattr(self, name) for name in ("micro_batch", "sequence", "recompute")}
        return TrainedAs(precision=self.wire_dtype, accumulation=self.gradient_accumulation_steps, **shared)

    @property
    def fingerprint(self) -> str:
        """Return a hash of a workload's subgroups, data types, optimizer and ZeRO stage, without times.

        A plan records the hash of the workload that it was made for, and training must match it.
        """
        names = ("subgroups", "wire_dtype", "grad_bytes_per_param")
        facts: dict[str, object] = {name: getattr(self, name) for name in names}
        if self.optimizer != ADAM.name:  # files written before ebbtide supported other optimizers are for Adam
            facts["optimizer"] = self.optimizer
        if self.zero_stage != 3:  # the same holds for ZeRO-3
            facts["zero_stage"] = self.zero_stage
        return digest_of(facts)


def _timed(one: _Timed, names: Iterable[str], kind: str) -> _Timed:
    others = {other + name: getattr(one, other + name) for other in UNDER_PLANS for name in names}
    if all(seconds is None for seconds in others.values()):
        return one
    known = {name: seconds for name in names if (seconds := others[kind + name]) is not None}
    return one.model_copy(update={**dict.fromkeys(others), **known})
