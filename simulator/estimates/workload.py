"""A workload from a model's config, without running it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from simulator.estimates.architecture import architecture
from simulator.estimates.blocks import Architecture, ModelError
from simulator.estimates.deepspeed_config import TrainingConfig, training_config
from simulator.estimates.flat_rank import FlatRank
from simulator.estimates.rank import Parallelism, Rank
from simulator.machine import Machine
from simulator.workload import WIRE_BYTES, WireDtype, Workload

Checkpointing = Literal["full", "none"]


def workload_from_model(
    model: Architecture | Mapping[str, Any] | str | Path,
    machine: Machine,
    ds_config: Mapping[str, Any] | str | Path | None = None,
    *,
    sequence: int = 2048,
    micro_batch: int | None = None,
    gradient_accumulation_steps: int | None = None,
    precision: WireDtype | None = None,
    zero_stage: int | None = None,
    data_parallel: int = 1,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    stage: int = 0,
    sequence_parallel: bool = False,
    activation_checkpointing: Checkpointing = "full",
    flash_attention: bool = True,
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
        sequence: tokens; ``micro_batch``: samples; ``zero_stage``: None: the config's, else 3.
        data_parallel: ZeRO's ranks; the whole job has data x tensor x pipeline GPUs.
        stage: the pipeline stage that is looked at, 0: the first.
        sequence_parallel: what tensor parallelism leaves whole is divided along the sequence.
        activation_checkpointing: ``full`` keeps each layer's input and computes it again.
        flash_attention: attention scores are never stored.

    Raises:
        ModelError: a description or config that cannot be used, naming the key.
    """
    _check_kinds(sequence, precision, sequence_parallel, activation_checkpointing, flash_attention)
    arch = architecture(model)
    shape = (data_parallel, tensor_parallel, pipeline_parallel, stage, sequence_parallel)
    parallel = Parallelism(*shape)
    _check(arch, parallel, machine)
    config = training_config(
        ds_config, hidden=arch.hidden, ranks=data_parallel, micro_batch=micro_batch,
        gradient_accumulation_steps=gradient_accumulation_steps, precision=precision,
        zero_stage=zero_stage,
    )  # fmt: skip
    _check_pipeline(parallel, config)
    kind = Rank if config.zero_stage == 3 else FlatRank
    recompute = activation_checkpointing == "full"
    rank = kind(arch, machine, config, parallel, sequence, recompute, flash_attention)
    _check_network(rank)
    return rank.workload()


def _check_network(rank: Rank) -> None:
    machine, p = rank.machine, rank.parallel
    if rank.layout.tensor_groups_cut and machine.network_bytes_per_s is None:
        raise ModelError(
            "tensor_parallel must leave each group of ranks inside a node (a divisor of the "
            f"machine's {machine.gpus_per_node} GPUs per node) where machine.network_bytes_per_s "
            f"is not known, but got {p.tensor} on machine {machine.name!r}: add "
            "network_bytes_per_s to the machine file, or lower --tensor-parallel"
        )


def _check_kinds(
    sequence: object, precision: object, sequence_parallel: object, checkpointing: object,
    flash: object,
) -> None:  # fmt: skip
    """What Python lets through: a value that means something else, or nothing."""
    whole = isinstance(sequence, int) and not isinstance(sequence, bool)
    if not (whole and 1 <= sequence <= 10**8):  # type: ignore[operator]
        raise ModelError(f"sequence must be a whole number >= 1, but got {sequence!r}")
    if precision is not None and precision not in WIRE_BYTES:
        raise ModelError(f"precision must be one of {', '.join(WIRE_BYTES)}, but got {precision!r}")
    if checkpointing not in get_args(Checkpointing):
        raise ModelError(
            "activation_checkpointing must be 'full' (each layer is computed again) or 'none', but "
            f"got {checkpointing!r}: what is between the two is not simulated"
        )
    for name, value in (("flash_attention", flash), ("sequence_parallel", sequence_parallel)):
        if not isinstance(value, bool):
            raise ModelError(f"{name} must be True or False, but got {value!r}")


def _check(arch: Architecture, parallel: Parallelism, machine: Machine) -> None:
    if parallel.sequence_parallel and parallel.tensor == 1:
        raise ModelError(
            "sequence_parallel must be False without tensor parallelism, whose ranks divide the "
            "sequence, but got True with tensor_parallel=1: give tensor_parallel too"
        )
    if arch.heads % parallel.tensor:
        raise ModelError(
            f"tensor_parallel must divide the {arch.heads} attention heads, but got "
            f"{parallel.tensor}"
        )
    if arch.kv_heads % parallel.tensor and parallel.tensor % arch.kv_heads:
        raise ModelError(
            f"tensor_parallel must divide the {arch.kv_heads} key-value heads (or be a multiple of "
            f"them), but got {parallel.tensor}"
        )
    if parallel.pipeline > arch.layers:
        raise ModelError(
            f"pipeline_parallel must be at most the {arch.layers} layers, but got "
            f"{parallel.pipeline}"
        )
    if machine.device_flops_per_s is None:
        raise ModelError(
            "machine.device_flops_per_s must be given to estimate times from a model, but machine "
            f"{machine.name!r} has none: add it, or profile the model with `tune profile`"
        )


def _check_pipeline(parallel: Parallelism, config: TrainingConfig) -> None:
    if parallel.pipeline > 1 and config.zero_stage > 1:
        raise ModelError(
            "pipeline_parallel must be 1 under ZeRO-2 and 3, which DeepSpeed's pipeline engine "
            f"refuses, but got {parallel.pipeline} under ZeRO-{config.zero_stage}: take ZeRO-1 "
            "(--zero-stage 1), or divide by data or tensor parallelism (--data-parallel)"
        )
