"""The training job: a model with its training settings, from which times and memory of training are estimated."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self, get_args

from ebbtide.simulator.estimates.collectives import Layout
from ebbtide.simulator.estimates.deepspeed_config import deepspeed_fields
from ebbtide.simulator.estimates.deepspeed_keys import STATE, ZERO, at
from ebbtide.simulator.estimates.flat_rank import FlatRank
from ebbtide.simulator.estimates.hardware.sheets import SHEETS
from ebbtide.simulator.estimates.models.architecture import architecture
from ebbtide.simulator.estimates.models.blocks import Architecture, ModelError
from ebbtide.simulator.estimates.offloading import Offloading, offloading, own_step_key, plan_obstacle
from ebbtide.simulator.estimates.rank import Rank
from ebbtide.simulator.estimates.training import Training
from ebbtide.simulator.machine import Machine
from ebbtide.simulator.rules import broken, checked, suggestion
from ebbtide.simulator.workload import WIRE_BYTES, WireDtype, Workload
from pydantic import ValidationError

# The setting `offload` of searches and of the web page -> where DeepSpeed keeps optimizer state and parameters.
OFFLOADS = {
    "none": ("none", "none"),
    "optimizer": ("cpu", "none"),
    "parameters": ("cpu", "cpu"),
    "nvme": ("nvme", "cpu"),
}
Checkpointing = Literal["full", "selective", "none"]
SELECTIVE_SHARE = 0.5  # every other layer, as torchtitan's "selective" and fms-fsdp do by default
# The times of a workload and of its layers that are estimated from a machine's rates.
_TIMES = ("pipeline_idle_s", "step_gather_s", "module_issue_s", "step_issue_s", "bare_step_issue_s")
_LAYER_TIMES = ("forward_s", "backward_s", "bare_forward_s", "bare_backward_s", "unhidden_s")
_BF16: Mapping[str, Any] = {"bf16": {"enabled": True}}


class Job(Training):
    """A training job: a model and its training settings. It can estimate its workload on a machine.

    It is created from command-line flags, a DeepSpeed config, a web request or Python.
    """

    @classmethod
    def of_deepspeed(
        cls,
        model: Architecture | Mapping[str, Any] | str | Path,
        config: Mapping[str, Any] | str | Path | None = None,
        *,
        micro_batch: int | None = None,
        accumulation: int | None = None,
        precision: WireDtype | None = None,
        zero_stage: int | None = None,
        **shape: Any,
    ) -> Self:
        """Return the training job that consists of a model and a DeepSpeed config, which may contain ``"auto"``.

        Args:
            model: See `architecture`.
            micro_batch, accumulation, precision, zero_stage: Values to use where the config has none or ``"auto"``.
            shape: Other fields of a job.

        Raises:
            ModelError: The model's description, the config or a value cannot be used. The message names the key.
        """
        if precision is not None and precision not in WIRE_BYTES:
            raise ModelError(f"precision must be one of {', '.join(WIRE_BYTES)}, but got {precision!r}")
        arch = architecture(model)
        ranks, tensor = shape.get("data_parallel", 1), shape.get("tensor_parallel", 1)
        read = deepspeed_fields(
            config,
            hidden=arch.hidden,
            ranks=ranks if isinstance(ranks, int) and ranks else 1,
            tensor_parallel=tensor if isinstance(tensor, int) else 1,
            micro_batch=micro_batch,
            accumulation=accumulation,
            precision=precision,
            zero_stage=zero_stage,
        )
        return cls._checked({"architecture": arch, **read, **shape})

    def changed(self, **knobs: Any) -> Self:
        """Return a copy of the training job with other settings. ``offload`` may be a name from `OFFLOADS`.

        Raises:
            ModelError: A value cannot be used.
        """
        word = knobs.get("offload")
        if not isinstance(word, str):
            return self._checked({**dict(self), **knobs})
        state, parameters = OFFLOADS[word]
        moved = replace(self.offload, optimizer=state, parameters=parameters)
        made = self._checked({**dict(self), **knobs, "offload": moved})
        # Settings that depend on the devices (pinning, a ratio) come from the config.
        return made.model_copy(update={"offload": offloading(made.deepspeed())})

    @classmethod
    def _checked(cls, fields: Mapping[str, Any]) -> Self:
        if unknown := sorted(set(fields) - set(cls.model_fields)):
            raise ModelError(
                f"a training job is described by the fields {', '.join(cls.model_fields)}, "
                f"but got the field {unknown[0]!r}{suggestion(unknown[0], cls.model_fields)}"
            )
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            first = broken(error, model=cls)[0]
            raise ModelError(first.told, first.key) from None

    def deepspeed(self) -> dict[str, Any]:
        """Return the DeepSpeed config of a training job: the config that it was created from, with the job's values.

        If the job was not created from a config, the returned one enables bf16, because all commands of `tune` assume
        it. DeepSpeed would otherwise train in fp32.
        """
        given = self.config.get(ZERO) or {}
        zero: dict[str, Any] = {
            **{k: v for k, v in given.items() if k not in ("offload_optimizer", "offload_param")},
            "stage": self.zero_stage,
            "sub_group_size": self.sub_group_size,
        }
        for key, device in (("offload_optimizer", self.offload.optimizer), ("offload_param", self.offload.parameters)):
            if device not in (None, "none"):
                zero[key] = {**(given.get(key) or {}), "device": device}
        config = {k: v for k, v in self.config.items() if k != "train_batch_size"}
        return {
            **(config or _BF16),
            "train_micro_batch_size_per_gpu": self.micro_batch,
            "gradient_accumulation_steps": self.accumulation,
            ZERO: zero,
        }

    @checked
    def workload(self, machine: Machine) -> Workload:
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
        rank = (Rank if self.zero_stage == 3 else FlatRank)(self, machine)
        if rank.layout.tensor_groups_cut and machine.network_bytes_per_s is None:
            raise ModelError(
                f"tensor_parallel must divide the machine's {machine.gpus_per_node} GPUs per node if "
                "machine.network_bytes_per_s is not known, but got "
                f"{self.tensor_parallel} on machine {machine.name!r}: add network_bytes_per_s to "
                "the machine file, or lower tensor_parallel (--tensor-parallel)"
            )
        made = rank.workload()
        if machine.network_bytes_per_s is None and any(layer.network_reduce_bytes for layer in made.layers):
            raise ModelError(_no_network(rank.layout, machine), key="machine.network_bytes_per_s")
        return made.configured(self.offload, self)

    def retimed(self, workload: Workload, machine: Machine) -> Workload:
        """Return a copy of a workload of this job with the times that are estimated for a machine with other rates.

        Sizes and subgroups stay. If no time changes, the workload itself is returned.
        """
        fresh = self.workload(machine)
        layers = tuple(
            layer.model_copy(update={name: getattr(other, name) for name in _LAYER_TIMES})
            for layer, other in zip(workload.layers, fresh.layers, strict=True)
        )
        made = workload.model_copy(update={"layers": layers, **{name: getattr(fresh, name) for name in _TIMES}})
        return workload if made == workload else made


def _no_network(layout: Layout, machine: Machine) -> str:
    """Return a message for a job that needs several nodes, on a machine without a network."""
    hosts = [f"{machine.name}-x{n}" for n in (2, 4, 8) if n >= layout.gpus and f"{machine.name}-x{n}" in SHEETS]
    one_host = f" For {layout.gpus} cards on one host, take the preset {hosts[0]}." if hosts else ""
    return (
        f"The job needs {layout.gpus} GPUs, and machine {machine.name!r} has {machine.gpus_per_node}.{one_host} For "
        f"{layout.nodes} machines, add network_bytes_per_s to the machine file."
    )


def plan_refusal(config: Mapping[str, Any], moved: Offloading) -> str:
    """Return the reason why no plan can be searched for a DeepSpeed config. Empty if a plan can be searched.

    The reason names the key of the config to change. There are three kinds of reasons:

    - Training with this config cannot use a plan.
    - The config has a key with which the optimizer's own ``step()`` makes all updates in host memory, even if there is
      a plan. So there is nothing to search.
    - The config has an offload that ebbtide does not simulate together with a plan.

    Args:
        config: DeepSpeed config.
        moved: Offload settings of this config.
    """
    own_step = own_step_key(config)
    if own_step:
        return (
            f"{own_step} must be absent or false to search a plan, but got true. With this key the optimizer "
            "runs its own step and keeps all state in host memory, so there is nothing to search. "
            'Train with "ebbtide": {"plan": "automatic"} in the config'
        )
    obstacle = plan_obstacle(config)
    if not obstacle and moved.optimizer == "nvme":
        obstacle = _storage_obstacle(config, moved)
    if obstacle or not moved.beyond_plans:
        return obstacle
    what = "parameters on a drive" if moved.parameters == "nvme" else "activations that move"
    return (
        f"{moved.beyond_plans} must be absent to plan, because plans with {what} are not simulated. "
        "Remove the key for planning (training under a plan accepts it), or simulate DeepSpeed alone "
        "(tune simulate or tune search with the same --ds-config)"
    )


def _storage_obstacle(config: Mapping[str, Any], moved: Offloading) -> str:
    stage = at(config, f"{ZERO}.stage")
    if moved.storage is None:
        return f"{STATE}.nvme_path must name a folder for a plan with {STATE}.device 'nvme', but it is absent"
    if stage in (3, "auto"):
        return ""
    return f"{STATE}.device must be 'cpu' under ZeRO-{stage}, but got 'nvme': state on a drive needs ZeRO-3"


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
        model: See `architecture`.
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
    return Job.of_deepspeed(model, ds_config, accumulation=steps, recompute=recompute, **job).workload(machine)


def default_ranks(machine: Machine, shape: Mapping[str, Any]) -> int:
    """Return the default number of data-parallel ranks of a job on a machine.

    Args:
        shape: Fields of the job, of which ``tensor_parallel`` and ``pipeline_parallel`` are read.
    """
    beside = [shape.get(name) or 1 for name in ("tensor_parallel", "pipeline_parallel")]
    if not isinstance(machine, Machine):
        return 1  # `Job.workload` refuses it
    return max(1, machine.default_gpus // math.prod(n for n in beside if isinstance(n, int)))
