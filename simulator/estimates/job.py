"""The training job: a model with its training settings, from which times and memory of training are estimated."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args, get_origin

from ebbtide.simulator.estimates.compute import FLASH_VERSIONS, KERNELS, FlashVersion, Kernels
from ebbtide.simulator.estimates.deepspeed_config import (
    PREFETCH_BUCKET_ELEMENTS,
    REDUCE_BUCKET_ELEMENTS,
    deepspeed_fields,
    unread,
)
from ebbtide.simulator.estimates.deepspeed_keys import AUTOTP, BATCH_KEYS, ZERO, at
from ebbtide.simulator.estimates.models.architecture import architecture
from ebbtide.simulator.estimates.models.blocks import Architecture, ModelError
from ebbtide.simulator.estimates.offloading import WITHOUT_CONFIG, Offloading, offloading
from ebbtide.simulator.optimizer import ADAM
from ebbtide.simulator.rules import broken, suggestion, worded
from ebbtide.simulator.schedules.gathers import GatherRules
from ebbtide.simulator.workload import WIRE_BYTES, WireDtype, Workload, ZeroStage
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, ValidationInfo, model_validator

# Programs that start a job's ranks. Each gives a rank a number of OpenMP threads, on which DeepSpeed's updates on the
# CPU run: ``OMP_NUM_THREADS`` if it is set, otherwise the number of cores that the rank may use. `torchrun` sets the
# variable to 1 if it is unset and a node has more than one rank (``torch/distributed/run.py``). `accelerate launch`
# starts its ranks by torchrun and does the same (``num_cpu_threads_per_process``). The others do not set it. ebbtide's
# own updates do not depend on it.
Launcher = Literal["deepspeed", "torchrun", "accelerate", "srun", "python"]
LAUNCHERS: tuple[Launcher, ...] = get_args(Launcher)
ONE_THREAD: tuple[Launcher, ...] = ("torchrun", "accelerate")


def stock_threads(launcher: Launcher, omp_threads: int | None, ranks_per_node: int) -> int | None:
    """Return the number of threads that one rank's DeepSpeed uses for updates on the CPU. None: all that it may use."""
    if omp_threads is None and launcher in ONE_THREAD and ranks_per_node > 1:
        return 1
    return omp_threads


def started(
    workload: Workload, launcher: Launcher | None = None, omp_threads: int | None = None, clip_rate: float | None = None
) -> Workload:
    """Return the workload with other settings of a run. The number of threads decides how fast DeepSpeed updates.

    Args:
        launcher: Program that starts the ranks. None: the number of threads stays, unless ``omp_threads`` is given.
        omp_threads: ``OMP_NUM_THREADS`` as set by the user. None: not set.
        clip_rate: Fraction of steps that clip gradients or overflow. None: the workload's own.
    """
    changes: dict[str, float | None] = {}
    if launcher is not None or omp_threads is not None:
        changes["stock_threads"] = stock_threads(launcher or "deepspeed", omp_threads, workload.ranks_per_node)
    if clip_rate is not None:
        changes["clip_rate"] = clip_rate
    return workload.model_copy(update=changes) if changes else workload


# The setting `offload` of searches and of the web page -> where DeepSpeed keeps optimizer state and parameters.
OFFLOADS = {
    "none": ("none", "none"),
    "optimizer": ("cpu", "none"),
    "parameters": ("cpu", "cpu"),
    "nvme": ("nvme", "cpu"),
}
# Fields whose assumed values are told by a note that begins with DeepSpeed's key. Another value makes the note void.
_NOTED = {"zero_stage": f"{ZERO}.stage", **BATCH_KEYS}
SELECTIVE_SHARE = 0.5  # every other layer, as torchtitan's "selective" and fms-fsdp do by default
_BF16: Mapping[str, Any] = {"bf16": {"enabled": True}}
MOST_RANKS, MOST_TOKENS = 10**7, 10**8
_LONG = 2**14  # tokens. In longer sequences, attention takes a large part of the time
_OLD_ATTENTION = (
    "attention is computed as by version 2 of FlashAttention, which PyTorch calls, and later versions are up to twice "
    "as fast: give the version that your model uses (flash_version)"
)


def _must(rule: str, holds: Callable[[Any], bool]) -> BeforeValidator:
    def check(value: Any, info: ValidationInfo) -> Any:
        if not holds(value):
            raise ModelError(f"{info.field_name} must {rule}, but got {value!r}", key=info.field_name or "")
        return value

    return BeforeValidator(check)


def _whole(most: int) -> BeforeValidator:
    return _must("be a whole number >= 1", lambda v: isinstance(v, int) and not isinstance(v, bool) and 1 <= v <= most)


def _one_of(known: Sequence[Any], *more: None) -> BeforeValidator:
    return _must(f"be one of {', '.join(map(str, known))}", lambda v: not isinstance(v, bool) and v in (*known, *more))


Count = Annotated[int, _whole(MOST_RANKS)]
Tokens = Annotated[int, _whole(MOST_TOKENS)]
Switch = Annotated[bool, _must("be True or False", lambda v: isinstance(v, bool))]
Share = Annotated[
    float,
    _must(
        "lie in (0, 1] (without recomputation: recompute=False, --keep-activations)",
        lambda v: isinstance(v, int | float) and not isinstance(v, bool) and 0 < v <= 1,
    ),
]
Rate = Annotated[
    float | None, _must("lie in [0, 1]", lambda v: v is None or (isinstance(v, int | float) and 0 <= v <= 1))
]


@dataclass(frozen=True)
class Control:
    """The control of the planning service's page with which users give a setting of a job.

    Attributes:
        label: Label of the control. Empty: the setting's name.
        choices: Texts of the values of a switch, or of a setting that has few. Empty: no and yes, or the values. The
            control of a number is a slider, because the number may be none of the choices.
        stops: Values at which a slider stops. Empty: powers of two, or percentages of a share.
        unit: Unit of a slider's numbers, in the plural. A share is given in percent.
        unset: Text for the value None.
        first: True if the control is shown at once, and False if it is in a folded part of the form. A larger value of
            a slider that is shown at once trains more tokens in an iteration.
        of_machine: True if the control is among those of the hardware.
    """

    label: str = ""
    choices: Mapping[Any, str] = field(default_factory=dict, hash=False)
    stops: tuple[float, ...] = ()
    unit: str = ""
    unset: str = "not set"
    first: bool = False
    of_machine: bool = False


@dataclass(frozen=True)
class Asked:
    """The flag of ``tune`` commands and the field of requests by which users give a setting of a job.

    Attributes:
        help: Help of the flag.
        flag: Name of the flag's value, if another than the setting's. The flag of a switch that is on by default turns
            it off, and is named after that.
        http: Name of the request's field, if another. If it is named after the contrary of a switch, as the flag is, it
            means the contrary. None: requests have no such field.
        limits: Limits of the value in a request. None: from 1 to 65,536.
        null: False if a request cannot leave the value to the DeepSpeed config, the machine or a profile.
        profiled: False if a profiled workload does not contain the setting.
        unless: Flag with which this one has no effect.
        control: Control on the planning service's page, where each setting with a field of requests has one.
    """

    help: str
    flag: str = ""
    http: str | None = ""
    limits: Any = None
    null: bool = True
    profiled: bool = True
    unless: str = ""
    control: Control = Control()


class NotAdvised(str):
    """The reason why no advice changes a setting of a job."""

    __slots__ = ()


_LEARNED, _PROGRAM = NotAdvised("decides what is learned"), NotAdvised("needs another training program")
_STARTED, _SOURCE = (
    NotAdvised("says what is installed and how training is started"),
    NotAdvised("tells where the settings come from"),
)
_BUFFER, _GATHERS = (
    NotAdvised("is the size of a buffer of DeepSpeed's"),
    NotAdvised("is one of DeepSpeed's rules of gathers"),
)


class Job(BaseModel):
    """A training job: a model and its training settings.

    Each field says how users give it (`Asked`), and why no advice changes it if so (`NotAdvised`). The flags of
    ``tune``, the fields of requests to the planning service and the tests of all of them follow from this class.

    Attributes:
        architecture: Model that is trained.
        data_parallel: The whole job has data_parallel x tensor_parallel x pipeline_parallel GPUs.
        stage: Number of the pipeline stage to simulate. 0: the first.
        sequence_parallel: True if activations that tensor parallelism does not divide are divided along the sequence.
        offload: Memory that holds optimizer state, parameters and activations.
        flash_attention: True if attention scores are never stored in memory.
        flash_version: The published speed of this version determines the time of attention. None: the machine's
            ``attention_flops_per_s`` determine it. In presets, these are the FLOP/s of version 2.
        precision: Data type of parameters, and of gradients when they are reduced.
        gradient_bytes: Bytes per element of an accumulated gradient.
        clip: Norm to which gradients are clipped. 0: no clipping.
        clip_rate: None if unknown: see `Workload.expected_clip_rate`.
        max_live_parameters, max_reuse_distance, persistence_threshold: DeepSpeed's ``stage3_`` keys of similar names,
            in elements. They decide which gathered parameters stay on the GPU between two uses.
        overlap_comm: DeepSpeed's key of this name. None: DeepSpeed's default at this ZeRO stage.
        notes: Sentences that tell which value was assumed for a setting that was ``"auto"`` or missing.
        config: DeepSpeed config from which the settings were read.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    architecture: Annotated[Architecture, _LEARNED]
    sequence: Annotated[
        Tokens,
        Asked(
            "number of tokens per sample (default: 2048).",
            limits=Field(ge=1, le=2**22),
            null=False,
            control=Control("Sequence length", stops=tuple(2**n for n in range(9, 18)), unit="tokens", first=True),
        ),
    ] = 2048
    micro_batch: Annotated[
        int,
        Asked(
            "number of samples per GPU and forward pass.",
            control=Control(
                "Micro-batch", stops=(1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64), unit="samples", first=True
            ),
        ),
    ] = 1
    accumulation: Annotated[
        int,
        Asked(
            "number of micro-batches per optimizer step.",
            limits=Field(ge=1, le=4096),
            control=Control("Accumulation", unit="micro-batches", first=True),
        ),
    ] = 1
    zero_stage: Annotated[
        ZeroStage,
        Asked(
            "ZeRO stage 1, 2 or 3 (default: the DeepSpeed config's, or 3).",
            limits=Field(ge=1, le=3),
            control=Control(
                "ZeRO stage", {3: "3: state, gradients, parameters", 2: "2: state and gradients", 1: "1: state"}
            ),
        ),
    ] = 3
    data_parallel: Annotated[
        Count,
        Asked(
            "number of data-parallel ranks (default: 1, or all cards of a preset such as rtx4090-x2).",
            http="gpus",
            control=Control("GPUs", stops=tuple(2**n for n in range(9)), first=True, of_machine=True),
        ),
    ] = 1
    tensor_parallel: Annotated[
        Count,
        Asked(
            "degree of tensor parallelism, the number of ranks that split each layer (default: 1).",
            null=False,
            control=Control("GPUs that share each layer", stops=(1, 2, 4, 8), of_machine=True),
        ),
        _PROGRAM,
    ] = 1
    pipeline_parallel: Annotated[
        Count, Asked("number of pipeline stages, with ZeRO-1 only (default: 1).", http=None), _PROGRAM
    ] = 1
    stage: Annotated[int, _PROGRAM] = 0
    sequence_parallel: Annotated[Switch, _PROGRAM] = False
    sub_group_size: int = 10**9
    offload: Offloading = WITHOUT_CONFIG
    recompute: Annotated[
        Switch,
        Asked(
            "keep activations, without gradient checkpointing.",
            flag="keep_activations",
            http="keep_activations",
            control=Control("Activations", {False: "computed again in backward", True: "kept"}),
        ),
    ] = True
    recompute_share: Annotated[
        Share,
        Asked(
            "share of the layers whose activations are recomputed, e.g. 50% (default: all).",
            limits=Field(gt=0, le=1, allow_inf_nan=False),
            unless="keep_activations",
            control=Control("Layers computed again", unit="%"),
        ),
    ] = 1.0
    kernels: Annotated[
        Kernels,
        _one_of(KERNELS),
        Asked(
            "kernels of norms, activations and rotary embedding. fused: fused or compiled kernels (torch.compile, "
            "Liger, Megatron-LM). eager: PyTorch's own, as in plain transformers (default: fused).",
            control=Control(
                "Kernels between products", {"fused": "fused or compiled", "eager": "PyTorch's own, as in transformers"}
            ),
        ),
    ] = "fused"
    fused_loss: Annotated[
        Switch,
        Asked(
            "the loss is computed without storing all logits, in one kernel or in chunks.",
            control=Control("Loss", {False: "stores all logits", True: "fused, or in chunks"}),
        ),
    ] = False
    flash_attention: Annotated[
        Switch,
        Asked(
            "attention scores are stored in memory (attn_implementation eager).",
            flag="no_flash_attention",
            control=Control("Attention", {True: "FlashAttention", False: "stores its scores (eager)"}),
        ),
    ] = True
    flash_version: Annotated[
        FlashVersion | None,
        _one_of(FLASH_VERSIONS, None),
        Asked(
            "major version of FlashAttention, e.g. 3 on H100 (default: 2, as in PyTorch).",
            unless="no_flash_attention",
            control=Control("Version of FlashAttention", unset="2, as in PyTorch"),
        ),
        _STARTED,
    ] = None
    optimizer: Annotated[str, _LEARNED] = ADAM.name
    precision: Annotated[WireDtype, _LEARNED] = "bf16"
    gradient_bytes: Annotated[int, NotAdvised("decides how gradients round")] = 2
    clip: Annotated[float, _LEARNED] = 1.0
    reduce_bucket_elements: Annotated[int, _BUFFER] = REDUCE_BUCKET_ELEMENTS
    prefetch_bucket_elements: Annotated[int, _BUFFER] = PREFETCH_BUCKET_ELEMENTS
    overlap_comm: Annotated[bool | None, NotAdvised("is DeepSpeed's key for its own reductions")] = None
    max_live_parameters: Annotated[int, _GATHERS] = GatherRules().live
    max_reuse_distance: Annotated[int, _GATHERS] = GatherRules().reuse
    persistence_threshold: Annotated[int, _GATHERS] = GatherRules().persistent
    launcher: Annotated[
        Launcher,
        _one_of(LAUNCHERS),
        Asked(
            "Launcher of the ranks (default: deepspeed, with which CPU Adam uses all cores). With several ranks on a "
            "node, torchrun and accelerate limit DeepSpeed's own CPU Adam to one thread per rank.",
            profiled=False,
            control=Control("Launcher", of_machine=True),
        ),
        _STARTED,
    ] = "deepspeed"
    omp_threads: Annotated[
        Count | None,
        Asked(
            "Value of OMP_NUM_THREADS in each rank. DeepSpeed's own CPU Adam uses this number of threads per rank "
            "(default: depends on --launcher).",
            profiled=False,
            control=Control("OMP_NUM_THREADS", unit="threads", of_machine=True),
        ),
        _STARTED,
    ] = None
    clip_rate: Annotated[
        Rate,
        Asked(
            "Fraction of steps that clip gradients or overflow, e.g. 5% (default: 10%). In these steps, updates that "
            "started before the gradient norm was known are rolled back.",
            limits=Field(ge=0, le=1, allow_inf_nan=False),
            profiled=False,
            control=Control("Steps that clip gradients", stops=(0, 0.01, 0.05, 0.1, 0.2, 0.5, 1), unit="%"),
        ),
        _LEARNED,
    ] = None
    notes: Annotated[tuple[str, ...], _SOURCE] = ()
    config: Annotated[Mapping[str, Any], _SOURCE] = {}

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not 0 <= self.stage < self.pipeline_parallel:
            raise ModelError(
                f"stage must lie in [0, {self.pipeline_parallel - 1}] (pipeline_parallel - 1), but got {self.stage}",
                "stage",
            )
        if self.sequence_parallel and self.tensor_parallel == 1:
            raise ModelError(
                "sequence_parallel must be False without tensor parallelism, whose ranks divide "
                "the sequence, but got True with tensor_parallel=1: give tensor_parallel too",
                "sequence_parallel",
            )
        self._check_division()
        return self

    def _check_division(self) -> None:
        arch, tensor, pipeline = self.architecture, self.tensor_parallel, self.pipeline_parallel
        split = at(self.config, AUTOTP) or 1  # DeepSpeed's 0 means 1
        if split not in (1, tensor):
            raise ModelError(
                f"{AUTOTP} is {split} in the DeepSpeed config, but tensor_parallel is {tensor}: remove the key, or "
                f"let both be equal (--tensor-parallel {split} of tune plan and tune simulate)",
                "tensor_parallel",
            )
        if arch.heads % tensor:
            raise ModelError(
                f"tensor_parallel must divide the {arch.heads} attention heads, but got {tensor}", "tensor_parallel"
            )
        if arch.kv_heads % tensor and tensor % arch.kv_heads:
            raise ModelError(
                f"tensor_parallel must divide the {arch.kv_heads} key-value heads (or be a "
                f"multiple of them), but got {tensor}",
                "tensor_parallel",
            )
        if pipeline > arch.layers:
            raise ModelError(
                f"pipeline_parallel must be at most the {arch.layers} layers, but got {pipeline}", "pipeline_parallel"
            )
        if pipeline > 1 and self.zero_stage > 1:
            raise ModelError(
                "pipeline_parallel must be 1 under ZeRO-2 and ZeRO-3, because DeepSpeed's pipeline engine does not "
                f"support these stages, but got {pipeline} under ZeRO-{self.zero_stage}. Use zero_stage 1 "
                "(--zero-stage), or use data_parallel or tensor_parallel instead (--data-parallel, --tensor-parallel)",
                "pipeline_parallel",
            )

    @property
    def gather_rules(self) -> GatherRules:
        return GatherRules(
            self.max_reuse_distance, self.prefetch_bucket_elements, self.max_live_parameters, self.persistence_threshold
        )

    @property
    def logits_bytes(self) -> int:
        """Return the bytes of GPU memory of a micro-batch's logits and their two fp32 copies."""
        logits = self.sequence * self.micro_batch * self.architecture.vocabulary / self.tensor_parallel
        return int((WIRE_BYTES[self.precision] + 4 + 4) * logits)

    @property
    def clips(self) -> bool:
        """Return True if updates wait for the gradient norm, to clip or to detect an overflow."""
        return self.clip > 0 or self.precision == "fp16"

    @property
    def overlaps_comm(self) -> bool:
        """Return True if gradient reductions overlap with backward. By default DeepSpeed does so only under ZeRO-3."""
        return self.zero_stage == 3 if self.overlap_comm is None else self.overlap_comm

    @property
    def names_bucket(self) -> bool:
        """Return True if the DeepSpeed config sets ``reduce_bucket_size``. If not, training under a plan may set it."""
        named = "reduce_bucket_size" in (self.config.get(ZERO) or {})
        return named or self.reduce_bucket_elements != REDUCE_BUCKET_ELEMENTS

    def stock_threads(self, ranks_per_node: int) -> int | None:
        """Return the number of threads of DeepSpeed's updates on the CPU, for one rank. None: the number of cores."""
        return stock_threads(self.launcher, self.omp_threads, ranks_per_node)

    @property
    def round_robin(self) -> bool:
        """Return True if DeepSpeed distributes whole parameters over the ranks in turn (``round_robin_gradients``)."""
        # DeepSpeed can do so only under ZeRO-1 and 2.
        return self.zero_stage < 3 and bool((self.config.get(ZERO) or {}).get("round_robin_gradients"))

    @property
    def aligned(self) -> bool:
        """Return True if the DeepSpeed config sets ``parameter_alignment`` and the ZeRO stage is below 3."""
        # Each parameter then starts at a multiple of 16 bytes in DeepSpeed's flat buffer.
        return self.zero_stage < 3 and bool((self.config.get(ZERO) or {}).get("parameter_alignment"))

    @property
    def estimate_notes(self) -> tuple[str, ...]:
        """Return sentences for the user about the estimate of a training job.

        They tell which values were assumed for settings that were ``"auto"`` or missing, and which config keys and
        parts of the model the simulator ignores. If sequences are long and the version of FlashAttention is not given,
        a sentence tells that version 2 is assumed.
        """
        keys = unread(self.config, self.offload, self.zero_stage)
        ignored = [", ".join(keys)] if keys else []
        if self.architecture.other_elements:
            millions = self.architecture.other_elements / 1e6
            ignored.append(f"the compute of the model's parts for images or sound ({millions:,.0f} M parameters)")
        old = [_OLD_ATTENTION] if self.flash_attention and not self.flash_version and self.sequence >= _LONG else []
        return tuple(map(worded, (*self.notes, *old, *(f"not simulated: {what}" for what in ignored))))

    @classmethod
    def of_deepspeed(
        cls,
        model: Architecture | Mapping[str, Any] | str | Path,
        config: Mapping[str, Any] | str | Path | None = None,
        *,
        micro_batch: int | None = None,
        accumulation: int | None = None,
        precision: WireDtype | None = None,
        zero_stage: int | None = None,
        **shape: Any,
    ) -> Self:
        """Return the training job that consists of a model and a DeepSpeed config, which may contain ``"auto"``.

        Args:
            model: See `architecture`.
            micro_batch, accumulation, precision, zero_stage: Values to use where the config has none or ``"auto"``.
            shape: Other fields of a job.

        Raises:
            ModelError: The model's description, the config or a value cannot be used. The message names the key.
        """
        if precision is not None and precision not in WIRE_BYTES:
            raise ModelError(f"precision must be one of {', '.join(WIRE_BYTES)}, but got {precision!r}")
        arch = architecture(model)
        ranks, tensor = shape.get("data_parallel", 1), shape.get("tensor_parallel", 1)
        read = deepspeed_fields(
            config,
            hidden=arch.hidden,
            ranks=ranks if isinstance(ranks, int) and ranks else 1,
            tensor_parallel=tensor if isinstance(tensor, int) else 1,
            micro_batch=micro_batch,
            accumulation=accumulation,
            precision=precision,
            zero_stage=zero_stage,
        )
        return cls._checked({"architecture": arch, **read, **shape})

    def changed(self, **knobs: Any) -> Self:
        """Return a copy of the training job with other settings. ``offload`` may be a name from `OFFLOADS`.

        Raises:
            ModelError: A value cannot be used.
        """
        word = knobs.get("offload")
        void = tuple(f"{_NOTED[name]}: " for name in knobs if name in _NOTED)
        knobs = {"notes": tuple(note for note in self.notes if not note.startswith(void)), **knobs}
        if not isinstance(word, str):
            return self._checked({**dict(self), **knobs})
        state, parameters = OFFLOADS[word]
        moved = replace(self.offload, optimizer=state, parameters=parameters)
        made = self._checked({**dict(self), **knobs, "offload": moved})
        # Settings that depend on the devices (pinning, a ratio) come from the config.
        return made.model_copy(update={"offload": offloading(made.deepspeed())})

    @classmethod
    def _checked(cls, fields: Mapping[str, Any]) -> Self:
        if unknown := sorted(set(fields) - set(cls.model_fields)):
            raise ModelError(
                f"a training job is described by the fields {', '.join(cls.model_fields)}, "
                f"but got the field {unknown[0]!r}{suggestion(unknown[0], cls.model_fields)}"
            )
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            first = broken(error, model=cls)[0]
            raise ModelError(first.sentence, first.key) from None

    def deepspeed(self) -> dict[str, Any]:
        """Return the DeepSpeed config of a training job: the config that it was created from, with the job's values.

        If the job was not created from a config, the returned one enables bf16, because all commands of `tune` assume
        it. DeepSpeed would otherwise train in fp32.
        """
        given = self.config.get(ZERO) or {}
        zero: dict[str, Any] = {
            **{k: v for k, v in given.items() if k not in ("offload_optimizer", "offload_param")},
            "stage": self.zero_stage,
            "sub_group_size": self.sub_group_size,
        }
        for key, device in (("offload_optimizer", self.offload.optimizer), ("offload_param", self.offload.parameters)):
            if device not in (None, "none"):
                zero[key] = {**(given.get(key) or {}), "device": device}
        config = {k: v for k, v in self.config.items() if k != "train_batch_size"}
        return {
            **(config or _BF16),
            "train_micro_batch_size_per_gpu": self.micro_batch,
            "gradient_accumulation_steps": self.accumulation,
            ZERO: zero,
        }


@dataclass(frozen=True)
class Setting:
    """A setting of a job that users give: a field of `Job` with its type and its names at each door."""

    name: str
    kind: Any
    asked: Asked

    @property
    def flag(self) -> str:
        return self.asked.flag or self.name

    @property
    def http(self) -> str | None:
        return self.name if self.asked.http == "" else self.asked.http

    def value(self, given: Any, name: str) -> Any:
        """Return the field's value for a value that was given by a name, which may mean the contrary of a switch."""
        return not given if isinstance(given, bool) and name != self.name else given


def settings(job: type[Job] = Job) -> tuple[Setting, ...]:
    """Return the settings of a job that users give, in the order of its fields."""
    return tuple(
        Setting(name, bare(field.annotation), asked)
        for name, field in job.model_fields.items()
        for asked in field.metadata
        if isinstance(asked, Asked)
    )


def bare(kind: Any) -> Any:
    """Return a field's type without None and rules."""
    inside = [one for one in get_args(kind) if one is not type(None)]
    return kind if not inside or get_origin(kind) is Literal else bare(inside[0])
