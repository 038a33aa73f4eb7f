"""The setup of a training process that `tune search --measure` starts: another configuration in the DeepSpeed config of
the script, a timer of its steps, and an exit after the last measured step.

This module imports only Python's standard library, because `sitecustomize` loads it in every process.
"""

from typing import Any


def enable(hook: Any) -> None:
    """Set up this process for `tune search --measure`: change the DeepSpeed config, and time the engine's steps."""
    hook.also("deepspeed", lambda module: _in_deepspeed(module, hook))
    hook.also("accelerate.utils.deepspeed", lambda module: _in_accelerate(module, hook))


def _in_accelerate(accelerate: Any, hook: Any) -> None:
    # The Trainer and Accelerate decide by this object whether parameters are partitioned while the model is built.
    kind = getattr(accelerate, "HfDeepSpeedConfig", None)
    if kind is None:
        return
    decided = kind.set_stage_and_offload

    def set_stage_and_offload(config: Any) -> None:
        hook.own("ebbtide.runtime.frontdoor.configured").in_accelerate(config)
        decided(config)

    kind.set_stage_and_offload = set_stage_and_offload


def _in_deepspeed(deepspeed: Any, hook: Any) -> None:
    def build(*call: Any) -> Any:
        return hook.own("ebbtide.runtime.frontdoor.timed").initialize(*call)

    hook.own("ebbtide.runtime.frontdoor.verified").around_initialize(deepspeed, build)
