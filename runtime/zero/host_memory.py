"""Host memory that a plan will take, told before any of it is allocated."""

from __future__ import annotations

import logging
import os
from typing import Any

import psutil

from runtime.hardware.launcher import local_ranks
from runtime.zero.checks.guard import ConfigError
from simulator.plan import Plan
from simulator.update.footprint import Holding, tally
from simulator.update.optimizer import ADAM, OPTIMIZERS, OptimizerState

logger = logging.getLogger("ebbtide")

GRADIENT_BYTES = {"bf16": 2, "bfloat16": 2, "fp16": 2, "fp32": 4}


def needed_bytes(
    plan: Plan,
    gradient_bytes: int,
    *,
    wire_bytes: int = 2,
    optimizer: OptimizerState = ADAM,
    stage: int = 3,
    micro_batches: int = 1,
) -> int:
    """What `simulator.update.footprint` counts of host memory, on one rank.

    A plan without ``subgroups`` (one written by hand) does not say how large they are: 0.
    """
    if not plan.subgroups:
        return 0
    held = Holding.of(
        optimizer, gradient_bytes, wire_bytes, stage=stage, micro_batches=micro_batches
    )
    amounts = tally(plan.subgroups, plan.placements, plan.parameter_homes)
    return held.bytes(amounts, plan.staging_slots)["host"]


def check_host_memory(
    plan: Plan, config: dict[str, Any], available_bytes: int | None = None
) -> None:
    """Refuses a plan that this machine's free memory cannot hold, for all ranks on it together.

    Raises:
        ConfigError: with what is needed and what there is.
    """
    ranks = local_ranks()
    stage = (config.get("zero_optimization") or {}).get("stage", 3)
    optimizer = _optimizer(config)
    needed = ranks * needed_bytes(
        plan, _gradient_bytes(config), wire_bytes=_wire_bytes(config), optimizer=optimizer,
        stage=stage, micro_batches=_micro_batches(config),
    )  # fmt: skip
    available = psutil.virtual_memory().available if available_bytes is None else available_bytes
    logger.info(
        "ebbtide: the plan takes %.2f GiB of host memory on this machine (%d ranks), %.2f are free",
        needed / 2**30, ranks, available / 2**30,
    )  # fmt: skip
    if needed > available:
        raise ConfigError(
            f"host memory must hold {optimizer.state_bytes} bytes of state and the gradients of "
            "all parameters that are not resident, and their slots: "
            f"{needed / 2**30:.2f} GiB for {ranks} rank(s) on this machine, but got "
            f"{available / 2**30:.2f} GiB free ({(needed - available) / 2**30:.2f} GiB missing): "
            "plan again with a larger --gpu-memory (more residents), train on more machines, or "
            "free memory"
        )


def _gradient_bytes(config: dict[str, Any]) -> int:
    kept = (config.get("data_types") or {}).get("grad_accum_dtype")
    if kept in GRADIENT_BYTES:
        return GRADIENT_BYTES[kept]
    return _wire_bytes(config)


def _micro_batches(config: dict[str, Any]) -> int:
    """Of a step; DeepSpeed takes any two of its three batch sizes."""
    steps, micro = (
        config.get(key) for key in ("gradient_accumulation_steps", "train_micro_batch_size_per_gpu")
    )
    if isinstance(steps, int):
        return steps
    total, ranks = config.get("train_batch_size"), int(os.environ.get("WORLD_SIZE") or 1)
    if isinstance(total, int) and isinstance(micro, int):
        return max(1, total // (micro * ranks))
    return 1


def _wire_bytes(config: dict[str, Any]) -> int:
    enabled = any((config.get(kind) or {}).get("enabled") for kind in ("bf16", "bfloat16", "fp16"))
    return 2 if enabled else 4


def _optimizer(config: dict[str, Any]) -> OptimizerState:
    """The config's; Adam and AdamW, and what is given as an object, keep the same state."""
    name = str((config.get("optimizer") or {}).get("type", "")).lower()
    return OPTIMIZERS.get(name, ADAM)
