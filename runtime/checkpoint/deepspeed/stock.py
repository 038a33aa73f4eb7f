"""Background checkpoints of an engine that runs DeepSpeed's own optimizer without a plan.

All optimizer state is protected together: a step waits until the checkpoint has read or copied all of it.
"""

from collections.abc import Callable
from typing import Any

import torch
from ebbtide.runtime.checkpoint.live_state import LiveState


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
