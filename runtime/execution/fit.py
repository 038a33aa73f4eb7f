"""Host memory that a plan will take, told before any of it is allocated."""

from __future__ import annotations

import logging
import os
from typing import Any

import psutil

from runtime.zero.guard import ConfigError
from simulator.plan import Plan
from simulator.workload import STATE_BYTES_PER_PARAM

logger = logging.getLogger("ebbtide")

GRADIENT_BYTES = {"bf16": 2, "bfloat16": 2, "fp16": 2, "fp32": 4}
SLOTS = 2  # parameter staging slots, each for the largest subgroup


def needed_bytes(plan: Plan, gradient_bytes: int, *, stage: int = 3) -> int:
    """State and gradients of what is not resident, and the parameters' staging slots, on one rank.

    14 bytes per parameter and the slots with 16-bit gradients; below ZeRO-3, DeepSpeed's flat
    buffers keep room for resident state too. A plan without ``subgroups`` (one written by hand)
    does not say how large they are: 0.
    """
    sizes = list(zip(plan.subgroups, plan.placements, strict=False))
    kept = sum(n for n, placement in sizes if stage < 3 or placement != "resident")
    state = kept * STATE_BYTES_PER_PARAM
    hosted = [n for n, placement in sizes if placement == "host"]
    slots = min(SLOTS, len(hosted)) * max(hosted, default=0)
    return state + (sum(hosted) + slots) * gradient_bytes


def check_host_memory(
    plan: Plan, config: dict[str, Any], available_bytes: int | None = None
) -> None:
    """Refuses a plan that this machine's free memory cannot hold, for all ranks on it together.

    Raises:
        ConfigError: with what is needed and what there is.
    """
    ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or 1))
    stage = (config.get("zero_optimization") or {}).get("stage", 3)
    needed = needed_bytes(plan, _gradient_bytes(config), stage=stage) * ranks
    available = psutil.virtual_memory().available if available_bytes is None else available_bytes
    logger.info(
        "ebbtide: the plan takes %.2f GiB of host memory on this machine (%d ranks), %.2f are free",
        needed / 2**30, ranks, available / 2**30,
    )  # fmt: skip
    if needed > available:
        raise ConfigError(
            "host memory must hold 12 bytes of state and the gradients of all parameters that are "
            f"not resident: {needed / 2**30:.2f} GiB for {ranks} rank(s) on this machine, but got "
            f"{available / 2**30:.2f} GiB free ({(needed - available) / 2**30:.2f} GiB missing): "
            "plan again with a larger --gpu-memory (more residents), train on more machines, or "
            "free memory"
        )


def _gradient_bytes(config: dict[str, Any]) -> int:
    kept = (config.get("data_types") or {}).get("grad_accum_dtype")
    if kept in GRADIENT_BYTES:
        return GRADIENT_BYTES[kept]
    enabled = any((config.get(kind) or {}).get("enabled") for kind in ("bf16", "bfloat16", "fp16"))
    return 2 if enabled else 4
