"""The installation of ebbtide's checkpoint engine in a DeepSpeed engine."""

import logging
import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any

from ebbtide.runtime.checkpoint.deepspeed.engine import LazyCheckpointEngine
from ebbtide.runtime.checkpoint.deepspeed.steps import call_after_step
from ebbtide.runtime.checkpoint.deepspeed.stock import StockState
from ebbtide.runtime.checkpoint.errors import CheckpointError
from ebbtide.runtime.checkpoint.live_state import LiveState
from ebbtide.runtime.checkpoint.trainers.bystanders import ours, watch
from ebbtide.runtime.checkpoint.trainers.ending import finish_at_sigterm
from ebbtide.runtime.hardware.launcher import one_node, rank
from ebbtide.simulator.plan import CheckpointPlan

logger = logging.getLogger("ebbtide.checkpoint")


def install(
    engine: Any,
    checkpoint_plan: CheckpointPlan,
    live_state: LiveState | None = None,
    after_step: list[Callable[[], None]] | None = None,
    **options: Any,
) -> LazyCheckpointEngine:
    """Make a DeepSpeed engine save and load through ebbtide. Return the checkpoint engine.

    Args:
        engine: The engine that ``deepspeed.initialize`` returned.
        checkpoint_plan: Settings of checkpoints: their interval, host memory for copies, a limit on the
            write rate, and what a save does while an earlier one is still being written.
        live_state: The runtime's registry of optimizer state. None if the engine runs DeepSpeed's own
            optimizer. In that case the optimizer's ``step`` is wrapped, so that each step waits until a
            checkpoint in progress has read the state that the step overwrites.
        after_step: The runtime's list of functions to call after each step. One function is added to it. If
            None, the engine's step is wrapped instead (`call_after_step`).
        options: ``files``, ``plan_digest``, ``block_bytes`` of `LazyCheckpointEngine`.

    Raises:
        CheckpointError: The engine keeps state in a place that is not supported.
    """
    _refuse_unsupported(engine)
    if checkpoint_plan.lacks_dir and rank() == 0:
        logger.warning(
            "no checkpoint is written automatically, because the plan has checkpoint.interval_steps %d but no "
            "checkpoint.dir. Only saves of the script or its trainer are written. For automatic checkpoints, plan with "
            '`tune plan --checkpoint-dir FOLDER`, or set "dir" and "interval_steps" under "ebbtide.checkpoint" in '
            "DeepSpeed's config",
            checkpoint_plan.interval_steps,
        )
    live = live_state if live_state is not None else LiveState()
    lazy = LazyCheckpointEngine(engine, checkpoint_plan, live, **options)
    _wrap(engine, "save_checkpoint", lazy.save_checkpoint)
    _wrap(engine, "load_checkpoint", lazy.load_checkpoint)
    _wrap(engine, "destroy", _finish_first(lazy))
    if live_state is None and engine.optimizer is not None:
        stock = StockState(engine, live)
        lazy._before_save = stock.register
        _wrap(engine.optimizer, "step", stock.step)
    held = weakref.proxy(engine)
    on_step = lambda: lazy.on_step(held.global_steps)
    if after_step is None:
        call_after_step(engine, on_step)
    else:
        after_step.append(on_step)
    previous, engine.checkpoint_engine = engine.checkpoint_engine, lazy
    if previous is not None and previous.is_decoupled():
        previous.cleanup()
    watch()
    finish_at_sigterm(lazy)
    return lazy


def _refuse_unsupported(engine: Any) -> None:
    if engine.zero_nvme_offload_optimizer():
        raise CheckpointError(
            "the lazy checkpoint engine needs the optimizer state in memory, but got "
            "zero_optimization.offload_optimizer.device=nvme: set it to cpu"
        )
    if engine.use_node_local_storage() and not one_node():
        raise CheckpointError(
            "checkpoints must go to a folder that all ranks share, but got "
            "checkpoint.use_node_local_storage=true: set it to false and save to shared storage"
        )


def _wrap(owner: Any, name: str, replacement: Callable[..., Any]) -> None:
    original = getattr(owner, name)

    @wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        with ours():
            return replacement(original, *args, **kwargs)

    setattr(owner, name, method)


def _finish_first(lazy: LazyCheckpointEngine) -> Callable[..., None]:

    def destroy(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        try:
            lazy.close()
        finally:
            original(*args, **kwargs)

    return destroy
