"""A reader of the training settings in a DeepSpeed config. Values ``"auto"`` are resolved as Hugging Face
resolves them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ebbtide.simulator.estimates.deepspeed_keys import (
    AUTO,
    AUTOTP,
    BATCHES,
    HELD,
    PRECISIONS,
    PROCESSES,
    SIZES,
    STATE,
    SWITCHES,
    ZERO,
    at_least,
    check_counted,
    check_removed,
    loaded,
    section,
)
from ebbtide.simulator.estimates.models.blocks import ModelError
from ebbtide.simulator.estimates.offloading import WITHOUT_CONFIG, Offloading, offloading_of, plan_obstacle
from ebbtide.simulator.optimizer import ADAM, OPTIMIZERS
from ebbtide.simulator.schedules.gathers import GatherRules
from ebbtide.simulator.workload import WIRE_BYTES, WireDtype, ZeroStage

# Keys that the simulation reads. A note of the answer names the keys that it does not read.
_READ = frozenset(
    {*BATCHES, PROCESSES, "gradient_clipping", "data_types", "optimizer", "ebbtide", AUTOTP}
    # The simulation reads which precision is used. How losses are scaled takes no time.
    | {
        f"{name}.{key}"
        for name in PRECISIONS
        for key in (
            "enabled",
            "loss_scale",
            "loss_scale_window",
            "initial_scale_power",
            "hysteresis",
            "consecutive_hysteresis",
            "min_loss_scale",
        )
    }
    | {f"{ZERO}.{key}" for key in ("stage", *SIZES, *SWITCHES)}
)
# Sections with some keys that the simulation reads. `Offloading` knows which keys these are.
_PARTLY_READ = (ZERO, STATE, HELD, "activation_checkpointing", "tensor_parallel", *PRECISIONS)
# DeepSpeed's defaults of reduce_bucket_size and stage3_prefetch_bucket_size.
REDUCE_BUCKET_ELEMENTS, PREFETCH_BUCKET_ELEMENTS = 500_000_000, 50_000_000


def deepspeed_fields(
    config: Mapping[str, Any] | str | Path | None,
    *,
    hidden: int,
    ranks: int = 1,
    tensor_parallel: int = 1,
    micro_batch: int | None = None,
    accumulation: int | None = None,
    precision: WireDtype | None = None,
    zero_stage: int | None = None,
) -> dict[str, Any]:
    """Return the fields of `ebbtide.simulator.estimates.job.Job` that a DeepSpeed config determines.

    Values ``"auto"`` are resolved as in Hugging Face's integration: batch sizes and precision come from the
    arguments of this function, bucket sizes from the hidden size, and clipping from the Trainer's default (on).

    Args:
        hidden: Hidden size of the model, for bucket sizes that are ``"auto"``.
        ranks: Number of data-parallel ranks, to divide ``train_batch_size``.

    Raises:
        ModelError: The file cannot be read, plans do not support the stage or the optimizer, batch sizes
            contradict each other, a value is ``"auto"`` and no argument gives it, or a key decides whether training
            fits and is not simulated.
    """
    read = loaded(config)
    check_counted(read, ranks, tensor_parallel)
    if (section(read, ZERO).get("mics_shard_size") or -1) > 0:
        raise ModelError(plan_obstacle(read), key=f"ds_config.{ZERO}.mics_shard_size")
    check_removed(read)
    resolver = _Resolver(read)
    stage = resolver.stage(zero_stage)
    micro, steps = resolver.batches(ranks, micro_batch, accumulation)
    dtype = resolver.precision(precision)
    if (processes := read.get(PROCESSES, ranks)) != ranks * tensor_parallel:
        resolver.notes.append(
            f"Accelerate's config is for {processes} processes, and the answer for {ranks * tensor_parallel}: give "
            "data_parallel (--data-parallel)"
        )
    return {
        "micro_batch": micro,
        "accumulation": steps,
        "precision": dtype,
        "gradient_bytes": WIRE_BYTES[resolver.section("data_types").get("grad_accum_dtype") or dtype],
        "clip": resolver.number(read, "gradient_clipping", default_clipping(), "gradient_clipping", automatic=1.0),
        "zero_stage": stage,
        "optimizer": resolver.optimizer(),
        **resolver.sizes(hidden),
        "overlap_comm": resolver.section(ZERO).get("overlap_comm"),
        "offload": WITHOUT_CONFIG if config is None else offloading_of(read),
        "notes": tuple(resolver.notes),
        "config": read,
    }


def unread(config: Mapping[str, Any], offload: Offloading, stage: ZeroStage) -> list[str]:
    """Return the sorted keys of a DeepSpeed config that the simulator ignores, so that the user can be told."""
    keys = {*config}
    for name in _PARTLY_READ:
        keys |= {f"{name}.{key}" for key in section(config, name)}
    return sorted(keys.difference(_PARTLY_READ, _READ, offload.keys_read(stage)))


def default_clipping() -> float:
    """Return the installed DeepSpeed's default for ``gradient_clipping``: 0 (none) before version 0.19.3, then 1."""
    return 1.0 if at_least((0, 19, 3)) else 0.0


class _Resolver:
    """A reader of a DeepSpeed config that replaces each ``"auto"`` by a value, and notes that for the user."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.notes: list[str] = []

    def section(self, name: str) -> Mapping[str, Any]:
        return section(self.config, name)

    def number(
        self, section: Mapping[str, Any], key: str, default: float, where: str, automatic: float | None = None
    ) -> float:
        value = section.get(key, default)
        if value == AUTO:
            value = default if automatic is None else automatic
            self.notes.append(f"{where}: auto -> {value:g}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e18:
            raise ModelError(f"{where} must be a number >= 0 or 'auto', but got {value!r}", key=f"ds_config.{where}")
        return float(value)

    def sizes(self, hidden: int) -> dict[str, int]:
        return {
            "sub_group_size": self.elements("sub_group_size", 1e9),
            "reduce_bucket_elements": self.elements("reduce_bucket_size", REDUCE_BUCKET_ELEMENTS, hidden * hidden),
            "prefetch_bucket_elements": self.elements(
                "stage3_prefetch_bucket_size", PREFETCH_BUCKET_ELEMENTS, int(0.9 * hidden * hidden)
            ),
            "max_live_parameters": self.elements("stage3_max_live_parameters", 1e9),
            "max_reuse_distance": self.elements("stage3_max_reuse_distance", 1e9),
            "persistence_threshold": self.elements(
                "stage3_param_persistence_threshold", GatherRules().persistent, 10 * hidden
            ),
        }

    def elements(self, key: str, default: float, automatic: float | None = None) -> int:
        zero = self.section(ZERO)
        short = key.removeprefix("stage3_")
        name = short if key not in zero and short in zero else key
        return int(self.number(zero, name, default, f"{ZERO}.{name}", automatic))

    def count(self, key: str, given: int | None) -> int | None:
        value = self.config.get(key)
        if value is None or value == AUTO:
            if given is not None and value == AUTO:
                self.notes.append(f"{key}: auto -> {given}")
            value = given
        elif given is not None and given != value:
            raise ModelError(
                f"{key} is {value} in the DeepSpeed config, but the option or argument with the same meaning is "
                f"{given}. Remove one of the two values",
                key=f"ds_config.{key}",
            )
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ModelError(f"{key} must be a whole number >= 1 or 'auto', but got {value!r}", key=f"ds_config.{key}")
        return value

    def batches(self, ranks: int, micro: int | None, steps: int | None) -> tuple[int, int]:
        # DeepSpeed's rule is: train_batch_size = micro-batch size x accumulation steps x ranks.
        micro = self.count("train_micro_batch_size_per_gpu", micro)
        steps = self.count("gradient_accumulation_steps", steps)
        total = self.count("train_batch_size", None)
        if total is not None:
            if total % ranks:
                raise ModelError(
                    f"train_batch_size must be a multiple of the {ranks} data-parallel ranks, but got {total}",
                    key="ds_config.train_batch_size",
                )
            if micro is None and steps is None:
                steps = 1
            micro = micro or _divided(total // ranks, steps or 1, "gradient_accumulation_steps")
            steps = steps or _divided(total // ranks, micro, "train_micro_batch_size_per_gpu")
            if micro * steps * ranks != total:
                raise ModelError(
                    "train_batch_size must be train_micro_batch_size_per_gpu x "
                    f"gradient_accumulation_steps x ranks, but got {total} != {micro} x {steps} x "
                    f"{ranks}",
                    key="ds_config.train_batch_size",
                )
        for key, value in (("train_micro_batch_size_per_gpu", micro), ("gradient_accumulation_steps", steps)):
            if value is None:
                self.notes.append(f"{key}: not given -> 1")
        return micro or 1, steps or 1

    def stage(self, given: int | None) -> ZeroStage:
        zero = self.section("zero_optimization")
        stage = zero.get("stage")
        if stage is None:
            if self.config and given is None:
                self.notes.append("zero_optimization.stage: not given -> 3")
            stage = 3 if given is None else given
        elif given is not None and given != stage:
            raise ModelError(
                f"zero_optimization.stage is {stage} in the DeepSpeed config, but zero_stage (--zero-stage) is "
                f"{given}. Remove one of the two values",
                key="ds_config.zero_optimization.stage",
            )
        if isinstance(stage, bool) or stage not in (1, 2, 3):
            raise ModelError(
                f"zero_optimization.stage (--zero-stage) must be 1, 2 or 3, but got {stage!r}",
                key="ds_config.zero_optimization.stage",
            )
        return stage  # type: ignore[return-value]

    def optimizer(self) -> str:
        kind = str(self.section("optimizer").get("type", "AdamW"))
        name = {"adamw": ADAM.name}.get(kind.lower(), kind.lower())
        if name not in OPTIMIZERS:
            known = ", ".join(("AdamW", *(o.capitalize() for o in OPTIMIZERS)))
            raise ModelError(
                f"optimizer.type must be one of {known} (any case), but got {kind!r}", key="ds_config.optimizer.type"
            )
        return name

    def precision(self, given: WireDtype | None) -> WireDtype:
        names: tuple[tuple[str, WireDtype], ...] = (("bf16", "bf16"), ("bfloat16", "bf16"), ("fp16", "fp16"))
        states = [(self.section(key).get("enabled", False), name) for key, name in names]
        chosen = {name for enabled, name in states if enabled is True}
        if len(chosen) > 1:
            raise ModelError("only one of bf16 and fp16 may be enabled, but got both", key="ds_config.bf16")
        if chosen:
            return chosen.pop()
        automatic = [name for enabled, name in states if enabled == AUTO]
        if automatic or not self.config:  # a trainer can only enable a section that is "auto"
            dtype: WireDtype = given or (automatic[0] if automatic else "bf16")
            self.notes.append(f"precision: auto -> {dtype}")
            return dtype
        if given is None:
            self.notes.append("precision: fp32, because the config enables neither bf16 nor fp16")
        return given or "fp32"


def _divided(total: int, part: int, key: str) -> int:
    if total % part:
        raise ModelError(f"{key} must divide the batch of a rank, {total}, but got {part}", key=f"ds_config.{key}")
    return total // part
