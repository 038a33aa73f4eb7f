"""Checks, made before training starts, of whether a plan can be applied to a DeepSpeed engine."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ebbtide.runtime.kernels.own_step import OwnStepRule
from ebbtide.runtime.kernels.rule import UnknownRoundingError, UpdateRule
from ebbtide.runtime.kernels.rules import RULES, rule_class
from ebbtide.runtime.zero.checks import private
from ebbtide.simulator.estimates.deepspeed_keys import OPTIMIZER, ZERO, as_deepspeed_reads, at, check_sections
from ebbtide.simulator.estimates.models.blocks import ModelError
from ebbtide.simulator.estimates.offloading import (
    STORED,
    left_to_stock,
    offloading_of,
    plan_obstacle,
    replaced_by_a_plan,
)

logger = logging.getLogger("ebbtide")

_EXPERTS = (
    "the model has DeepSpeed's mixture-of-experts layers, which a plan does not support under ZeRO-1 and 2. "
    'Remove the key "ebbtide" (or do not attach a plan) to train with DeepSpeed alone.'
)
_SWAPPERS = ("nvme_path", "pipeline_read", "pipeline_write", "buffer_count", "fast_init")


class ConfigError(ValueError):
    """An error for a DeepSpeed config that ebbtide does not support. The message names the config key."""


def check_config(config: Mapping[str, Any]) -> None:
    """Check that a plan can be applied to an engine with this DeepSpeed config, before the engine is built.

    Raises:
        ConfigError: The config is not supported. The message names the rule, the value and the key.
    """
    read = _sections(config)
    stage = at(read, f"{ZERO}.stage") or 0
    if stage not in (1, 2, 3):
        raise ConfigError(f"zero_optimization.stage must be 1, 2 or 3, but got {stage}")
    where = offloading_of(read).optimizer or "none"
    if where == "nvme" and stage < 3:
        raise ConfigError(
            f"zero_optimization.offload_optimizer.device must be 'cpu' under ZeRO-{stage}, but got "
            "'nvme': state can be on a drive under ZeRO-3 only. Set the device to 'cpu', or "
            "zero_optimization.stage to 3"
        )
    if where != "cpu" and stored_at(config) is None:
        raise ConfigError(
            "zero_optimization.offload_optimizer.device must be 'cpu', or 'nvme' with an nvme_path (ZeRO-3 only), but "
            f"got {where!r} under ZeRO-{stage}"
        )
    obstacle = plan_obstacle(read)
    if obstacle:
        raise ConfigError(obstacle)


def _sections(config: Mapping[str, Any]) -> Mapping[str, Any]:
    read = as_deepspeed_reads(config)
    try:
        check_sections(read)
    except ModelError as error:
        raise ConfigError(f"in DeepSpeed's config, {error}") from None
    return read


def stored_at(config: Mapping[str, Any]) -> Path | None:
    """Return the folder on a drive to which a DeepSpeed config offloads optimizer state.

    None if the config offloads no optimizer state to a drive, or if DeepSpeed refuses the config.
    """
    read = as_deepspeed_reads(config)
    asked = at(read, f"{ZERO}.{OPTIMIZER}") or {}
    path = asked.get("nvme_path")
    nvme = offloading_of(read).optimizer == "nvme" and (at(read, f"{ZERO}.stage") or 0) == 3
    return Path(path) / STORED if nvme and path else None


def leave_to_stock(config: Mapping[str, Any]) -> bool:
    """Return whether an engine cannot have a plan and must be left to DeepSpeed, and log the reason as a warning.

    Raises:
        ConfigError: A section of the config is not a JSON object.
    """
    why = left_to_stock(_sections(config))
    if why:
        logger.warning("%s: this engine is left to DeepSpeed, without a plan", why)
    return bool(why)


def for_a_plan(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a DeepSpeed config for an engine under a plan, without the keys that the plan replaces.

    Deprecated keys get their present names. Each removed key is logged.
    """
    made = dict(as_deepspeed_reads(config))
    replaced = replaced_by_a_plan(made)
    for sentence in replaced.values():
        logger.warning("%s", sentence)
    zero = made[ZERO] = dict(made.get(ZERO) or {})
    if zero.pop("cpu_offload", None):  # deprecated key
        zero.setdefault(OPTIMIZER, {"device": "cpu"})
    zero[OPTIMIZER] = {k: v for k, v in (zero[OPTIMIZER] or {}).items() if k not in replaced}
    if stored_at(config) is not None:  # the plan stores the state, so DeepSpeed's swapper is not used
        kept = {k: v for k, v in zero[OPTIMIZER].items() if k not in _SWAPPERS}
        zero[OPTIMIZER] = {**kept, "device": "cpu"}
    return made


def check_model(model: Any, config: Mapping[str, Any]) -> None:
    """Check that a model is supported before DeepSpeed builds an engine, which takes minutes for a large model."""
    stage = at(as_deepspeed_reads(config), f"{ZERO}.stage") or 0
    if stage < 3 and hasattr(model, "modules") and private.has_experts(model):
        raise ConfigError(_EXPERTS)


def check_engine(engine: Any) -> UpdateRule:
    """Check that a plan can be applied to an existing DeepSpeed engine. Return the update rule of the
    engine's optimizer.

    Raises:
        ConfigError: The engine is not ZeRO-1, 2 or 3 with an optimizer offloaded to the CPU.
        UnknownRoundingError: DeepSpeed's CPU op was built in a way that ebbtide's kernels cannot reproduce.
    """
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    config = dict(engine.config) if isinstance(engine.config, dict) else engine.config
    check_config(config)
    if stored_at(config) is not None:
        raise ConfigError(
            f"{ZERO}.{OPTIMIZER}.device must be 'cpu' if DeepSpeed has built the engine already, but got "
            "'nvme'. Build the engine with ebbtide.initialize or with the key \"ebbtide\" in DeepSpeed's config"
        )
    for key, sentence in replaced_by_a_plan(as_deepspeed_reads(config)).items():
        raise ConfigError(
            f"{sentence}. DeepSpeed built this engine with the key {key!r}. Remove the key from DeepSpeed's config"
        )
    optimizer = engine.optimizer
    if type(optimizer) not in (DeepSpeedZeroOptimizer_Stage3, DeepSpeedZeroOptimizer):
        raise ConfigError(
            f"engine.optimizer must be DeepSpeed's own ZeRO optimizer, but got {type(optimizer).__name__}"
        )
    if getattr(optimizer, "has_moe_layers", False):
        raise ConfigError(_EXPERTS)
    if getattr(optimizer, "torch_autocast_gradscaler", None) is not None:
        raise ConfigError(
            "torch_autocast.dtype must not be fp16, because its gradient scaler steps the optimizer itself: use "
            "bf16 or the fp16 section"
        )
    return _rule_of(
        optimizer.optimizer,
        optimizer.master_weights_and_grads_dtype,
        below_stage_3=type(optimizer) is DeepSpeedZeroOptimizer,
    )


def _rule_of(inner: Any, master: Any, *, below_stage_3: bool) -> UpdateRule:
    import torch

    rule = rule_class(inner)
    if rule is not None and master == torch.float32:
        try:
            return rule.of(inner)
        except UnknownRoundingError as error:
            raise UnknownRoundingError(f"{error}{private.mended_since(rule.name)}") from None
    names = {cls.__name__ for cls in type(inner).__mro__}
    if not isinstance(inner, torch.optim.Optimizer) or names & {"MuonWithAuxAdam", "FusedLamb"}:
        raise ConfigError(
            f"the optimizer must be one of {[r.stock for r in RULES]}, or a torch.optim.Optimizer whose update is "
            f"elementwise, but got {type(inner).__module__}.{type(inner).__name__}. Train with this optimizer without "
            "a plan"
        )
    return OwnStepRule(inner, group_by_group=below_stage_3)
