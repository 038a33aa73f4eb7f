"""The instructions for training under a plan: a DeepSpeed config, a command, and arguments for the Hugging
Face Trainer.
"""

from collections.abc import Mapping
from typing import Any

from ebbtide.simulator.plan import Plan
from ebbtide.simulator.workload import Workload
from ebbtide.tuner.emitted_config import config_without_offload, emitted_config

CONFIG_FILE, PLAN_FILE = "ds.json", "plan.json"


def use(plan: Plan, workload: Workload, config: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a dict with the DeepSpeed config (``deepspeed``), the shell command (``command``) and the arguments of the
    Hugging Face Trainer (``trainer``) for training under a plan.
    """
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
    lines = "".join(f"    {name}={_python(value)},\n" for name, value in given.items())
    length = "" if workload.sequence is None else f"  # samples of at most {workload.sequence} tokens"
    return f"TrainingArguments(\n{lines}){length}"


def _python(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


def command(workload: Workload, config_file: str = CONFIG_FILE) -> str:
    """Return the shell command that runs an unchanged training script under a plan. With several nodes, the
    user runs the command on each node.
    """
    ranks = workload.ranks_per_node
    launcher = f"torchrun --nproc-per-node {ranks}" if ranks * workload.nodes > 1 else "python"
    if workload.nodes > 1:
        launcher += f" --nnodes {workload.nodes} --rdzv-backend c10d --rdzv-endpoint HOST:29500"
    return f"tune run -- {launcher} train.py --deepspeed {config_file}"
