"""The estimate of a training job's workload on a machine."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from ebbtide.simulator.estimates.collectives import Topology
from ebbtide.simulator.estimates.job import SELECTIVE_SHARE, Job
from ebbtide.simulator.estimates.models.blocks import Architecture, ModelError
from ebbtide.simulator.estimates.rank import FlatRank, Rank
from ebbtide.simulator.estimates.sheets import SHEETS
from ebbtide.simulator.machine import Machine
from ebbtide.simulator.rules import checked
from ebbtide.simulator.workload import PASSES, PASSES_UNDER_PLANS, STEPS, Workload

Checkpointing = Literal["full", "selective", "none"]
# The times of a workload and of its layers that are estimated from a machine's rates.
_TIMES = ("pipeline_idle_s", "step_gather_s", "module_issue_s", *STEPS)
_LAYER_TIMES = (*PASSES, *PASSES_UNDER_PLANS, "unhidden_s")


def rank_of(job: Job, machine: Machine) -> Rank:
    return (Rank if job.zero_stage == 3 else FlatRank)(job, machine)


@checked
def estimated(job: Job, machine: Machine) -> Workload:
    """Return the estimated workload of one rank of a training job on a machine. See `workload_from_model`.

    Raises:
        ModelError: The machine's ``device_flops_per_s`` is None. Or its ``network_bytes_per_s`` is None, although
            ranks on several nodes exchange gradients.
    """
    if machine.device_flops_per_s is None:
        raise ModelError(
            "machine.device_flops_per_s must be given to estimate times from a model, but "
            f"machine {machine.name!r} has none: add it, or profile the model with `tune "
            "profile`"
        )
    rank = rank_of(job, machine)
    if rank.layout.tensor_groups_cut and machine.network_bytes_per_s is None:
        raise ModelError(
            f"tensor_parallel must divide the machine's {machine.gpus_per_node} GPUs per node if "
            "machine.network_bytes_per_s is not known, but got "
            f"{job.tensor_parallel} on machine {machine.name!r}: add network_bytes_per_s to "
            "the machine file, or lower tensor_parallel (--tensor-parallel)"
        )
    made = rank.workload()
    if machine.network_bytes_per_s is None and any(layer.network_reduce_bytes for layer in made.layers):
        raise ModelError(_no_network(rank.layout, machine), key="machine.network_bytes_per_s")
    return made.configured(job.offload, job)


def retimed(job: Job, workload: Workload, machine: Machine) -> Workload:
    """Return a copy of a workload of a job with the times that are estimated for a machine with other rates.

    Sizes and subgroups stay. If no time changes, the workload itself is returned.
    """
    fresh = estimated(job, machine)
    layers = tuple(
        layer.model_copy(update={name: getattr(other, name) for name in _LAYER_TIMES})
        for layer, other in zip(workload.layers, fresh.layers, strict=True)
    )
    made = workload.model_copy(update={"layers": layers, **{name: getattr(fresh, name) for name in _TIMES}})
    return workload if made == workload else made


def _no_network(layout: Topology, machine: Machine) -> str:
    hosts = [f"{machine.name}-x{n}" for n in (2, 4, 8) if n >= layout.gpus and f"{machine.name}-x{n}" in SHEETS]
    one_host = f" For {layout.gpus} cards on one host, take the preset {hosts[0]}." if hosts else ""
    return (
        f"The job needs {layout.gpus} GPUs, and machine {machine.name!r} has {machine.gpus_per_node}.{one_host} For "
        f"{layout.nodes} machines, add network_bytes_per_s to the machine file."
    )


def workload_from_model(
    model: Architecture | Mapping[str, Any] | str | Path,
    machine: Machine,
    ds_config: Mapping[str, Any] | str | Path | None = None,
    *,
    accumulation: int | None = None,
    gradient_accumulation_steps: int | None = None,
    activation_checkpointing: Checkpointing = "full",
    **job: Any,
) -> Workload:
    """Return the estimated workload of one rank that trains ``model`` under ZeRO on a machine.

    >>> llama = {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32,
    ...          "num_attention_heads": 32, "intermediate_size": 11008, "vocab_size": 32000}
    >>> work = workload_from_model(llama, preset("h200"), sequence=2048, micro_batch=1)
    >>> work.params
    6738415616

    Parameters are counted exactly and divided into subgroups as DeepSpeed divides them. Times are estimates.
    Matrix products run at the machine's ``device_flops_per_s``. They need 2 flops per weight and token in forward
    and twice that in backward, plus the recomputed forward with activation checkpointing. Causal attention scores
    are added. Activation memory follows Korthikanti et al., arXiv 2205.05198, equations 1 to 6. A profile of the
    real model (`tune profile`) is more exact.

    Args:
        ds_config: DeepSpeed's config, which may contain ``"auto"``. Its values have priority over defaults.
        accumulation: Number of micro-batches per optimizer step. Also called ``gradient_accumulation_steps``.
        activation_checkpointing: ``full`` keeps only the input of each layer, and computes the layer again in
            backward. ``selective`` does so for every other layer, ``none`` for no layer.
        job: Fields of `Job`: sequence, micro_batch, precision, zero_stage, data_parallel, tensor_parallel,
            pipeline_parallel, stage, sequence_parallel, flash_attention, flash_version, kernels, fused_loss.

    Raises:
        ModelError: A description, a config or a value cannot be used. The message names the key.
    """
    if activation_checkpointing not in get_args(Checkpointing):
        raise ModelError(
            "activation_checkpointing must be 'full' (each layer is computed again), 'selective' (every other one) or "
            f"'none', but got {activation_checkpointing!r}"
        )
    if activation_checkpointing == "selective":
        job.setdefault("recompute_share", SELECTIVE_SHARE)
    if job.get("data_parallel") is None:
        job["data_parallel"] = default_ranks(machine, job)
    if None not in (accumulation, gradient_accumulation_steps) and accumulation != gradient_accumulation_steps:
        raise ModelError(
            "accumulation and gradient_accumulation_steps are two names of one number, but got "
            f"{accumulation} and {gradient_accumulation_steps}. Leave one out",
            key="accumulation",
        )
    steps = accumulation if gradient_accumulation_steps is None else gradient_accumulation_steps
    recompute = activation_checkpointing != "none"
    return estimated(Job.of_deepspeed(model, ds_config, accumulation=steps, recompute=recompute, **job), machine)


def default_ranks(machine: Machine, shape: Mapping[str, Any]) -> int:
    """Return the default data-parallel ranks: the GPUs divided by tensor and pipeline parallelism."""
    beside = [shape.get(name) or 1 for name in ("tensor_parallel", "pipeline_parallel")]
    if not isinstance(machine, Machine):
        return 1  # `estimated` refuses it
    return max(1, machine.default_gpus // math.prod(n for n in beside if isinstance(n, int)))
