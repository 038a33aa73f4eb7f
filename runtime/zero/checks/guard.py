"""Refuses, before training starts, what a plan cannot be applied to."""

from __future__ import annotations

from typing import Any

from runtime.kernels.rule import UnknownRoundingError, UpdateRule
from runtime.kernels.rules import RULES, rule_class
from runtime.zero.checks import private
from simulator.estimates.offloading import plan_obstacle


class ConfigError(ValueError):
    """A DeepSpeed configuration that ebbtide does not take; the message names the key."""


def check_config(config: dict[str, Any]) -> None:
    """Checks a DeepSpeed config before an engine is built from it.

    Raises:
        ConfigError: names the rule, the value received and the key to change.
    """
    zero = config.get("zero_optimization") or {}
    stage = zero.get("stage", 0)
    if stage not in (1, 2, 3):
        raise ConfigError(f"zero_optimization.stage must be 1, 2 or 3, but got {stage}")
    # DeepSpeed still takes cpu_offload, the key of old, for an offload_optimizer with device cpu.
    offload = zero.get("offload_optimizer") or (
        {"device": "cpu"} if zero.get("cpu_offload") else {}
    )
    where = offload.get("device", "none")
    if where != "cpu":
        raise ConfigError(
            f"zero_optimization.offload_optimizer.device must be 'cpu', but got {where!r}: a plan "
            "moves state between host and device memory only (`tune simulate --ds-config` says "
            "what stock DeepSpeed would take with it)"
        )
    obstacle = plan_obstacle(config)
    if obstacle:
        raise ConfigError(obstacle)
    kind = str((config.get("optimizer") or {}).get("type", "adamw"))
    known = [name for rule in RULES for name in rule.types]
    if kind.lower() not in known:
        raise ConfigError(f"optimizer.type must be one of {known} (any case), but got {kind!r}")


def check_engine(engine: Any) -> UpdateRule:
    """Checks a live engine; returns the rule of its optimizer.

    Raises:
        ConfigError: it is not ZeRO-1, 2 or 3 with an optimizer of `RULES` offloaded to the CPU.
        UnknownRoundingError: DeepSpeed's op was built in a way whose bits are not known.
    """
    import torch
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    check_config(dict(engine.config) if isinstance(engine.config, dict) else engine.config)
    optimizer = engine.optimizer
    if type(optimizer) not in (DeepSpeedZeroOptimizer_Stage3, DeepSpeedZeroOptimizer):
        raise ConfigError(
            "engine.optimizer must be DeepSpeed's own ZeRO optimizer, but got "
            f"{type(optimizer).__name__}"
        )
    if getattr(optimizer, "has_moe_layers", False):
        raise ConfigError(
            "the model must have no mixture-of-experts layers under ZeRO-1 or 2, but has: train "
            "it without ebbtide"
        )
    if getattr(optimizer, "torch_autocast_gradscaler", None) is not None:
        raise ConfigError(
            "torch_autocast.dtype must not be fp16 under ZeRO-1 or 2, whose scaler steps the "
            "optimizer itself: use bf16 or the fp16 section"
        )
    inner = optimizer.optimizer
    rule = rule_class(inner)
    if rule is None:
        raise ConfigError(
            f"the optimizer must be one of {[r.stock for r in RULES]}, but got "
            f"{type(inner).__module__}.{type(inner).__name__}: leave it to optimizer.type in the "
            "config, or hand deepspeed.ops.adam.DeepSpeedCPUAdam, which takes the same parameter "
            "groups as torch.optim.AdamW, to deepspeed.initialize"
        )
    if not inner.fp32_optimizer_states or optimizer.master_weights_and_grads_dtype != torch.float32:
        raise ConfigError(
            "master weights and optimizer states must be fp32, but got "
            f"{optimizer.master_weights_and_grads_dtype}: unset "
            "*_master_weights_and_gradients and bf16_optimizer_states"
        )
    try:
        return rule.of(inner)
    except UnknownRoundingError as error:
        raise UnknownRoundingError(f"{error}{private.mended_since(rule.name)}") from None
