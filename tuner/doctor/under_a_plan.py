"""The check in ``tune doctor`` that reports what ebbtide does with a DeepSpeed config: refuse it, leave the
training to DeepSpeed alone, or train under a plan. Nothing is trained.
"""

from collections.abc import Mapping
from typing import Any

from ebbtide.tuner.doctor.finding import Finding, bad, ok, slow

NAME = "DeepSpeed config"
# Keys for DeepSpeed's own offloading. A plan replaces them.
_HINTS = (
    "zero_optimization.sub_group_size",
    "zero_optimization.cpu_offload_use_pin_memory",
    *(
        f"zero_optimization.offload_optimizer.{key}"
        for key in ("pin_memory", "buffer_count", "fast_init", "pipeline_read", "pipeline_write", "cpuadam_cores_perc")
    ),
)
_ON_ONE_STREAM = (
    "zero_optimization.overlap_comm is false: gathers and reductions run on the compute stream, "
    "which then waits at each module whose parameters are still being updated"
)
_SWAPPED = (
    "offload_param.device is nvme: parameters stay on the drive, read and written by DeepSpeed's own swapper "
    "with its buffers and aio settings. A plan decides about the optimizer state only, and its prediction "
    "does not count the time for parameters on the drive"
)


def under_a_plan(given: Mapping[str, Any]) -> list[Finding]:
    """Report what `ebbtide.initialize` does with a DeepSpeed config: refuse it, leave the training to DeepSpeed
    alone, or train under a plan.

    Nothing is trained. The report includes config keys that have another effect under a plan than with DeepSpeed alone.
    """
    from ebbtide.runtime.zero.checks.guard import ConfigError, check_config
    from ebbtide.simulator.estimates.deepspeed_keys import ZERO, as_deepspeed_reads, at
    from ebbtide.simulator.estimates.offloading import left_to_stock, replaced_by_a_plan

    refusal = refused_by_deepspeed(given)
    if refusal:
        return [bad(NAME, f"DeepSpeed itself refuses it: {refusal}", "change that key")]
    config = as_deepspeed_reads(given)
    why = left_to_stock(config)
    if why:
        return [ok(NAME, f'left to DeepSpeed, as without the key "ebbtide": {why}')]
    try:
        check_config(given)
    except ConfigError as error:
        return [bad(NAME, f"refused: {error}", "change that key, or train without a plan")]
    hints = [key for key in _HINTS if at(config, key) is not None]
    findings = [ok(NAME, f"trains under a plan, {_whose_bits(config)}")]
    findings += [ok(NAME, sentence) for sentence in replaced_by_a_plan(config).values()]
    if at(config, f"{ZERO}.offload_param.device") == "nvme":
        findings.append(ok(NAME, _SWAPPED))
    if hints:
        findings.append(ok(NAME, f"ignored, because the plan sets its own values: {', '.join(hints)}"))
    if at(config, "zero_optimization.overlap_comm") is False:
        findings.append(slow(NAME, _ON_ONE_STREAM, "leave overlap_comm out, or make it true"))
    return findings


def _whose_bits(config: Mapping[str, Any]) -> str:
    from ebbtide.runtime.kernels.rules import RULES
    from ebbtide.simulator.estimates.deepspeed_keys import at
    from ebbtide.simulator.estimates.offloading import own_step_key

    kind = at(config, "optimizer.type")
    stock = {name: rule.stock for rule in RULES for name in rule.types}.get(str(kind).lower())
    key = own_step_key(config)
    if key.endswith("master_weights_and_grads"):
        return f"with the results of DeepSpeed's own step, all of it on the CPU, as {key} asks for"
    if kind is None:
        return "with the results of the script's own optimizer (torch optimizers run on the CPU, as in DeepSpeed alone)"
    if key or stock is None:
        return f"with the results of torch's {kind}, which runs its own step on the CPU"
    return f"with the results of {stock}"


def refused_by_deepspeed(given: Mapping[str, Any]) -> str:
    """Return the error with which DeepSpeed itself refuses a config, or an empty string if it accepts the config."""
    from deepspeed.runtime.config import DeepSpeedConfig
    from ebbtide.simulator.estimates.deepspeed_keys import BATCHES

    config = {k: v for k, v in given.items() if v != "auto" and k not in BATCHES}
    try:
        DeepSpeedConfig({**config, "train_micro_batch_size_per_gpu": 1})
    except Exception as error:  # DeepSpeed's own checks may raise any error
        lines = [line.strip() for line in str(error).splitlines()]
        return ": ".join(lines[:3]) or type(error).__name__
    return ""
