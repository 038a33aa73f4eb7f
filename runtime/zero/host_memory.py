"""A check that enough host memory is free for a plan, made before any buffer of the plan is allocated."""

import logging
from typing import Any

import torch
from ebbtide.runtime.hardware.launcher import local_ranks, world_size
from ebbtide.runtime.hardware.usable import usable
from ebbtide.runtime.kernels.own_step import kept_bytes
from ebbtide.runtime.kernels.rules import RULES, rule_class
from ebbtide.runtime.zero.checks.guard import ConfigError
from ebbtide.simulator.estimates.deepspeed_keys import at
from ebbtide.simulator.optimizer import ADAM, OPTIMIZERS, OptimizerState
from ebbtide.simulator.plan import Placement, Plan, PlanError
from ebbtide.simulator.schedules.footprint import held_under
from ebbtide.simulator.update.holding import Holding, totals

logger = logging.getLogger("ebbtide")

_MASTERS_OF_16_BITS = ("bf16.bf16_master_weights_and_grads", "fp16.fp16_master_weights_and_grads")
_KERNELS = {name for rule in RULES for name in rule.types}
_KEPT_APART = OptimizerState("own step", (), master=False)
SAME_SIZE = 1.5  # a ratio of parameters above this is that of another model, and not of padding or sharing
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
    """Return the bytes of host memory that a plan takes on one rank, by `ebbtide.simulator.schedules.footprint`.

    Return 0 for a plan that does not list its ``subgroups``, because the sizes of the subgroups are unknown.
    """
    if not plan.subgroups:
        return 0
    held = Holding.of(
        optimizer,
        gradient_bytes,
        wire_bytes,
        stage=stage,
        micro_batches=micro_batches,
        state_stays=bool(plan.deepspeed_subgroup_size),
    )
    return totals(held_under(plan, held, plan.subgroups))["host"]


def check_host_memory(
    plan: Plan,
    config: dict[str, Any],
    available_bytes: int | None = None,
    client: Any = None,
    model: torch.nn.Module | None = None,
) -> None:
    """Raise an error if all ranks of this machine together need more host memory for a plan than is free.

    Args:
        client: The optimizer object that the script passes to DeepSpeed, if any.
        model: The model to train. If the plan was made for a model of another size, that is the error.

    Raises:
        ConfigError: Host memory is short. The message has the needed and the free amount.
        PlanError: Host memory is short for a plan that was made for another model.
    """
    ranks = local_ranks()
    stage = (config.get("zero_optimization") or {}).get("stage", 3)
    own, wire_bytes = own_step_of(config, client), _wire_bytes(config)
    kept: str = (config.get("data_types") or {}).get("grad_accum_dtype", "")
    needed = needed_bytes(
        on_the_host(plan) if own else plan,
        GRADIENT_BYTES.get(kept, wire_bytes),
        wire_bytes=wire_bytes,
        optimizer=_KEPT_APART if own else _optimizer(config, client),
        stage=stage,
        micro_batches=_micro_batches(config),
    )
    if own:
        largest = max(plan.subgroups, default=0)
        needed += sum(plan.subgroups) * sum(own) + largest * own[0]
    needed *= ranks
    available = usable().free_bytes if available_bytes is None else available_bytes
    logger.info(
        "ebbtide: the plan needs %.2f GiB of host memory on this machine (%d ranks), and %.2f GiB are free",
        needed / 2**30,
        ranks,
        available / 2**30,
    )
    if needed > available:
        _check_is_of(plan, model)
        raise ConfigError(
            "host memory must hold the state, gradients and buffers of all subgroups that are not "
            "resident on the GPU: "
            f"{needed / 2**30:.2f} GiB for {ranks} rank(s) on this machine, but got "
            f"{available / 2**30:.2f} GiB free ({(needed - available) / 2**30:.2f} GiB missing): "
            "plan again with a larger --gpu-memory, train on more machines, or "
            "free memory"
        )


def _check_is_of(plan: Plan, model: torch.nn.Module | None) -> None:
    if model is None:
        return
    trained = sum(int(getattr(p, "ds_numel", p.numel())) for p in model.parameters() if p.requires_grad)
    planned = sum(plan.subgroups) * world_size()
    if not 1 / SAME_SIZE < trained / max(1, planned) < SAME_SIZE:
        about = f" ({plan.about})" if plan.about else ""
        raise PlanError(
            f"the plan must be made for this model, which trains {trained:,} parameters, but it was made for "
            f"{planned:,} on {world_size()} rank(s){about}: plan again with `tune plan`"
        )


def on_the_host(plan: Plan) -> Plan:
    """Return a changed copy of the plan: the CPU updates every subgroup, with all optimizer state in host memory."""
    hosted: list[Placement] = ["host"] * plan.subgroup_count
    return plan.placed(hosted, staging_slots=0, prefetch=0).with_bits(early=False, sum_on_device=False)


def own_step_of(config: dict[str, Any], client: Any) -> tuple[int, int] | None:
    """Return the bytes per parameter of an optimizer's master and of its other state, if ebbtide has no kernel for the
    optimizer.

    Return None if ebbtide has a kernel for it, or if the optimizer is unknown.

    Args:
        client: The optimizer object that the script passes to DeepSpeed, if any.
    """
    made, given = client, config.get("optimizer") or {}
    kind, params = str(given.get("type", "")), given.get("params") or {}
    if any(at(config, key) for key in _MASTERS_OF_16_BITS):
        return 2, 4 if at(config, "bf16.bf16_optimizer_states") else 8
    if client is None and params.get("torch_adam"):
        return 4, 8
    if client is None and kind.lower() not in _KERNELS and hasattr(torch.optim, kind):
        known = {k: v for k, v in params.items() if v != "auto"}
        made = getattr(torch.optim, kind)([torch.nn.Parameter(torch.zeros(1))], **known)
    if not isinstance(made, torch.optim.Optimizer) or rule_class(made) is not None:
        return None
    return 4, kept_bytes(made, torch.float32)


def _micro_batches(config: dict[str, Any]) -> int:
    steps, micro = (config.get(key) for key in ("gradient_accumulation_steps", "train_micro_batch_size_per_gpu"))
    if isinstance(steps, int):
        return steps
    total, ranks = config.get("train_batch_size"), world_size()
    if isinstance(total, int) and isinstance(micro, int):
        return max(1, total // (micro * ranks))
    return 1


def _wire_bytes(config: dict[str, Any]) -> int:
    enabled = any((config.get(kind) or {}).get("enabled") for kind in ("bf16", "bfloat16", "fp16"))
    return 2 if enabled else 4


def _optimizer(config: dict[str, Any], client: Any) -> OptimizerState:
    rule = rule_class(client)
    name = rule.name if rule is not None else str((config.get("optimizer") or {}).get("type", "")).lower()
    return OPTIMIZERS.get(name, ADAM)
