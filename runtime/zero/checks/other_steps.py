"""A warning, logged before the first step, that the plan was made for other training settings."""

import logging
from typing import Any

import torch
from ebbtide.runtime.hardware.launcher import world_size
from ebbtide.simulator.estimates.deepspeed_config import REDUCE_BUCKET_ELEMENTS
from ebbtide.simulator.estimates.deepspeed_keys import ZERO, section
from ebbtide.simulator.plan import Plan
from ebbtide.simulator.schedules.buckets import planned_bucket
from ebbtide.simulator.workload import TrainedAs, WireDtype

logger = logging.getLogger("ebbtide")


def recomputes(module: torch.nn.Module) -> bool | None:
    """Return whether a transformers model recomputes activations in backward. None if the model does not tell."""
    switches = [m.gradient_checkpointing for m in module.modules() if hasattr(m, "gradient_checkpointing")]
    return any(bool(on) for on in switches) if switches else None


def warn_of_other_steps(plan: Plan, precision: WireDtype, engine: Any) -> None:
    """Log a warning if the engine's training settings differ from those that the plan was made for.

    The settings are those that memory and time depend on, such as the micro-batch size.
    """
    if plan.trained_as is None:
        return
    here = TrainedAs(
        precision=precision,
        micro_batch=int(engine.train_micro_batch_size_per_gpu()),
        accumulation=int(engine.gradient_accumulation_steps()),
        recompute=recomputes(engine.module),
    )
    lines = differences(plan.trained_as, here)
    if lines:
        logger.warning(
            "training differs from what the plan was made for, and may run out of GPU memory:\n  %s\n"
            "Change the script, or plan again with `tune plan`",
            "\n  ".join(lines),
        )


def warn_of_late_gradients(plan: Plan, engine: Any) -> None:
    """Log a warning if an engine has DeepSpeed's default ``reduce_bucket_size``, but the plan was made for less.

    Gradients leave the GPU only when this bucket is full. `ebbtide.runtime.initialize` sets the size that plans are
    made for. An engine that the caller built has DeepSpeed's, unless the config names a size.
    """
    planned = planned_bucket(world_size())
    if plan.prediction is None or planned is None or engine.zero_optimization_stage() < 2:
        return
    named = "reduce_bucket_size" in section(engine.config, ZERO)
    if not named and int(engine.optimizer.reduce_bucket_size) == REDUCE_BUCKET_ELEMENTS:
        logger.warning(
            "zero_optimization.reduce_bucket_size is %d, DeepSpeed's default, but the plan was made for %d. Gradients "
            "leave the GPU later, and steps take longer than predicted. Set reduce_bucket_size to %d in the config: "
            "the results stay the same",
            REDUCE_BUCKET_ELEMENTS,
            planned,
            planned,
        )


def differences(planned: TrainedAs, here: TrainedAs) -> list[str]:
    """Return a line of text for each training setting that differs between the plan and the run.

    A line has both values and the name of the Trainer's argument.
    """
    lines = []
    if planned.precision != here.precision:
        wanted = "bf16=False, fp16=False" if planned.precision == "fp32" else f"{planned.precision}=True"
        lines.append(f"precision: {planned.precision} in the plan, {here.precision} in training (set {wanted})")
    if planned.micro_batch != here.micro_batch:
        lines.append(
            f"micro-batch size: {planned.micro_batch} in the plan, {here.micro_batch} in training "
            f"(set per_device_train_batch_size={planned.micro_batch})"
        )
    if planned.accumulation != here.accumulation:
        lines.append(
            f"accumulation: {planned.accumulation} in the plan, {here.accumulation} in training "
            f"(set gradient_accumulation_steps={planned.accumulation})"
        )
    if None not in (planned.recompute, here.recompute) and planned.recompute != here.recompute:
        states = {True: "recomputed in backward", False: "kept"}
        lines.append(
            f"activations: {states[bool(planned.recompute)]} in the plan, {states[bool(here.recompute)]} in training "
            f"(set gradient_checkpointing={planned.recompute})"
        )
    return lines
