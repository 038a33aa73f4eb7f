"""A warning, logged before the first step, that the plan was made for other training settings."""

import logging
from typing import Any

import torch
from ebbtide.simulator.plan import Plan
from ebbtide.simulator.workload import TrainedAs, WireDtype

logger = logging.getLogger("ebbtide")


def recomputes(module: torch.nn.Module) -> bool | None:
    """Return whether a transformers model recomputes activations in backward. None if the model does not
    tell.
    """
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
