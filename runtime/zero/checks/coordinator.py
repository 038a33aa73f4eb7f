"""DeepSpeed's coordinator of ZeRO-3 parameters, with less Python for each module."""

from __future__ import annotations

import ast
import hashlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero import parameter_offload
from deepspeed.runtime.zero import partitioned_param_coordinator as stock
from deepspeed.utils import z3_leaf_module
from ebbtide.runtime.zero.checks import private

# Digests of `_digest`, by DeepSpeed's versions: what `PartitionedParameterCoordinator` and `LeanHooks` do as this code
# does it.
KNOWN = {"880e4967f09bd44e": ("0.19.6", "0.19.7", "0.19.8")}


@cache
def _digest() -> str:
    """Return a digest of the DeepSpeed code whose work is done here in another way, without comments and decorators."""
    texts = []
    for cls in (stock.PartitionedParameterCoordinator, parameter_offload.DeepSpeedZeRoOffload):
        tree = ast.parse(inspect.getsource(cls))
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                node.decorator_list = []  # among others, marks for profilers and compilers
        texts.append(ast.dump(tree))
    return hashlib.sha256("".join(texts).encode()).hexdigest()[:16]


@dataclass(slots=True, eq=False)
class Use:
    """A module with DeepSpeed's hooks, and how far its forward and backward are.

    Attributes:
        leaf: True if DeepSpeed fetches the parameters of the whole module at once (``set_z3_leaf_modules``).
        outputs: Outputs of forwards that backward has not reached yet.
        inputs: Inputs of the latest forward that backward has not left yet.
    """

    module: Any
    leaf: bool
    ident: int
    outputs: int = 0
    inputs: int = 0

    @classmethod
    def of(cls, module: Any) -> Use:
        return cls(module, z3_leaf_module(module), module.ds_id)

    def params(self) -> list[Any]:
        """Return the parameters that DeepSpeed fetches for the module, which may change between two forwards."""
        own, others = vars(self.module)["_parameters"], vars(self.module)["_external_params"]
        if not own and not others:
            return []
        there = [param for param in dict.values(own) if param is not None]
        return list(dict.fromkeys([*there, *others.values()])) if others or len(there) > 2 else there


class PartitionedParameterCoordinator(stock.PartitionedParameterCoordinator):
    """DeepSpeed's coordinator, which does the same with less Python while modules run in the order that it recorded.

    The state is DeepSpeed's, so that its own methods go on from any point: those of the base class run while the order
    is recorded, when another module comes than the recorded one, and for leaf modules. It has the name of the base
    class so that the names of private attributes are the same.

    Attributes:
        before: Function that is called with a module's parameters before they are fetched, or None.
        after: Function that is called after a module's parameters have been fetched, or None.
    """

    before: Callable[[list[Any]], None] | None
    after: Callable[[], None] | None
    _to_release: dict[tuple[int, int], frozenset[int]]

    def expects(self, use: Use) -> bool:
        """Return whether a module is the next one of the recorded order."""
        order, step = self.__submodule_order, self.__step_id
        return self.is_complete_trace() and step < len(order) and order[step] is use.module and not use.leaf

    def may_release(self, use: Use, *, forward: bool) -> bool:
        return self.is_complete_trace() and not use.leaf and (forward or bool(self.__active_backward_submodules))

    def fetch(self, use: Use, *, forward: bool) -> None:
        """Do what ``fetch_sub_module`` does for the next module of the recorded order."""
        params = use.params()
        if self.before is not None:
            self.before(params)
        if not forward:
            self.__active_backward_submodules[use.ident] = use.module
        missing = [param for param in params if param.ds_status is _PARTITIONED]
        if missing:
            self.__all_gather_params(missing, forward)
        for param in params:
            param.ds_active_sub_modules.add(use.ident)
        if forward and self.__active_backward_submodules and torch._C._current_graph_task_id() != -1:
            owner = next(reversed(self.__active_backward_submodules.values()))
            for param in params:
                if not param.requires_grad:
                    stock.update_recompute_parameters(owner, param)
        self._wait(params)
        self._ask_ahead(use, params, forward)
        self.__step_id += 1
        if self.after is not None:
            self.after()

    def release(self, use: Use, *, forward: bool) -> None:
        """Do what ``release_sub_module`` does while the recorded order is in use."""
        params = use.params()
        chosen = self._released(use) if params else frozenset[int]()
        if not forward:
            again = use.module.ds_recompute_parameters
            if again:
                chosen |= {param.ds_id for param in again if not param.ds_persist}
                params = list(dict.fromkeys([*params, *again]))
                again.clear()
            self.__active_backward_submodules.pop(use.ident, None)
        for param in params:
            active = param.ds_active_sub_modules
            active.discard(use.ident)
            if param.ds_id in chosen and not active and not param.is_external_param and param.ds_status is _AVAILABLE:
                private.free(param)
                self.__n_available_params -= param.ds_numel

    def _released(self, use: Use) -> frozenset[int]:
        key = use.ident, self.__step_id
        found = self._to_release.get(key)
        if found is None:
            chosen = self.__params_to_release(use.module, self.__step_id)
            found = self._to_release[key] = frozenset(chosen)
        return found

    def _wait(self, params: list[Any]) -> None:
        arriving = self.__inflight_param_registry.data
        coming = [param for param in params if param in arriving] if arriving else ()
        device = get_accelerator()
        if coming:
            events = self.__ongoing_fetch_events
            with device.stream(self.__allgather_stream):
                for param in coming:
                    while events and events[0].query():
                        events.popleft()
                    if len(events) > self.__max_ongoing_fetch_events:
                        events.popleft().synchronize()
                    arriving.pop(param).wait(handle_dependency=True)
                    if not device.handles_memory_backpressure():
                        event = device.Event()
                        event.record()
                        events.append(event)
        for param in params:
            assert param.ds_status is _AVAILABLE, param.ds_summary()
        if not device.resolves_data_dependency():
            device.current_stream().wait_stream(self.__allgather_stream)

    def _ask_ahead(self, use: Use, params: list[Any], forward: bool) -> None:
        queue, seen, step = self.__param_queue, self.__most_recent_step_id_param_fetched_for, self.__step_id
        awaited = {param for param in params if seen[param] < step}
        popped = set[Any]()
        while queue and len(popped) < len(awaited):
            following = queue.popleft()
            seen[following.param] = following.step_id_last_used_at
            popped.add(following.param)
        if popped != awaited:
            raise RuntimeError(
                f"tracing error at step {step}: module {use.ident} must use the parameters that the recorded order "
                f"names next ({sorted(p.ds_id for p in popped)}), but got {sorted(p.ds_id for p in awaited)}"
            )
        most = self.__prefetch_bucket_sz
        if most > 0:
            most = min(self.__max_n_available_params - self.__n_available_params, most)
        wanted: dict[Any, None] = {}
        asked = 0
        while asked < most and queue:
            following = queue.popleft()
            param = following.param
            if seen[param] < following.step_id_last_used_at:
                seen[param] = following.step_id_last_used_at
            if param.ds_status is _PARTITIONED and param not in wanted:
                wanted[param] = None
                asked += param.ds_numel
        if wanted:
            self.__all_gather_params(wanted, forward)


_PARTITIONED, _AVAILABLE = stock.ZeroParamStatus.NOT_AVAILABLE, stock.ZeroParamStatus.AVAILABLE


def quickened(
    optimizer: Any, before: Callable[[list[Any]], None] | None, after: Callable[[], None] | None
) -> PartitionedParameterCoordinator | None:
    """Make DeepSpeed's coordinator of a ZeRO-3 optimizer quicker, and return it.

    None if its code is not the one that is known, or if the optimizer uses what is not known here: quantized
    parameters, secondary partitions (ZeRO++), a drive, ZenFlow, or DeepSpeed's own profiler.
    """
    coordinator = optimizer.parameter_offload.get_param_coordinator()
    if _digest() not in KNOWN:
        return None
    odd = (
        # After a failed switch of plans it may be quick already.
        type(coordinator) not in (stock.PartitionedParameterCoordinator, PartitionedParameterCoordinator),
        stock.ENABLE_PROFILER,
        optimizer.zenflow,
        not private.frees_only(optimizer),
        coordinator.zero_quantized_weights,
        coordinator.zero_quantized_nontrainable_weights,
        coordinator.fast_sharding_for_leaf_module,
        any(map(private.is_swapped, optimizer.parameter_offload.module.parameters())),
    )
    if any(odd):
        return None
    coordinator.before, coordinator.after, coordinator._to_release = before, after, {}
    coordinator.__class__ = PartitionedParameterCoordinator
    return coordinator


def begins(coordinator: Any, use: Use, *, forward: bool) -> None:
    """Fetch a module's parameters before its forward or backward, and ask for those of later modules."""
    if type(coordinator) is PartitionedParameterCoordinator and coordinator.expects(use):
        coordinator.fetch(use, forward=forward)
        return
    with private.tensors_for_training():
        coordinator.trace_prologue(use.module)
        if coordinator.is_record_trace():
            coordinator.record_module(use.module)
        coordinator.fetch_sub_module(use.module, forward=forward)


def ends(coordinator: Any, use: Use, *, forward: bool) -> None:
    """Release a module's parameters after its forward or backward, except those that are used again soon."""
    quick = type(coordinator) is PartitionedParameterCoordinator and not torch.is_inference_mode_enabled()
    if quick and coordinator.may_release(use, forward=forward):
        coordinator.release(use, forward=forward)
        return
    with private.tensors_for_training():
        coordinator.release_sub_module(use.module, forward=forward)


def slowed(optimizer: Any) -> None:
    """Make DeepSpeed's coordinator what it was (see `quickened`)."""
    optimizer.parameter_offload.get_param_coordinator().__class__ = stock.PartitionedParameterCoordinator
