"""From an answer to training: DeepSpeed's config, the command, the Trainer's line."""

from collections.abc import Mapping
from typing import Any

from ebbtide.simulator.plan import Plan
from ebbtide.simulator.workload import Workload
from ebbtide.tuner.emitted_config import emitted_config

CONFIG_FILE, PLAN_FILE = "ds.json", "plan.json"
TRAINER = f'TrainingArguments(..., deepspeed="{CONFIG_FILE}")'


def use(plan: Plan, workload: Workload, config: Mapping[str, Any] | None) -> dict[str, Any]:
    """What to write where, and what to type; both files lie where training starts.

    Args:
        config: DeepSpeed's, where one was given.
    """
    made = emitted_config(plan, PLAN_FILE, config, workload.wire_dtype, workload.zero_stage)
    return {"deepspeed": made, "command": command(workload), "trainer": TRAINER}


def command(workload: Workload, config_file: str = CONFIG_FILE) -> str:
    """That trains an unchanged script; several nodes: on each of them."""
    ranks = workload.ranks_per_node
    launcher = f"torchrun --nproc-per-node {ranks}" if ranks * workload.nodes > 1 else "python"
    if workload.nodes > 1:
        launcher += f" --nnodes {workload.nodes} --rdzv-backend c10d --rdzv-endpoint HOST:29500"
    return f"tune run -- {launcher} train.py --deepspeed {config_file}"
