"""The settings that a configuration search (``tune search``) keeps fixed, since a flag of the command or
DeepSpeed's config gives their values.

The search varies the other settings.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ebbtide.simulator.estimates.deepspeed_config import deepspeed_fields
from ebbtide.simulator.estimates.deepspeed_keys import AUTO, BATCH_KEYS, BATCHES, WHOLE_BATCH, ZERO, at, loaded
from ebbtide.simulator.estimates.job import OFFLOADS
from ebbtide.simulator.estimates.models.blocks import ModelError
from ebbtide.simulator.estimates.offloading import Offloading, offloading
from ebbtide.simulator.rules import RuleError
from ebbtide.tuner.configurations.space import KNOBS

_FLAGS = {
    "micro_batch": "--micro-batch",
    "accumulation": "--accumulation",
    "zero_stage": "--zero-stage",
    "recompute": "--keep-activations",
    "offload": "--no-offload",
    "recompute_share": "--recompute-share",
    "kernels": "--kernels",
    "fused_loss": "--fused-loss",
    "flash_attention": "--no-flash-attention",
}
# Flags that say what the training script has today. A search may vary these settings if `--free` names them.
_STARTS = ("kernels", "fused_loss", "flash_attention")


def check_config(config: Mapping[str, Any]) -> None:
    """Raise ModelError, with the key, for an invalid value that a configuration search could not replace."""
    # Batch sizes are checked elsewhere, together with the flags and the number of GPUs.
    deepspeed_fields({k: v for k, v in loaded(config).items() if k not in BATCHES}, hidden=1)
    size = at(config, f"{ZERO}.sub_group_size")
    if size == 0:
        raise ModelError(f"{ZERO}.sub_group_size must be >= 1 or 'auto', but got {size!r}")


@dataclass(frozen=True)
class Fixed:
    """The settings that a configuration search does not vary, with their values and sources.

    Attributes:
        values: Value of each fixed setting.
        sources: Flag or config key that fixes each setting.
        global_batch: Samples per optimizer step. None if the number may vary.
    """

    values: Mapping[str, Any]
    sources: Mapping[str, str]
    global_batch: int | None

    def free(self, named: str | None) -> tuple[str, ...]:
        """Return the settings that a configuration search varies: the named ones, or all that are not fixed.

        Args:
            named: Comma-separated names, as in ``--free``, or None.

        Raises:
            ValueError: A named setting is fixed.
        """
        if named is None:
            return tuple(knob for knob in KNOBS if knob not in self.values)
        knobs = tuple(name.strip() for name in named.split(",") if name.strip())
        for knob in knobs:
            if knob in self.values and knob not in _STARTS:
                raise RuleError(
                    f"--free must not name a setting that is fixed, but got {knob}, and "
                    f"{self.sources[knob]} fixes it at {self.values[knob]}: leave one of them out",
                    key="free",
                )
        return knobs


def fixed_knobs(flags: Mapping[str, Any], config: Mapping[str, Any], global_batch: int | None) -> Fixed:
    """Return the settings that a configuration search keeps fixed, since a flag of ``tune search`` or
    DeepSpeed's config gives their values.

    A config value ``"auto"`` fixes nothing.

    Args:
        flags: Values of the flags of ``tune search``. Flags that are left out fix nothing.
        global_batch: Samples per optimizer step, or None.

    Raises:
        ValueError: The config cannot be used, or flags and config contradict each other.
    """
    check_config(config)
    set_by_flags = {
        "micro_batch": flags.get("micro_batch"),
        "accumulation": flags.get("accumulation"),
        "zero_stage": flags.get("zero_stage"),
        "recompute": False if flags.get("keep_activations") else None,
        "offload": "none" if flags.get("no_offload") else None,
        **{name: flags.get(name) for name in ("recompute_share", "kernels")},
        "fused_loss": flags.get("fused_loss") or None,
        "flash_attention": False if flags.get("no_flash_attention") else None,
    }
    values = {knob: value for knob, value in set_by_flags.items() if value is not None}
    sources = {knob: _FLAGS[knob] for knob in values}
    for knob, (key, value) in _of_config(config).items():
        if values.setdefault(knob, value) != value:
            raise RuleError(
                f"{sources[knob]} must agree with {key} of --ds-config, {value}, but got "
                f"{values[knob]}: leave one of them out",
                key=f"ds_config.{key}",
            )
        sources.setdefault(knob, key)
    whole: Any = config.get(WHOLE_BATCH) or AUTO
    if whole != AUTO and global_batch not in (None, whole):
        raise RuleError(
            f"the global batch (--global-batch) must agree with train_batch_size of the DeepSpeed config, {whole}, but "
            f"got {global_batch}: leave one of them out",
            key="global_batch",
        )
    return Fixed(values, sources, global_batch if whole == AUTO else whole)


def _of_config(config: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    zero = config.get("zero_optimization") or {}
    result = {knob: (key, config.get(key)) for knob, key in BATCH_KEYS.items()}
    result["zero_stage"] = ("zero_optimization.stage", zero.get("stage"))
    size = zero.get("sub_group_size")
    size = int(size) if isinstance(size, (int, float)) else size
    result["sub_group_size"] = ("zero_optimization.sub_group_size", size)
    moved = offloading(config)
    if moved.optimizer is None and moved.parameters != "none":
        moved.strategy(3)  # raises an error that says what is missing
    if moved.optimizer is not None:
        result["offload"] = ("zero_optimization.offload_optimizer.device", _word(moved))
        if result["offload"][1] is None:
            raise ValueError(
                "tune search supports offload_optimizer.device 'cpu' (with offload_param.device 'none' or 'cpu') and "
                "'nvme' (with offload_param.device 'cpu'), but --ds-config has offload_optimizer.device "
                f"{moved.optimizer!r} with offload_param.device {moved.parameters!r}"
            )
    return {knob: pair for knob, pair in result.items() if pair[1] not in (None, AUTO)}


def _word(moved: Offloading) -> str | None:
    devices = (moved.optimizer, moved.parameters)
    return next((word for word, pair in OFFLOADS.items() if pair == devices), None)
