"""Changes to a training job as ``tune`` options and as values in the DeepSpeed config."""

import math
from collections.abc import Mapping
from typing import Any

from ebbtide.simulator.estimates.deepspeed_keys import AUTO, BATCH_KEYS, WHOLE_BATCH, ZERO, at
from ebbtide.simulator.estimates.job import Job
from ebbtide.simulator.estimates.knobs import KNOBS, Changes, applied, changes_text
from ebbtide.simulator.limits import GIB

_KEYS = {"zero_stage": f"{ZERO}.stage", "sub_group_size": f"{ZERO}.sub_group_size", **BATCH_KEYS}


def label_of(changes: Changes, *, no_host_limit: bool = False) -> str:
    """Return the new values of the changed settings of job and machine as text, such as "ZeRO-3, micro-batch 4"."""
    return ", ".join(filter(None, [changes_text(changes), "no limit of host memory" if no_host_limit else ""]))


def options_of(changes: Changes, job: Job, *, host_limit: bool = False, no_host_limit: bool = False) -> str:
    """Return the ``tune`` options, or the keys of the job's DeepSpeed config, that make changes, as text.

    A change without an option is described in words.

    Args:
        host_limit: True if host memory that the machine has need only be allowed.
    """
    in_config = config_values(changes, job)
    changed = {
        name: KNOBS[name].text(value, as_option=True)
        for name, value in changes.items()
        if _KEYS.get(name) not in in_config
    }
    if host_limit:
        changed["host_memory_bytes"] = f"--host-memory {_gib(int(changes['host_memory_bytes']))}GiB"
    return ", ".join(
        [
            *(f'"{key}": {value} in the DeepSpeed config' for key, value in in_config.items()),
            *changed.values(),
            *(["without --host-memory"] if no_host_limit else []),
        ]
    )


def config_values(changes: Changes, job: Job) -> dict[str, Any]:
    """Return the values that a set of changes replaces in a job's DeepSpeed config, as a dict from key to new value.

    A key that the config leaves out or sets to ``"auto"`` is not included, because an option can set it.
    """
    after = applied(job, changes)
    new = {key: getattr(after, name) for name, key in _KEYS.items()}
    new[WHOLE_BATCH] = after.micro_batch * after.accumulation * after.data_parallel
    return {key: value for key, value in new.items() if at(job.config, key) not in (None, AUTO, value)}


def with_values(config: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a DeepSpeed config with other values of some keys, such as ``zero_optimization.stage``."""
    made = dict(config)
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        made |= {section: {**(made.get(section) or {}), name: value}} if section else {name: value}
    return made


def config_of(job: Job, config: Mapping[str, Any] | None, plan: str | None) -> dict[str, Any]:
    """Return a job's DeepSpeed config with all its values written out, to train under a plan or without offload.

    Args:
        config: DeepSpeed config that the job's settings replace, or None.
        plan: Value of ``ebbtide.plan``. None: nothing is offloaded.
    """
    made = {**job.model_copy(update={"config": {**(config or {}), **dict(job.config)}}).deepspeed()}
    zero = dict(made[ZERO])
    if job.zero_stage == 3:
        zero.setdefault("stage3_gather_16bit_weights_on_model_save", True)
    made = {key: value for key, value in made.items() if key not in ("ebbtide", WHOLE_BATCH)}
    if plan is None:
        zero = {key: value for key, value in zero.items() if key not in ("offload_optimizer", "offload_param")}
        return {**made, ZERO: zero}
    zero["offload_optimizer"] = {"device": "cpu", **(zero.get("offload_optimizer") or {})}
    return {**made, ZERO: zero, "ebbtide": {"plan": plan}}


def _gib(size_bytes: int) -> str:
    """Return a size in GiB, rounded up, so that the text is never less than the size."""
    return f"{math.ceil(100 * size_bytes / GIB) / 100:.12g}"
