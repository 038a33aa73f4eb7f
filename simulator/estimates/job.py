"""What is trained and how: parsed once, read by everybody who asks what it takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from simulator.estimates.architecture import architecture
from simulator.estimates.blocks import Architecture, ModelError
from simulator.estimates.deepspeed_config import (
    PREFETCH_BUCKET_ELEMENTS,
    REDUCE_BUCKET_ELEMENTS,
    deepspeed_fields,
    unread,
)
from simulator.estimates.deepspeed_keys import ZERO
from simulator.estimates.flat_rank import FlatRank
from simulator.estimates.offloading import Offloading, offloading, plan_obstacle
from simulator.estimates.rank import Rank
from simulator.machine import Machine
from simulator.update.optimizer import ADAM
from simulator.workload import WIRE_BYTES, WireDtype, Workload, ZeroStage

MOST_RANKS, MOST_TOKENS = 10**7, 10**8
# What a knob calls an offload -> where DeepSpeed keeps optimizer state and parameters.
OFFLOADS = {
    "none": ("none", "none"), "optimizer": ("cpu", "none"), "parameters": ("cpu", "cpu"),
    "nvme": ("nvme", "cpu"),
}  # fmt: skip
_BF16: Mapping[str, Any] = {"bf16": {"enabled": True}}


def _whole(most: int) -> Callable[[Any, ValidationInfo], Any]:
    def check(value: Any, info: ValidationInfo) -> Any:
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not (whole and 1 <= value <= most):
            raise ModelError(f"{info.field_name} must be a whole number >= 1, but got {value!r}")
        return value

    return check


def _switch(value: Any, info: ValidationInfo) -> Any:
    if not isinstance(value, bool):
        raise ModelError(f"{info.field_name} must be True or False, but got {value!r}")
    return value


Count = Annotated[int, BeforeValidator(_whole(MOST_RANKS))]
Tokens = Annotated[int, BeforeValidator(_whole(MOST_TOKENS))]
Switch = Annotated[bool, BeforeValidator(_switch)]


class Job(BaseModel):
    """A training job, as one rank of it sees it.

    Attributes:
        architecture: of the model.
        sequence: tokens of a sample; ``micro_batch``: samples of a rank and pass;
            ``accumulation``: micro-batches of an optimizer step.
        data_parallel: ZeRO's ranks; the whole job has data x tensor x pipeline GPUs.
        stage: the pipeline stage that is looked at, 0: the first.
        sequence_parallel: what tensor parallelism leaves whole is divided along the sequence.
        offload: where state, parameters and activations are.
        recompute: each layer keeps its input and is computed again (activation checkpointing).
        flash_attention: attention scores are never stored.
        precision: of parameters and gradients as they travel; ``gradient_bytes``: of a gradient
            where it is added up.
        clip: the norm that gradients are clipped at; 0: they are not.
        overlap_comm: None: as DeepSpeed has it at this ZeRO stage.
        notes: what was ``"auto"`` or left out and what was taken for it: for people.
        config: DeepSpeed's, as it was given.
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
    offload: Offloading = Offloading(given=False)
    recompute: Switch = True
    flash_attention: Switch = True
    optimizer: str = ADAM.name
    precision: WireDtype = "bf16"
    gradient_bytes: int = 2
    clip: float = 1.0
    reduce_bucket_elements: int = REDUCE_BUCKET_ELEMENTS
    prefetch_bucket_elements: int = PREFETCH_BUCKET_ELEMENTS
    overlap_comm: bool | None = None
    max_live_parameters: int = 10**9
    notes: tuple[str, ...] = ()
    config: Mapping[str, Any] = {}

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
        """From a model and DeepSpeed's config, which may hold ``"auto"``.

        Args:
            model: see `architecture`.
            micro_batch, accumulation, precision, zero_stage: where the config leaves them open.
            shape: other fields of a job.

        Raises:
            ModelError: a description, config or value that cannot be used, naming the key.
        """
        if precision is not None and precision not in WIRE_BYTES:
            raise ModelError(
                f"precision must be one of {', '.join(WIRE_BYTES)}, but got {precision!r}"
            )
        arch = architecture(model)
        ranks = shape.get("data_parallel", 1)
        read = deepspeed_fields(
            config, hidden=arch.hidden, ranks=ranks if isinstance(ranks, int) and ranks else 1,
            micro_batch=micro_batch, accumulation=accumulation, precision=precision,
            zero_stage=zero_stage,
        )  # fmt: skip
        return cls._checked({"architecture": arch, **read, **shape})

    def changed(self, **knobs: Any) -> Self:
        """The same with other values; ``offload`` may be one of `OFFLOADS`.

        Raises:
            ModelError: a value that cannot be used.
        """
        word = knobs.get("offload")
        if not isinstance(word, str):
            return self._checked({**dict(self), **knobs})
        state, parameters = OFFLOADS[word]
        moved = replace(self.offload, optimizer=state, parameters=parameters)
        made = self._checked({**dict(self), **knobs, "offload": moved})
        # What goes with the devices (pinning, a ratio) is the config's to say.
        return made.model_copy(update={"offload": offloading(made.deepspeed())})

    @classmethod
    def _checked(cls, fields: Mapping[str, Any]) -> Self:
        if unknown := sorted(set(fields) - set(cls.model_fields)):
            raise ModelError(
                f"a job has the fields {', '.join(cls.model_fields)}, but got {unknown[0]!r}"
            )
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            first = error.errors()[0]
            cause = first.get("ctx", {}).get("error")
            where = ".".join(map(str, first["loc"]))
            text = str(cause or f"{where}: {first['msg']}, but got {first['input']!r}")
            raise ModelError(text) from None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not 0 <= self.stage < self.pipeline_parallel:
            raise ModelError(
                f"stage must lie in [0, {self.pipeline_parallel - 1}] (pipeline_parallel - 1), but "
                f"got {self.stage}"
            )
        if self.sequence_parallel and self.tensor_parallel == 1:
            raise ModelError(
                "sequence_parallel must be False without tensor parallelism, whose ranks divide "
                "the sequence, but got True with tensor_parallel=1: give tensor_parallel too"
            )
        self._check_division()
        zero = self.config.get(ZERO) or {}
        for key in ("round_robin_gradients", "parameter_alignment"):
            if self.zero_stage < 3 and zero.get(key):
                raise ModelError(
                    f"{ZERO}.{key} must be false to estimate ZeRO-{self.zero_stage}, whose "
                    f"partitions it moves, but got {zero[key]!r}: profile the training run instead "
                    "(runtime.initialize(plan='auto'))"
                )
        return self

    def _check_division(self) -> None:
        """Of the model over tensor and pipeline ranks."""
        arch, tensor, pipeline = self.architecture, self.tensor_parallel, self.pipeline_parallel
        if arch.heads % tensor:
            raise ModelError(
                f"tensor_parallel must divide the {arch.heads} attention heads, but got {tensor}"
            )
        if arch.kv_heads % tensor and tensor % arch.kv_heads:
            raise ModelError(
                f"tensor_parallel must divide the {arch.kv_heads} key-value heads (or be a "
                f"multiple of them), but got {tensor}"
            )
        if pipeline > arch.layers:
            raise ModelError(
                f"pipeline_parallel must be at most the {arch.layers} layers, but got {pipeline}"
            )
        if pipeline > 1 and self.zero_stage > 1:
            raise ModelError(
                "pipeline_parallel must be 1 under ZeRO-2 and 3, which DeepSpeed's pipeline engine "
                f"refuses, but got {pipeline} under ZeRO-{self.zero_stage}: take ZeRO-1 "
                "(--zero-stage 1), or divide by data or tensor parallelism (--data-parallel)"
            )

    @property
    def clips(self) -> bool:
        """Whether a step waits for the norm: to clip, or to see an overflow."""
        return self.clip > 0 or self.precision == "fp16"

    @property
    def overlaps_comm(self) -> bool:
        """DeepSpeed's default is on under ZeRO-3 and off below."""
        return self.zero_stage == 3 if self.overlap_comm is None else self.overlap_comm

    @property
    def told(self) -> tuple[str, ...]:
        """`notes`, and the config's keys that change nothing here."""
        keys = unread(self.config, self.offload, self.zero_stage)
        return (*self.notes, *([f"not simulated: {', '.join(keys)}"] if keys else []))

    def deepspeed(self) -> dict[str, Any]:
        """DeepSpeed's config: the one given, with what this job decides.

        Where none is given, bf16 as in all of `tune`; a config without it trains in fp32.
        """
        given = self.config.get(ZERO) or {}
        zero: dict[str, Any] = {
            **{k: v for k, v in given.items() if k not in ("offload_optimizer", "offload_param")},
            "stage": self.zero_stage, "sub_group_size": self.sub_group_size,
        }  # fmt: skip
        for key, device in (("offload_optimizer", self.offload.optimizer),
                            ("offload_param", self.offload.parameters)):  # fmt: skip
            if device not in (None, "none"):
                zero[key] = {**(given.get(key) or {}), "device": device}
        config = {k: v for k, v in self.config.items() if k != "train_batch_size"}
        return {
            **(config or _BF16), "train_micro_batch_size_per_gpu": self.micro_batch,
            "gradient_accumulation_steps": self.accumulation, ZERO: zero,
        }  # fmt: skip

    def workload(self, machine: Machine) -> Workload:
        """What one rank does in an iteration on a machine: see `workload_from_model`.

        Raises:
            ModelError: the machine does not tell a rate that the job needs.
        """
        if machine.device_flops_per_s is None:
            raise ModelError(
                "machine.device_flops_per_s must be given to estimate times from a model, but "
                f"machine {machine.name!r} has none: add it, or profile the model with `tune "
                "profile`"
            )
        rank = (Rank if self.zero_stage == 3 else FlatRank)(self, machine)
        if rank.layout.tensor_groups_cut and machine.network_bytes_per_s is None:
            raise ModelError(
                "tensor_parallel must leave each group of ranks inside a node (a divisor of the "
                f"machine's {machine.gpus_per_node} GPUs per node) where "
                "machine.network_bytes_per_s is not known, but got "
                f"{self.tensor_parallel} on machine {machine.name!r}: add network_bytes_per_s to "
                "the machine file, or lower --tensor-parallel"
            )
        return rank.workload()


def plan_refusal(config: Mapping[str, Any], moved: Offloading) -> str:
    """Why no plan can be made for a DeepSpeed config: what training under one refuses, and what a
    plan is not simulated with; empty: one can.
    """
    obstacle = plan_obstacle(config)
    if obstacle or not moved.beyond_plans:
        return obstacle
    why = "which moves optimizer state between host and device memory only"
    if moved.optimizer != "nvme" and moved.parameters == "none":
        why = ("whose times and memory are not simulated with activations that move too "
               "(training under a plan takes the key as it is)")  # fmt: skip
    return (
        f"{moved.beyond_plans} must be absent for a plan, {why}: remove it, or simulate stock "
        "DeepSpeed with it (tune simulate or tune search with the same --ds-config)"
    )
