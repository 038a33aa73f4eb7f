"""Hooks on reads of ZeRO-3 parameters. Code that reads parameters waits for the updates of these parameters only."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from ebbtide.runtime.zero.checks import private
from ebbtide.runtime.zero.collective import CollectiveGathers
from ebbtide.runtime.zero.fetches import Fetches, Partitions
from ebbtide.runtime.zero.hooks.lean import LeanHooks
from ebbtide.runtime.zero.one_rank.views import Views

Fetch = Callable[[list[Any], Callable[[list[Any]], private.Handle]], private.Handle | None]


class Gathers:
    """The hooks on DeepSpeed's gathers of parameters. They make a gather wait for the updates of its parameters.

    With a single rank, no gather is needed, and the hooks copy parameters to the GPU instead. Only the training thread
    uses this object.

    Attributes:
        parameters: All ZeRO-3 parameters of the model.
        partitions: A table of the memory (host or GPU) that holds each parameter's partition.
        views: The hooks that take the places of DeepSpeed's on a single rank with all parameters in GPU memory.
        lean: The hooks that take the places of DeepSpeed's in all other cases.
        together: The object that starts gathers in the same order on all ranks.
        shows: True if a ``state_dict()`` on a single rank first gathers the small parameters, which stock DeepSpeed
            keeps gathered between steps. False while DeepSpeed saves or loads a checkpoint, because all parameters must
            be partitioned during this time.
        moved: True if partitions have moved to other memory, and gathered parameters may still refer to the old memory.
            `show_anew` makes them refer to the new memory.
    """

    def __init__(self, optimizer: Any, module: torch.nn.Module) -> None:
        self._optimizer = optimizer
        self.parameters = [param for param in module.parameters() if hasattr(param, "ds_id")]
        self.partitions = Partitions(optimizer)
        in_flight: Any = module.ds_inflight_param_registry
        self.together = CollectiveGathers(self.partitions, optimizer.persistent_parameters, in_flight)
        self.views = Views(optimizer, self.partitions, self.parameters)
        several = optimizer.partition_count > 1
        begins, begun = self.together.module_begins, self.together.module_has_begun
        self.lean = LeanHooks(optimizer, *((begins, begun) if several else (None, None)))
        self.shows = True
        self.moved = False
        self._at_rest = False
        self._module = module
        self._stand_ins = _stand_ins(optimizer.persistent_parameters)
        self._undo: list[Callable[[], None]] = []

    def gate(self) -> None:
        """Make every ZeRO-3 gather wait for the updates of its parameters, until `open` is called.

        Stock DeepSpeed keeps small parameters gathered after a step. Under a plan they may be partitioned, so that a
        ``state_dict()`` or a copy of the model would lack their values. On a single rank, this method therefore also
        makes every ``state_dict()`` and every copy gather the small parameters first. On several ranks it does not,
        since all ranks would have to take part in the gather.
        """
        self._undo.append(gate_gathers(self._module.parameters(), self._before, self._fetch))
        self._undo.append(private.wait_one_by_one(self._module))
        if self._optimizer.partition_count > 1:
            begins, begun = self.together.module_begins, self.together.module_has_begun
            self._undo.append(private.around_fetches(self._optimizer, begins, begun))
        for parameter, _ in self._stand_ins:
            self._undo.append(_gate_copies(parameter, self._before_copy))
        for module in self._module.modules():
            # No bound method, because a copy of the module would then include a copy of the whole optimizer.
            hook = module.register_state_dict_pre_hook(lambda *_: self._before_state_dict())
            self._undo.append(hook.remove)
        self.choose_hooks()

    def choose_hooks(self) -> None:
        """Put the hooks that the present plan needs in the places of DeepSpeed's. Call this after a switch of plans."""
        if self.views.fits():
            self.lean.end()
        self.views.choose()
        if not self.views.on:
            self.lean.begin()

    def open(self) -> None:
        """Remove all hooks that make DeepSpeed's parameter gathers wait for updates."""
        self.views.end()
        self.lean.end()
        self.blank()
        for undo in self._undo:
            undo()
        self._undo.clear()

    def _before_state_dict(self) -> None:
        # Gathers are collective, and with several ranks only this rank may call state_dict.
        if not self.shows:
            return
        if self._optimizer.partition_count == 1:
            self.show_persistent()
        elif not self._at_rest:
            self.blank()

    def _before_copy(self) -> None:
        if self._optimizer.partition_count == 1:
            self.show_persistent()

    def stand_in(self) -> None:
        """Give NaN tensors of the right shape to the small parameters, which stock DeepSpeed keeps gathered
        after a step.

        The parameters get their values when some code gathers them. A Trainer counts ``p.numel()`` after
        each step, which needs the shape. Code that reads ``.data`` without a gather must not mistake an old
        value for a new one, so the values are NaN.
        """
        self._at_rest = False
        for parameter, stand_in in self._stand_ins:
            if private.is_partitioned(parameter):
                parameter.data = stand_in

    def show_anew(self) -> None:
        """Make gathered parameters use the new memory of their partitions, after the partitions have moved."""
        if self._optimizer.partition_count == 1:
            self._show_anew()
        self.moved = False

    def _show_anew(self) -> None:
        parameters: list[Any] = list(self._module.parameters())
        shown = [p for p in parameters if not private.is_partitioned(p)]
        if shown:
            shown[0].partition(shown)
            shown[0].all_gather(shown)
        elif self._at_rest:
            self.show_at_rest()

    def show_at_rest(self) -> None:
        """Gather the small ZeRO-3 parameters, so that their ``.data`` has the present values.

        Before this call, their ``.data`` has no values: it is NaN after a step, because updates may still be running,
        and empty while a checkpoint is saved or loaded. All ranks must call this method, at a time when no update runs.
        DeepSpeed's status of the parameters remains "partitioned", so that DeepSpeed gathers them again in each
        forward.
        """
        self.show_persistent()
        for parameter, _ in self._stand_ins:
            value = parameter.data
            parameter.partition()
            parameter.data = value
        self._at_rest = True

    def blank(self) -> None:
        """Make small ZeRO-3 parameters empty, like all other partitioned parameters, as DeepSpeed's checkpoints
        require.
        """
        for parameter, stand_in in self._stand_ins:
            if private.is_partitioned(parameter):
                parameter.data = stand_in.new_empty(0)

    def show_persistent(self) -> None:
        """Gather the small parameters that stock DeepSpeed keeps gathered between steps."""
        # All ranks must call this method.
        private.gather(self._optimizer.persistent_parameters)

    def _before(self, params: Iterable[Any]) -> None:
        own = self._optimizer._ebbtide
        if own.closed:
            return
        params = [param for param in params if hasattr(param, "ds_id")]
        own.executor.wait_parameters(self.partitions.subgroups(params))
        if self._optimizer.partition_count > 1:
            self.together.read(params)
        self.views.gathered(params)

    def _fetch(self, params: list[Any], gather: Callable[[list[Any]], private.Handle]) -> Fetches | None:
        # No update of the parameters is waited for here, because DeepSpeed also requests parameters that only later
        # modules need. None: DeepSpeed has to gather the parameters itself, immediately.
        own = self._optimizer._ebbtide
        if own.closed:
            return None
        if self._optimizer.partition_count == 1:
            return self.partitions.fetch(params, own.executor)
        if any(map(private.is_swapped, params)):
            return None
        return self.together.fetch(params, gather, own.executor)


def _gate_copies(parameter: Any, wait: Callable[[], None]) -> Callable[[], None]:
    copy = type(parameter).__deepcopy__

    def __deepcopy__(memo: dict[int, Any]) -> Any:  # noqa: N807 - what `copy` looks for
        wait()
        return copy(parameter, memo)

    parameter.__deepcopy__ = __deepcopy__
    return lambda: delattr(parameter, "__deepcopy__")


def _stand_ins(parameters: Iterable[Any]) -> list[tuple[Any, torch.Tensor]]:
    largest: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}
    floating = [p for p in parameters if p.is_floating_point()]
    for parameter in sorted(floating, key=lambda p: -p.ds_numel):
        kind = parameter.dtype, parameter.device
        if kind not in largest:
            dtype, device = kind
            nan = torch.full((parameter.ds_numel,), float("nan"), dtype=dtype, device=device)
            largest[kind] = nan
    return [(p, largest[p.dtype, p.device][: p.ds_numel].view(p.ds_shape)) for p in floating]


def gate_gathers(parameters: Iterable[Any], gate: Callable[[Iterable[Any]], None], fetch: Fetch) -> Callable[[], None]:
    """Install two functions that are called before DeepSpeed gathers parameters. Return a function that removes them.

    All code that reads a partitioned parameter (forward, GatheredParameters, a state_dict) calls ``param.all_gather``
    or ``param.all_gather_coalesced``. Modules call the latter for their own parameters and for those of later modules,
    and wait for the handle that it returns.

    Args:
        gate: Function that is called with the parameters before DeepSpeed gathers them, for example to wait for their
            updates.
        fetch: Function that may bring the parameters to the GPU itself. ``all_gather_coalesced`` calls it first, with
            the parameters and DeepSpeed's own gather. If it returns a handle, DeepSpeed gets this handle, and ``gate``
            is not called. If it returns None, ``gate`` is called, and then DeepSpeed gathers.
    """
    undo: list[tuple[Any, Any, Any]] = []
    for parameter in parameters:
        if not hasattr(parameter, "all_gather_coalesced"):
            continue
        gather, coalesced = parameter.all_gather, parameter.all_gather_coalesced
        undo.append((parameter, gather, coalesced))
        parameter.all_gather = _gated_gather(parameter, gather, gate)
        parameter.all_gather_coalesced = _gated_coalesced(coalesced, gate, fetch)

    def restore() -> None:
        for parameter, gather, coalesced in undo:
            parameter.all_gather, parameter.all_gather_coalesced = gather, coalesced

    return restore


def _gated_gather(
    parameter: Any, gather: Callable[..., Any], gate: Callable[[Iterable[Any]], None]
) -> Callable[..., Any]:
    @private.tensors_for_training()
    def all_gather(param_list: Any = None, *args: Any, **kwargs: Any) -> Any:
        if param_list is None and private.stands_in(parameter):
            private.forget_read(parameter)
        gate([parameter] if param_list is None else param_list)
        return gather(param_list, *args, **kwargs)

    return all_gather


def _gated_coalesced(
    gather: Callable[..., Any], gate: Callable[[Iterable[Any]], None], fetch: Fetch
) -> Callable[..., Any]:
    @private.tensors_for_training()
    def all_gather_coalesced(params: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
        params = list(params)
        handle = fetch(params, lambda some: gather(some, *args, **kwargs))
        if handle is not None:
            return handle
        gate(params)
        return gather(params, *args, **kwargs)

    return all_gather_coalesced
