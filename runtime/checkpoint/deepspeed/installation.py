"""The installation of ebbtide's checkpoint engine in a DeepSpeed engine, also in one that runs DeepSpeed's own
optimizer without a plan.
"""

import logging
import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from deepspeed.runtime.pipe.engine import PipelineEngine
from ebbtide.runtime.checkpoint.deepspeed.engine import LazyCheckpointEngine
from ebbtide.runtime.checkpoint.errors import CheckpointError
from ebbtide.runtime.checkpoint.live_state import LiveState
from ebbtide.runtime.checkpoint.trainers.bystanders import ours, watch
from ebbtide.runtime.checkpoint.trainers.ending import finish_at_sigterm
from ebbtide.runtime.hardware.launcher import one_node, rank
from ebbtide.simulator.plan import CheckpointPlan


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


class StockState:
    """The state of DeepSpeed's own optimizer, for checkpoints. While a checkpoint still reads this state, the
    optimizer's step waits.

    It works with any optimizer that keeps its state in ``optimizer.state``, and its fp32 masters as parameters
    or in ``fp32_partitioned_groups_flat`` (ZeRO-3). Each master with its moments counts as one subgroup.
    """

    def __init__(self, engine: Any, live: LiveState) -> None:
        self._optimizer = engine.optimizer
        self._live = live
        self._count = 0

    def register(self) -> None:
        """Register the tensors of DeepSpeed's optimizer state again before a save.

        Loading a checkpoint may have replaced the tensors that were registered before.
        """
        masters = self._masters()
        inner = getattr(self._optimizer, "optimizer", self._optimizer)
        tensors = {}
        for number, master in enumerate(masters):
            state = inner.state.get(master, {})
            held = [master.detach(), *(v for v in state.values() if torch.is_tensor(v))]
            tensors[number] = [t for t in held if t.numel() > 1 and t.is_contiguous()]
        self._live.register_all(tensors)
        self._count = len(masters)

    def _masters(self) -> list[torch.Tensor]:
        flat = getattr(self._optimizer, "fp32_partitioned_groups_flat", None)
        if flat is not None:
            return [t for t in flat if t is not None]
        inner = getattr(self._optimizer, "optimizer", self._optimizer)
        return [p for group in inner.param_groups for p in group["params"]]

    def step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run ``optimizer.step``."""
        # If a checkpoint is in progress, first wait until it has read or copied the state that the step overwrites.
        for subgroup in range(self._count):
            self._live.before_update(subgroup)
        return original(*args, **kwargs)


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
