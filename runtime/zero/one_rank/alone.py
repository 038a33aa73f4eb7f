"""DeepSpeed's own optimizers on a single rank without what a plan spares this rank, so that a profile can time both."""

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from ebbtide.runtime.zero.checks import private
from ebbtide.runtime.zero.one_rank.views import Views


class OneRankStage3(DeepSpeedZeroOptimizer_Stage3):
    """DeepSpeed's ZeRO-3 optimizer with what a plan spares one rank: hooks on modules, and collectives of one rank.

    Gradients reach host memory, and updates run, as under DeepSpeed alone. Results are bit-identical.
    """

    _alone: "_ViewsOfOneRank"

    def _DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads(  # noqa: N802 - DeepSpeed's private method
        self, params: list[Any], dtype: torch.dtype
    ) -> list[torch.Tensor]:
        gradients = private.own_sums(self, params, dtype)
        if gradients is None:
            return super()._DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads(params, dtype)
        return gradients

    def backward_epilogue(self, *args: Any, **kwargs: Any) -> None:
        super().backward_epilogue(*args, **kwargs)
        self._alone.backward_ends()

    def _get_norm_groups(self) -> list[torch.Tensor]:
        if not self.offload_optimizer:
            return super()._get_norm_groups()
        norms = {key: float(norm) for key, norm in self.norm_for_param_grads.items()}
        return [private.group_norm(self, group, norms) for group in self.fp16_groups]

    def _partition_all_parameters(self) -> None:
        private.release_all(self, self._alone.parameters)
        self._alone.stepped()


class UnreducedFlat(DeepSpeedZeroOptimizer):
    """DeepSpeed's ZeRO-1 or 2 optimizer without reductions over its only rank. Results are bit-identical."""

    _alone = False  # True if this backward needs no reduction over ranks

    def setup_buckets(self) -> None:
        if not self.ready_for_gradients:  # by the backward's first gradient
            self._alone = private.reduces_nothing(self)
            with private.without_buffers(self) if self._alone else nullcontext():
                super().setup_buckets()

    def reduce_independent_p_g_buckets_and_remove_grads(self, param: Any, i: int) -> None:
        """Add a gradient to the bucket. On one rank, the gradient stays where autograd has computed it."""
        if not self._alone:
            super().reduce_independent_p_g_buckets_and_remove_grads(param, i)
        elif param.numel():
            private.add_to_bucket(self, param, i)

    def average_tensor(self, tensor: torch.Tensor, communication_data_type: torch.dtype) -> None:
        """Reduce a bucket of gradients over the ranks, as DeepSpeed does. On one rank, only let streams wait."""
        if not self._alone:
            super().average_tensor(tensor, communication_data_type)
            return
        bucket = self.ipg_buckets[communication_data_type]
        params, bucket.params = bucket.params, []
        try:
            super().average_tensor(tensor.narrow(0, 0, 0), communication_data_type)
        finally:
            bucket.params = params


def take_hooks_off(engine: Any) -> bool:
    """Train with DeepSpeed alone, but without its hooks on modules and without one rank's collectives, until
    `put_hooks_back`. Return whether that is so.

    It cannot be so with several ranks, with parameters in host memory, or with a DeepSpeed that was not tested. Call
    this function between two steps.
    """
    optimizer = engine.optimizer
    if type(optimizer) is DeepSpeedZeroOptimizer:
        try:
            private.check_members(optimizer)
        except private.UnsupportedDeepSpeedError:
            return False
        optimizer.__class__ = UnreducedFlat
        return True
    if type(optimizer) is not DeepSpeedZeroOptimizer_Stage3 or not private.only_rank(optimizer):
        return False
    views = _ViewsOfOneRank(optimizer, [param for param in engine.module.parameters() if hasattr(param, "ds_id")])
    views.choose()
    if views.on:
        optimizer._alone, optimizer.__class__ = views, OneRankStage3
    return views.on


def put_hooks_back(engine: Any) -> None:
    """Undo `take_hooks_off`. DeepSpeed then records the order of modules anew, which lengthens the next step."""
    optimizer = engine.optimizer
    if type(optimizer) is UnreducedFlat:
        optimizer.__class__ = DeepSpeedZeroOptimizer
        optimizer.__dict__.pop("_alone", None)
        return
    optimizer.__class__ = DeepSpeedZeroOptimizer_Stage3
    optimizer._alone.end()
    del optimizer._alone


class _ViewsOfOneRank(Views):
    """The views of a rank whose parameters no update writes outside of ``step()``."""

    def __init__(self, optimizer: Any, parameters: list[Any]) -> None:
        super().__init__(optimizer, None, parameters)
        self.trace = []  # DeepSpeed's order of modules is known

    def _on_host(self, param: Any) -> bool:
        del param
        return False

    def _subgroups(self, params: Iterable[Any]) -> list[int]:
        del params
        return []

    def _wait(self, subgroups: list[int]) -> None:
        pass
