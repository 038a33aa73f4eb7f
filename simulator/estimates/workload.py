"""A workload from a model's config, without running it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from simulator.estimates.blocks import Architecture, ModelError
from simulator.estimates.job import Job
from simulator.machine import Machine
from simulator.workload import Workload

Checkpointing = Literal["full", "none"]


def workload_from_model(
    model: Architecture | Mapping[str, Any] | str | Path,
    machine: Machine,
    ds_config: Mapping[str, Any] | str | Path | None = None,
    *,
    gradient_accumulation_steps: int | None = None,
    activation_checkpointing: Checkpointing = "full",
    **job: Any,
) -> Workload:
    """What one rank would do in an iteration of training ``model`` under ZeRO.

    >>> llama = {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32,
    ...          "num_attention_heads": 32, "intermediate_size": 11008, "vocab_size": 32000}
    >>> work = workload_from_model(llama, preset("h200"), sequence=2048, micro_batch=1)
    >>> work.params
    6738415616

    Parameters are counted exactly and cut into subgroups as DeepSpeed cuts them. Times are
    estimates: matrix products at the machine's ``device_flops_per_s`` (2 flops per weight and
    token forward, twice that backward, plus the recomputed forward with checkpointing, plus causal
    attention scores). Activations follow Korthikanti et al., arXiv 2205.05198, equations 1 to 6.
    A profile of the real model (`tune profile`) is better.

    Args:
        model: see `architecture`.
        ds_config: DeepSpeed's config, may hold ``"auto"``; what it says wins over the defaults.
        activation_checkpointing: ``full`` keeps each layer's input and computes it again.
        job: fields of `Job`: sequence, micro_batch, precision, zero_stage, data_parallel,
            tensor_parallel, pipeline_parallel, stage, sequence_parallel, flash_attention.

    Raises:
        ModelError: a description or config that cannot be used, naming the key.
    """
    if activation_checkpointing not in get_args(Checkpointing):
        raise ModelError(
            "activation_checkpointing must be 'full' (each layer is computed again) or 'none', but "
            f"got {activation_checkpointing!r}: what is between the two is not simulated"
        )
    return Job.of_deepspeed(
        model, ds_config, accumulation=gradient_accumulation_steps,
        recompute=activation_checkpointing == "full", **job,
    ).workload(machine)  # fmt: skip
