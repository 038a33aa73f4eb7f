"""The instructions for training under a plan: a DeepSpeed config, a command, and arguments for the Hugging Face
Trainer.
"""

import json
from collections.abc import Mapping
from typing import Any

from ebbtide.simulator.estimates.deepspeed_keys import PROCESSES
from ebbtide.simulator.page import write_whole
from ebbtide.simulator.plan import Plan
from ebbtide.simulator.workload import TrainedAs, Workload

# Values that transformers and Accelerate fill in from their own arguments.
_FILLED_IN: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
}


def emitted_config(
    plan: Plan, plan_file: str, given: Mapping[str, Any] | None, wire_dtype: str, zero_stage: int = 3
) -> dict[str, Any]:
    """Build a DeepSpeed config that makes training follow a plan.

    Values of a given config are kept, except those that the plan decides. If a value is ``"auto"`` and
    the plan depends on it, the plan's number is written instead.

    Args:
        plan_file: Path of the plan's file, to be written into the config. A script may run in any
            folder, so the path should be absolute, or the file should lie next to the config.
        given: DeepSpeed config to start from. If None, all other values are left to the trainer.
        wire_dtype: Dtype of gradients and parameters: ``bf16``, ``fp16`` or ``fp32``.

    Raises:
        ValueError: ``given`` is for another ZeRO stage.
    """
    config = _base(wire_dtype, zero_stage) if given is None else dict(given)
    config.pop(PROCESSES, None)  # of Accelerate's config
    zero = config["zero_optimization"] = dict(config.get("zero_optimization") or {})
    if zero.get("stage") is None:
        zero["stage"] = zero_stage
    if zero["stage"] != zero_stage:
        raise ValueError(
            f"zero_optimization.stage in --ds-config must be {zero_stage}, which the plan is for, "
            f"but got {zero['stage']!r}: plan with --zero-stage {zero['stage']}, or change the file"
        )
    zero["sub_group_size"] = plan.config_subgroup_size
    offload = zero.get("offload_optimizer")
    offload = offload if isinstance(offload, dict) else {}
    if offload.get("device") != "nvme":  # with nvme, the config trains under a plan unchanged
        zero["offload_optimizer"] = {**offload, "device": "cpu"}
    if "host" in plan.parameter_locations:  # without this key, DeepSpeed starts with all parameters in GPU memory
        zero.setdefault("offload_param", {"device": "cpu"})
    if plan.trained_as is not None:
        _write_numbers(config, plan.trained_as)
    config["ebbtide"] = {"plan": plan_file}
    return config


def config_without_offload(given: Mapping[str, Any] | None, wire_dtype: str, zero_stage: int = 3) -> dict[str, Any]:
    """Build a DeepSpeed config that trains with all state and parameters in GPU memory.

    Args:
        given: DeepSpeed config to start from, which loses its offload. If None, other values are left to the trainer.
    """
    config = _base(wire_dtype, zero_stage) if given is None else dict(given)
    zero = {"stage": zero_stage, **(config.get("zero_optimization") or {})}
    config["zero_optimization"] = {key: value for key, value in zero.items() if not key.startswith("offload_")}
    config.pop("ebbtide", None)
    return config


def _write_numbers(config: dict[str, Any], steps: TrainedAs) -> None:
    numbers = {"train_micro_batch_size_per_gpu": steps.micro_batch, "gradient_accumulation_steps": steps.accumulation}
    for key, number in numbers.items():
        if config.get(key) == "auto":
            config[key] = number
    for name in ("bf16", "fp16"):
        section = config.get(name)
        if isinstance(section, dict) and section.get("enabled") == "auto":
            config[name] = {**section, "enabled": name == steps.precision}


def write_config(config: dict[str, Any], path: str) -> None:
    """Write a DeepSpeed config to a file. After a crash, the file has either the old or the whole new content."""
    write_whole(path, json.dumps(config, indent=2) + "\n")


def _base(wire_dtype: str, zero_stage: int) -> dict[str, Any]:
    zero = {"stage3_gather_16bit_weights_on_model_save": True} if zero_stage == 3 else {}
    precision = {} if wire_dtype == "fp32" else {wire_dtype: {"enabled": "auto"}}
    return {**_FILLED_IN, **precision, "zero_optimization": zero}


CONFIG_FILE, PLAN_FILE = "ds.json", "plan.json"


def use(plan: Plan, workload: Workload, config: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the DeepSpeed config, the shell command and the Trainer's arguments for training under a plan."""
    # The files of the config and of the plan must lie in the folder in which training starts.
    made = emitted_config(plan, PLAN_FILE, config, workload.wire_dtype, workload.zero_stage)
    return {"deepspeed": made, "command": command(workload), "trainer": trainer(workload)}


def use_without_offload(workload: Workload, config: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the same dict as `use`, for training with DeepSpeed alone and without offload."""
    made = config_without_offload(config, workload.wire_dtype, workload.zero_stage)
    alone = command(workload).removeprefix("tune run -- ")
    return {"deepspeed": made, "command": alone, "trainer": trainer(workload)}


def trainer(workload: Workload, config_file: str = CONFIG_FILE) -> str:
    """Return Python source that creates the Hugging Face Trainer's arguments which a plan depends on, such as
    the batch size, the dtype and the DeepSpeed config.
    """
    given: dict[str, Any] = {"output_dir": "out"}
    if workload.wire_dtype != "fp32":
        given[workload.wire_dtype] = True
    if workload.micro_batch is not None:
        given["per_device_train_batch_size"] = workload.micro_batch
    given["gradient_accumulation_steps"] = workload.gradient_accumulation_steps
    if workload.recompute is not None:
        given["gradient_checkpointing"] = workload.recompute
    given["deepspeed"] = config_file
    shown = {name: f'"{value}"' if isinstance(value, str) else value for name, value in given.items()}
    lines = "".join(f"    {name}={value},\n" for name, value in shown.items())
    length = "" if workload.sequence is None else f"  # samples of at most {workload.sequence} tokens"
    return f"TrainingArguments(\n{lines}){length}"


def command(workload: Workload, config_file: str = CONFIG_FILE) -> str:
    """Return the shell command that runs an unchanged training script under a plan. With several nodes, the
    user runs the command on each node.
    """
    ranks = workload.ranks_per_node
    launcher = f"torchrun --nproc-per-node {ranks}" if ranks * workload.nodes > 1 else "python"
    if workload.nodes > 1:
        launcher += f" --nnodes {workload.nodes} --rdzv-backend c10d --rdzv-endpoint HOST:29500"
    return f"tune run -- {launcher} train.py --deepspeed {config_file}"
