"""The settings of a configuration that `tune search --measure` trains in, put into the DeepSpeed config of a script."""

import copy
import json
import os
from collections.abc import Mapping
from typing import Any

VARIABLE = "EBBTIDE_MEASURE"
# A key of configs of Accelerate that already have the configuration. True: the micro-batch was left to the trainer.
CHANGED = "ebbtide_measured"
ZERO, KEY = "zero_optimization", "ebbtide"
BATCHES = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
WHOLE_BATCH = "train_batch_size"
# Keys of `zero_optimization` that a configuration decides, also those of old versions.
DECIDED = (
    "stage",
    "sub_group_size",
    "offload_optimizer",
    "offload_param",
    "cpu_offload",
    "cpu_offload_params",
    "cpu_offload_param",
)


def configured(config: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a script's DeepSpeed config with the settings of a configuration.

    Keys that no configuration decides are kept. So are batch sizes that are "auto", which a trainer fills in.

    Args:
        wanted: DeepSpeed config of the configuration. Its key ``"ebbtide"`` names the plan, if there is one.
    """
    made = copy.deepcopy(dict(config))
    given: dict[str, Any] = made[ZERO] if isinstance(made.get(ZERO), dict) else {}
    zero = {name: value for name, value in given.items() if name not in DECIDED}
    for name, value in wanted[ZERO].items():
        if name not in DECIDED:
            continue
        own = given.get(name)
        zero[name] = {**own, **value} if isinstance(value, dict) and isinstance(own, dict) else value
    made[ZERO] = zero
    if made.get(WHOLE_BATCH) != "auto":
        made.pop(WHOLE_BATCH, None)
    for name in BATCHES:
        if made.get(name) != "auto":
            made[name] = wanted[name]
    device = made.pop(KEY, None)
    if KEY in wanted:  # without the checkpoints of the script's own key, which a measurement must not replace
        made[KEY] = {**{k: v for k, v in (device or {}).items() if k == "device"}, **wanted[KEY]}
    return made


def current_job() -> dict[str, Any]:
    """Return what `tune search --measure` asks of this process, from the environment variable that it sets."""
    asked: dict[str, Any] = json.loads(os.environ[VARIABLE])
    return asked


def in_accelerate(config: Any) -> None:
    """Put the configuration into a config object of Accelerate or of the Trainer, once."""
    if not isinstance(config.config, dict) or CHANGED in config.config:
        return
    given = config.config
    if type(config).__name__ == "HfTrainerDeepSpeedConfig":  # it refuses numbers that its arguments do not have
        given = {**given, **dict.fromkeys(BATCHES, "auto")}
    made = configured(given, current_job()["deepspeed"])
    config.config = {**made, CHANGED: made[BATCHES[0]] == "auto"}
