"""The hook that runs a function after each optimizer step of a DeepSpeed engine."""

import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any

from deepspeed.runtime.pipe.engine import PipelineEngine


def is_pipeline(engine: Any) -> bool:
    """Return whether a DeepSpeed engine is a pipeline engine, which trains by calls of ``train_batch`` only."""
    return isinstance(engine, PipelineEngine)


def call_after_step(engine: Any, call: Callable[[], None]) -> None:
    """Call a function after each whole optimizer step of a DeepSpeed engine.

    The step counter and the learning-rate schedule match the optimizer state only after the engine's step. They do not
    match yet when the optimizer's own step returns. DeepSpeed's pipeline engine has no ``step``: each call of its
    ``train_batch`` is a step.
    """
    name = "train_batch" if is_pipeline(engine) else "step"
    stock, held = getattr(engine, name), weakref.proxy(engine)

    @wraps(stock)
    def step(*args: Any, **kwargs: Any) -> Any:
        before = held.global_steps
        result = stock(*args, **kwargs)
        if held.global_steps != before:
            call()
        return result

    setattr(engine, name, step)
