"""Whoever reads a partitioned parameter of ZeRO-3 waits for just its update."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from runtime.execution.executor import Executor
from runtime.zero.checks import private


class Gathers:
    """The gates before DeepSpeed's gathers, and how far it gathers ahead. Training thread only.

    Attributes:
        subgroup_of: ds_id -> subgroup.
        held_back: DeepSpeed's gather-ahead is off while updates run.
        shows: a ``state_dict()`` shows the small parameters. Not while DeepSpeed saves or loads a
            checkpoint, whose module state has them partitioned, as every other parameter.
    """

    def __init__(self, optimizer: Any, module: torch.nn.Module) -> None:
        self._optimizer = optimizer
        self.subgroup_of = {
            param.ds_id: index
            for index, group in enumerate(optimizer.fp16_groups)
            for param in group
        }
        self.held_back = False
        self.shows = True
        self._at_rest = False
        self._prefetch_elements = 0
        self._module = module
        self._stand_ins = _stand_ins(optimizer.persistent_parameters)
        self._undo: list[Callable[[], None]] = []

    def first_use(self) -> list[int]:
        """Place of each subgroup's first parameter among the model's, as it declares them."""
        parameters: list[Any] = list(self._module.parameters())
        place = {param.ds_id: i for i, param in enumerate(parameters)}
        first = [len(place)] * len(self._optimizer.fp16_groups)
        for ds_id, subgroup in self.subgroup_of.items():
            first[subgroup] = min(first[subgroup], place.get(ds_id, len(place)))
        return first

    def gate(self, wait: Callable[[Iterable[Any]], None]) -> Callable[[], None]:
        """``wait`` is called before every gather, with the parameters; returns an undo.

        A ``state_dict()`` of the model, or of a part of it, and a copy of it gather nothing: they
        show what is there, which with stock are the small parameters that stay gathered.
        """
        self._undo.append(private.gate_gathers(self._module.parameters(), wait))
        for parameter, _ in self._stand_ins:
            self._undo.append(_gate_copies(parameter, self._before_copy))
        for module in self._module.modules():
            # No bound method: a copy of the module would hold a copy of the whole optimizer.
            hook = module.register_state_dict_pre_hook(lambda *_: self._before_state_dict())
            self._undo.append(hook.remove)
        return self.open

    def open(self) -> None:
        """Takes the gates away."""
        self.blank()
        for undo in self._undo:
            undo()
        self._undo.clear()

    def _before_state_dict(self) -> None:
        # Gathers are collective: with several ranks this one may be alone in asking.
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
        """Until their first reader gathers them, the parameters that stock keeps gathered have
        their shape (a Trainer counts ``p.numel()`` after each step) and are NaN all over: who reads
        ``.data`` past all gates is not to take an old value for a new one.
        """
        self._at_rest = False
        for parameter, stand_in in self._stand_ins:
            if private.is_partitioned(parameter):
                parameter.data = stand_in

    def show_at_rest(self) -> None:
        """While nothing is in flight: values where `stand_in` has NaN, yet partitioned as before,
        so that a first forward is traced like every later one. A collective call.
        """
        self.show_persistent()
        for parameter, _ in self._stand_ins:
            value = parameter.data
            parameter.partition()
            parameter.data = value
        self._at_rest = True

    def blank(self) -> None:
        """They look as any other partitioned parameter, which is what checkpoints hold."""
        for parameter, stand_in in self._stand_ins:
            if private.is_partitioned(parameter):
                parameter.data = stand_in.new_empty(0)

    def show_persistent(self) -> None:
        """Gathers the parameters that stock keeps gathered between steps. A collective call."""
        small = [p for p in self._optimizer.persistent_parameters if private.is_partitioned(p)]
        if small:
            small[0].all_gather(small)

    def hold_back(self) -> None:
        """DeepSpeed gathers ahead of the current layer; that would wait for updates too early.

        With several ranks it must go on: gathers are collective then, so that what is gathered
        when may not depend on how far a rank's own updates are. They are gated all the same.
        """
        if self._optimizer.partition_count > 1:
            return
        for coordinator in private.coordinators(self._optimizer):
            if not self.held_back:
                self._prefetch_elements = private.prefetch_elements(coordinator)
            private.set_prefetch_elements(coordinator, 0)
        self.held_back = True

    def before(self, params: Iterable[Any], executor: Executor) -> None:
        """Waits for the subgroups of these parameters, which are about to be gathered."""
        ids = (getattr(param, "ds_id", None) for param in params)
        subgroups = {self.subgroup_of[i] for i in ids if i in self.subgroup_of}
        executor.wait_parameters(sorted(subgroups))
        if self.held_back and not executor.busy:
            for coordinator in private.coordinators(self._optimizer):
                private.set_prefetch_elements(coordinator, self._prefetch_elements)
            self.held_back = False


def _gate_copies(parameter: Any, wait: Callable[[], None]) -> Callable[[], None]:
    """``copy.deepcopy`` of the parameter, or of what holds it, calls ``wait`` first."""
    copy = type(parameter).__deepcopy__

    def __deepcopy__(memo: dict[int, Any]) -> Any:  # noqa: N807 - what `copy` looks for
        wait()
        return copy(parameter, memo)

    parameter.__deepcopy__ = __deepcopy__
    return lambda: delattr(parameter, "__deepcopy__")


def _stand_ins(parameters: Iterable[Any]) -> list[tuple[Any, torch.Tensor]]:
    """Each parameter with a NaN tensor of its shape; those of a kind share the memory of one."""
    largest: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}
    floating = [p for p in parameters if p.is_floating_point()]
    for parameter in sorted(floating, key=lambda p: -p.ds_numel):
        kind = parameter.dtype, parameter.device
        if kind not in largest:
            dtype, device = kind
            nan = torch.full((parameter.ds_numel,), float("nan"), dtype=dtype, device=device)
            largest[kind] = nan
    return [(p, largest[p.dtype, p.device][: p.ds_numel].view(p.ds_shape)) for p in floating]
