"""The training job: a model with its training settings, from which times and memory of training are estimated."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Self

from ebbtide.simulator.estimates.compute import FLASH_VERSIONS, KERNELS, FlashVersion, Kernels
from ebbtide.simulator.estimates.deepspeed_config import (
    PREFETCH_BUCKET_ELEMENTS,
    REDUCE_BUCKET_ELEMENTS,
    deepspeed_fields,
    unread,
)
from ebbtide.simulator.estimates.deepspeed_keys import AUTOTP, ZERO, at
from ebbtide.simulator.estimates.launchers import LAUNCHERS, Launcher, stock_threads
from ebbtide.simulator.estimates.models.architecture import architecture
from ebbtide.simulator.estimates.models.blocks import Architecture, ModelError
from ebbtide.simulator.estimates.offloading import WITHOUT_CONFIG, Offloading, offloading
from ebbtide.simulator.rules import broken, suggestion, worded
from ebbtide.simulator.schedules.gathers import GatherRules
from ebbtide.simulator.update.optimizer import ADAM
from ebbtide.simulator.workload import WIRE_BYTES, WireDtype, ZeroStage
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, ValidationInfo, model_validator

# The setting `offload` of searches and of the web page -> where DeepSpeed keeps optimizer state and parameters.
OFFLOADS = {
    "none": ("none", "none"),
    "optimizer": ("cpu", "none"),
    "parameters": ("cpu", "cpu"),
    "nvme": ("nvme", "cpu"),
}
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


class Job(BaseModel):
    """A training job: a model and its training settings. It can estimate its workload on a machine.

    It is created from command-line flags, a DeepSpeed config, a web request or Python.

    Attributes:
        architecture: Model that is trained.
        sequence: Tokens per sample.
        micro_batch: Samples per rank and forward pass.
        accumulation: Micro-batches per optimizer step.
        data_parallel: Number of data-parallel ranks, among which ZeRO partitions. The whole job has data_parallel x
            tensor_parallel x pipeline_parallel GPUs.
        stage: Number of the pipeline stage to simulate. 0: the first.
        sequence_parallel: True if activations that tensor parallelism does not divide are divided along the sequence.
        offload: Memory that holds optimizer state, parameters and activations.
        recompute: True if only the input of each layer is kept, and the layer is computed again in backward (activation
            checkpointing).
        recompute_share: Fraction of layers that are computed again. 1: all. 0.5: every other layer.
        flash_attention: True if attention scores are never stored in memory.
        flash_version: Major version of FlashAttention. The published speed of this version determines the time of
            attention. None: the machine's ``attention_flops_per_s`` determine it. In presets, these are the FLOP/s of
            version 2.
        kernels: Implementation of the kernels between matrix products. ``fused``: fused or compiled (Megatron-LM,
            torch.compile, Liger). ``eager``: PyTorch's own, as in the transformers library.
        fused_loss: True if one kernel computes logits and loss, or if both are computed chunk by chunk.
        precision: Data type of parameters, and of gradients when they are reduced.
        gradient_bytes: Bytes per element of an accumulated gradient.
        clip: Norm to which gradients are clipped. 0: no clipping.
        clip_rate: Fraction of steps that clip gradients or overflow. None if unknown: see
            `Workload.expected_clip_rate`.
        max_live_parameters, max_reuse_distance, persistence_threshold: DeepSpeed's ``stage3_`` keys of similar names,
            in elements. They decide which gathered parameters stay on the GPU between two uses.
        overlap_comm: DeepSpeed's key of this name. None: DeepSpeed's default at this ZeRO stage.
        launcher: Program that launches the ranks. It determines the number of threads of DeepSpeed's updates on the
            CPU.
        omp_threads: ``OMP_NUM_THREADS`` as set by the user.
        notes: Sentences that tell which value was assumed for a setting that was ``"auto"`` or missing.
        config: DeepSpeed config from which the settings were read.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    architecture: Architecture
    sequence: Tokens = 2048
    micro_batch: int = 1
    accumulation: int = 1
    data_parallel: Count = 1
    tensor_parallel: Count = 1
    pipeline_parallel: Count = 1
    stage: int = 0
    sequence_parallel: Switch = False
    zero_stage: ZeroStage = 3
    sub_group_size: int = 10**9
    offload: Offloading = WITHOUT_CONFIG
    recompute: Switch = True
    recompute_share: Share = 1.0
    flash_attention: Switch = True
    flash_version: Annotated[FlashVersion | None, _one_of(FLASH_VERSIONS, None)] = None
    kernels: Annotated[Kernels, _one_of(KERNELS)] = "fused"
    fused_loss: Switch = False
    optimizer: str = ADAM.name
    precision: WireDtype = "bf16"
    gradient_bytes: int = 2
    clip: float = 1.0
    clip_rate: Rate = None
    reduce_bucket_elements: int = REDUCE_BUCKET_ELEMENTS
    prefetch_bucket_elements: int = PREFETCH_BUCKET_ELEMENTS
    overlap_comm: bool | None = None
    max_live_parameters: int = GatherRules().live
    max_reuse_distance: int = GatherRules().reuse
    persistence_threshold: int = GatherRules().persistent
    launcher: Annotated[Launcher, _one_of(LAUNCHERS)] = "deepspeed"
    omp_threads: Count | None = None
    notes: tuple[str, ...] = ()
    config: Mapping[str, Any] = {}

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
        """Return True if a training step waits for the gradient norm before updates, to clip gradients or detect an
        overflow.
        """
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
    def told(self) -> tuple[str, ...]:
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
            raise ModelError(first.told, first.key) from None

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
