"""The setup of a training process that `tune verify` starts: random seeds, a recorder of the training
steps, and an exit after the last recorded step.

This module imports only Python's standard library, because `sitecustomize` loads it in every process.
"""

import functools
import json
import os
import random
import sys
from collections.abc import Callable
from typing import Any

VARIABLE = "EBBTIDE_VERIFY"


def enable(hook: Any) -> None:
    """Set up this process for `tune verify`: seed random generators and record the training steps.

    Python's generator is seeded now. numpy and torch are seeded when they are imported. Recording is set up
    when torch or DeepSpeed is imported. The compiler is made deterministic when it is imported.
    """
    job = json.loads(os.environ[VARIABLE])
    random.seed(job["seed"])
    hook.also("numpy.random", lambda module: module.seed(job["seed"]))
    hook.also("torch", lambda module: _in_torch(module, job, hook))
    hook.also("torch._inductor.config", lambda module: _in_compiler(module, job))
    hook.also("deepspeed", lambda module: _in_deepspeed(module, hook))


def _in_torch(torch: Any, job: dict[str, Any], hook: Any) -> None:
    torch.manual_seed(job["seed"])
    if _deterministic(job):
        # In mode "warn", the backward of attention would sum in any order without this flag.
        # `torch.use_deterministic_algorithms` would import torch's compiler, which takes over a second.
        torch.set_deterministic_debug_mode("error" if job.get("strict") else "warn")
        torch.utils.deterministic.fill_uninitialized_memory = False  # filling takes time and changes no result
    if "RANK" in os.environ or "LOCAL_RANK" in os.environ or _trains_alone():
        hook.own("ebbtide.runtime.verify.optimizers").watch(end)


def _in_compiler(config: Any, job: dict[str, Any]) -> None:
    if _deterministic(job) and hasattr(config, "deterministic"):
        config.deterministic = True


def _deterministic(job: dict[str, Any]) -> bool:
    return bool(job["deterministic"] or job.get("strict"))


def _trains_alone() -> bool:
    words = [sys.argv[0] if sys.argv else "", *getattr(sys, "orig_argv", [])]
    return not any(
        name in word
        for word in words
        for name in (
            "torchrun",
            "torch.distributed",
            "bin/deepspeed",
            "deepspeed.launcher",
            "bin/accelerate",
            "accelerate.commands",
        )
    )


def _in_deepspeed(deepspeed: Any, hook: Any) -> None:
    def build(*call: Any) -> Any:
        job = hook.own("ebbtide.runtime.verify.lines").current_job()
        hook.own("ebbtide.runtime.verify.optimizers").leave()
        return hook.own("ebbtide.runtime.frontdoor.recorded").initialize(*call, job, end)

    around_initialize(deepspeed, build)


def around_initialize(deepspeed: Any, build: Callable[..., Any]) -> None:
    """Let a function build each DeepSpeed engine of a script. It gets DeepSpeed's function and its arguments."""
    original = getattr(deepspeed, "initialize", None)
    if original is None:
        return
    # Not empty while an engine is being built, because a plan's engine is first built by DeepSpeed.
    inside: list[bool] = []

    @functools.wraps(original)
    def initialize(*args: Any, **kwargs: Any) -> Any:
        if inside:
            return original(*args, **kwargs)
        inside.append(True)
        try:
            return build(original, args, kwargs)
        finally:
            inside.clear()

    deepspeed.initialize = initialize


def end() -> None:
    """End the process immediately after the recorded steps, so that the script does no further work.

    All ranks first wait for each other, so that no rank is left in a collective call.
    """
    import torch.distributed as dist

    sys.stdout.flush()
    sys.stderr.flush()
    try:
        if dist.is_available() and dist.is_initialized():
            dist.barrier()  # no rank is left in a collective call
            dist.destroy_process_group()
    finally:
        os._exit(0)
