"""Published DeepSpeed configs, prepared for a tiny model.

`tests/data/deepspeed_configs.json` has their keys and values, with the source of each config.
"""

from __future__ import annotations

import copy
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

TABLE = Path(__file__).parents[2] / "data" / "deepspeed_configs.json"
HIDDEN = 32
# Keys that write to other places or services, or set the size of the training. The tests do not use them.
_LEFT_OUT = ("tensorboard", "wandb", "csv_monitor", "comet", "train_batch_size", "steps_per_print")
_BUCKETS, _LARGEST_BUCKET = ("reduce_bucket_size", "allgather_bucket_size"), 1_000_000
_LEARNING_RATE = 1e-3
# Values that transformers' Trainer puts in place of "auto", by the end of the key.
_FILLED: Mapping[str, Any] = {
    "lr": _LEARNING_RATE,
    "betas": [0.9, 0.999],
    "eps": 1e-8,
    "weight_decay": 0.01,
    "warmup_min_lr": 0,
    "warmup_max_lr": _LEARNING_RATE,
    "warmup_num_steps": 2,
    "total_num_steps": 10,
    "reduce_bucket_size": HIDDEN * HIDDEN,
    "stage3_prefetch_bucket_size": int(0.9 * HIDDEN * HIDDEN),
    "stage3_param_persistence_threshold": 10 * HIDDEN,
    "gradient_clipping": 1.0,
}


@dataclass(frozen=True)
class Published:
    """A published config file of a repository: one row of `tests/data/deepspeed_configs.json`."""

    repository: str
    path: str
    commit: str
    config: dict[str, Any]

    @property
    def name(self) -> str:
        return f"{self.repository}/{self.path}"


@cache
def published(table: Path = TABLE) -> tuple[Published, ...]:
    return tuple(Published(**row) for row in json.loads(table.read_text()))


def as_trained(config: Mapping[str, Any], subgroup: int | None = None) -> dict[str, Any]:
    """Return a published config as the Trainer passes it to DeepSpeed, for a batch size of two and few steps.

    Args:
        subgroup: Number of elements of a subgroup, instead of the config's own value.
    """
    made: dict[str, Any] = copy.deepcopy({k: v for k, v in config.items() if k not in _LEFT_OUT})
    made["train_micro_batch_size_per_gpu"] = 2
    accumulated = str(config.get("gradient_accumulation_steps", 1))
    made["gradient_accumulation_steps"] = 2 if accumulated.isdigit() and int(accumulated) > 1 else 1
    made["steps_per_print"] = 10**9
    _precision(made)
    for holder, key, value in list(_leaves(made)):
        if value == "auto" and key in _FILLED:
            holder[key] = _FILLED[key]
        if key == "nvme_path" and value:
            holder[key] = str(Path(tempfile.gettempdir()) / f"zoo-{os.getpid()}")
        if key == "output_file":
            del holder[key]  # belongs to the flops profiler
        if key in _BUCKETS and isinstance(value, int | float):
            holder[key] = min(value, _LARGEST_BUCKET)
    if subgroup is not None and zero_of(made):
        made["zero_optimization"]["sub_group_size"] = subgroup
    return made


def _precision(config: dict[str, Any]) -> None:
    names = [name for name in ("bf16", "bfloat16", "fp16") if isinstance(config.get(name), dict)]
    automatic = [name for name in names if config[name].get("enabled") == "auto"]
    on = any(config[name].get("enabled") in (True, "true") for name in names)
    for name in automatic:
        config[name]["enabled"] = name == automatic[0] and not on


def _leaves(value: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str, Any]]:
    for key, inner in value.items():
        if isinstance(inner, dict):
            yield from _leaves(inner)
        else:
            yield value, key, inner


def zero_of(config: Mapping[str, Any]) -> dict[str, Any]:
    zero = config.get("zero_optimization")
    return zero if isinstance(zero, dict) else {}


def offloads(config: Mapping[str, Any]) -> bool:
    """Return whether a DeepSpeed config offloads the optimizer's state to host memory or NVMe."""
    zero = zero_of(config)
    device = (zero.get("offload_optimizer") or {}).get("device", "none")
    return bool(zero.get("cpu_offload")) or device in ("cpu", "nvme")


def client_optimizer(config: Mapping[str, Any]) -> Callable[[Any], Any] | None:
    """Return a function that makes the optimizer which Accelerate passes to DeepSpeed, or None if the config
    names an optimizer.
    """
    if config.get("optimizer"):
        return None
    if offloads(config) and config.get("zero_force_ds_cpu_optimizer", True):
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return lambda parameters: DeepSpeedCPUAdam(parameters, lr=_LEARNING_RATE)
    import torch

    return lambda parameters: torch.optim.AdamW(parameters, lr=_LEARNING_RATE)
