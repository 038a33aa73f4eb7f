"""Hooks on reads of ZeRO-3 parameters. Code that reads parameters waits for the updates of these parameters only.

Ranks that launch gathers in different orders hang. The orders could differ because a gather waits for the updates of
its parameters, and updates end earlier on some ranks than on others. `CollectiveGathers` launches them in one order.
"""

import threading
from collections.abc import Callable, Iterable, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from ebbtide.runtime.devices.lane import Completion
from ebbtide.runtime.execution.executor import Executor
from ebbtide.runtime.zero.checks import private
from ebbtide.runtime.zero.fetches import Fetches, Partitions
from ebbtide.runtime.zero.hooks.lean import LeanHooks
from ebbtide.runtime.zero.one_rank.views import Views

Gather = Callable[[list[Any]], private.Handle]


class CollectiveGathers:
    """A launcher of ZeRO-3's parameter gathers in an order that is the same on all ranks.

    A gather waits for the updates of its parameters. If each rank launched a gather as soon as its own updates had
    ended, two ranks could launch gathers in different orders and hang. So what is launched, and when, depends only on
    the modules that run and on DeepSpeed's requests:

    - When a module begins, those of its parameters that are not gathered yet, in one gather. It also brings all small
      parameters of their subgroups if stock DeepSpeed would have gathered these in one call at the end of a step. They
      wait for the same updates, so that no gather waits longer for them.
    - After the module has its parameters, in one gather, all parameters that DeepSpeed has requested for later modules
      and that need not wait for an update on any rank. All ranks know this of a subgroup after the first gather from
      it, because every rank waited for the subgroup's update before it took part. On a GPU the host thread runs a
      module ahead, so that the gathers run during the previous module.

    On a device without streams nothing is gathered ahead, because the calling thread would wait while parameters are
    copied from host memory to the device.

    The training thread calls the methods, and autograd's thread during backward.

    Attributes:
        awaited: Subgroups without any gather since their latest update was launched. All ranks have the same set.
        own_precision: True if the next gather of small parameters keeps their own dtype, because stock DeepSpeed would
            have gathered them at the end of a step, or after a save or load of a checkpoint. False if the gather uses
            the dtype that forward computes in, because stock DeepSpeed would gather them in forward.
    """

    def __init__(self, partitions: Partitions, small: Iterable[Any], in_flight: MutableMapping[Any, Any]) -> None:
        """Create the launcher with DeepSpeed's ``persistent_parameters`` and ``ds_inflight_param_registry``."""
        self._partitions, self._in_flight = partitions, in_flight
        self._small: dict[int | None, list[Any]] = {}  # by subgroup. Parameters that are not trained have None
        for param in small:
            self._small.setdefault(partitions.subgroup_of.get(param.ds_id), []).append(param)
        self._apart = set[int | None]()  # subgroups whose small parameters come with their next gather
        self.awaited = set[int]()
        self.own_precision = False
        self._due = frozenset[int]()  # ds_ids of the parameters of the module that begins
        self._begun = set[int]()  # ds_ids of parameters that were used before it, since own_precision was set
        self._waiting: dict[Any, _Gathering] = {}  # requested and not launched yet, in the order of requests
        self._ahead = False  # False if none of those that wait can run ahead
        self._lock = threading.RLock()

    def stay_gathered(self, stay: bool) -> None:
        """Set the precision of the next gathers of small parameters to the precision that stock DeepSpeed would use."""
        # After a step or a checkpoint, stock DeepSpeed gathers small parameters in their own precision, and keeps them
        # gathered.
        self.own_precision, self._due = stay, frozenset()
        self._begun.clear()
        # If stock DeepSpeed gathers them in forward, it notes which of them a module reads from another module.
        self._apart = set(self._small) if stay else set()

    def updates_launched(self) -> None:
        """Record that an update of every subgroup has been launched. Later parameter gathers wait for the updates."""
        self.awaited = set(self._partitions.subgroup_of.values())

    def gathered(self, params: list[Any]) -> None:
        """Record that all ranks have waited for the updates of the given parameters.

        Later gathers of these parameters' subgroups then do not wait.
        """
        if self.awaited:
            before = len(self.awaited)
            self.awaited -= set(self._partitions.subgroups(params))
            self._ahead |= len(self.awaited) < before

    def read(self, params: list[Any]) -> None:
        """Record that all ranks gather the given parameters now, outside of modules, as ``GatheredParameters`` does.

        Small parameters that are being gathered for a later module are gathered now, because stock DeepSpeed would have
        had them since the end of the step. Parameters that are already gathered are left out, because this may be the
        only rank that asks for them.
        """
        with self._lock:
            ahead = [p for p in params if p.ds_persist and p in self._in_flight]
            self._launch([p for p in ahead if p in self._waiting])
            for param in ahead:
                self._in_flight.pop(param).wait()
            self._begun |= {p.ds_id for p in params if p.ds_persist}
            self.gathered([p for p in params if private.is_partitioned(p)])

    def module_begins(self, params: list[Any]) -> None:
        """Launch the delayed gathers of a module's parameters, because the module's forward or backward begins."""
        with self._lock:
            self._begun |= self._due
            self._due = frozenset(param.ds_id for param in params)
            if self._waiting:
                self._launch([p for p in params if p in self._waiting], due=True)

    def module_has_begun(self) -> None:
        """Launch the gathers that DeepSpeed has requested for later modules, as far as they wait for no update."""
        with self._lock:
            if self._ahead and self._waiting:
                self._ahead = False
                self._launch([p for p, g in self._waiting.items() if g.ask.may_run_ahead and self._ready(p)])

    def fetch(self, params: list[Any], gather: Gather, executor: Executor) -> Fetches:
        """Launch the gathers of parameters that DeepSpeed requests for a module that begins. Delay others.

        Return handles through which DeepSpeed waits for the parameters.
        """
        # Without streams, the calling thread itself would wait for the copy to the GPU.
        may_run_ahead = executor.device.unified or bool(executor.device.training_streams())
        ask = _Ask(gather, executor, private.current_stream(), may_run_ahead)
        asked = {p: _Gathering(p, ask, self._launch_all) for p in sorted(params, key=lambda p: p.ds_id)}
        private.mark_in_flight(asked)
        with self._lock:
            self._waiting |= asked
            self._launch([p for p in asked if p.ds_id in self._due], due=True)
            ready = [g for p, g in asked.items() if p in self._waiting and self._ready(p)]
            self._bring(ready)
            self._ahead |= bool(ready)
        return Fetches(asked)

    def _ready(self, param: Any) -> bool:
        return self._partitions.subgroup_of.get(param.ds_id) not in self.awaited

    def _launch_all(self) -> None:
        with self._lock:
            self._launch(list(self._waiting))

    def _launch(self, params: list[Any], *, due: bool = False) -> None:
        groups: dict[Any, list[_Gathering]] = {}
        for param in params:
            gathering = self._waiting[param]
            groups.setdefault(None if private.is_plain(param) else gathering.ask, []).append(gathering)
        for key, group in groups.items():
            self._launch_together(group + (self._small_beside(group) if due and key is None else []))

    def _small_beside(self, group: list["_Gathering"]) -> list["_Gathering"]:
        of, ask = self._partitions.subgroup_of, group[0].ask
        subgroups = {of.get(g.param.ds_id) for g in group} | {None}
        missing = [p for s in subgroups & self._apart for p in self._small[s] if private.is_plain(p)]
        self._apart -= subgroups
        own, beside = {g.param for g in group}, []
        for param in missing:
            if param in own or not (param in self._waiting or private.is_partitioned(param)):
                continue
            # Without its handle DeepSpeed takes the parameter as gathered, and keeps it, as it does after its own step.
            self._in_flight.pop(param, None)
            beside.append(self._waiting.get(param) or _Gathering(param, ask, self._launch_all))
        return beside

    @private.tensors_for_training()
    def _launch_together(self, group: list["_Gathering"]) -> None:
        group = sorted(group, key=lambda g: g.param.ds_id)
        params, ask = [g.param for g in group], group[0].ask
        device = ask.executor.device
        with private.on_stream(ask.stream):
            ask.executor.wait_parameters(self._partitions.subgroups(params))
            self._bring(group)
            private.mark_partitioned(params)
            copies = {g.param: g.copy for g in group if g.copy is not None}
            for _, ends in copies.values():
                device.training_waits(ends)
            # A parameter that was used before is gathered again, because DeepSpeed may have released it. DeepSpeed
            # releases all of them while it records the order of modules again.
            stays = [p for p in params if p.ds_persist and p.ds_id not in self._begun]
            with (
                private.partitions_at({p: tensor for p, (tensor, _) in copies.items()}),
                private.in_own_precision(stays if self.own_precision else []),
            ):
                handle = ask.gather(params)
        launched = _Launched(handle, [end for _, ends in copies.values() for end in ends], ask.executor)
        for gathering in group:
            gathering.launched, gathering.copy = launched, None
            self._waiting.pop(gathering.param, None)
        self.gathered(params)

    def _bring(self, gatherings: list["_Gathering"]) -> None:
        away = {
            g.param: g
            for g in gatherings
            if g.copy is None and self._partitions.live_on_host(g.param, g.ask.executor) and private.is_plain(g.param)
        }
        if away:
            for param, copy in self._partitions.bring(away, gatherings[0].ask.executor).items():
                away[param].copy = copy


@dataclass(frozen=True, eq=False)
class _Ask:
    """DeepSpeed's request for parameters, in one call."""

    gather: Gather
    executor: Executor
    stream: Any
    may_run_ahead: bool


class _Launched:
    """A gather that runs, and the copies that it waits for."""

    def __init__(self, handle: private.Handle, copies: list[Completion], executor: Executor) -> None:
        self._handle, self._copies, self._executor = handle, copies, executor

    @private.tensors_for_training()
    def wait(self, **options: Any) -> None:
        if self._copies:
            self._executor.device.will_wait(self._copies)
            self._copies = []
        self._handle.wait(**options)


class _Gathering:
    """A handle of one parameter that is being gathered. DeepSpeed can wait for this parameter alone.

    Attributes:
        launched: The gather. None if it is not launched yet.
        copy: The copy of the partition on the GPU, and the ops that end before the copy holds values. None if the
            partition is on the GPU, or the copy has not begun.
    """

    def __init__(self, param: Any, ask: _Ask, launch_all: Callable[[], None]) -> None:
        self.param, self.ask, self._launch_all = param, ask, launch_all
        self.launched: _Launched | None = None
        self.copy: tuple[torch.Tensor, list[Completion]] | None = None

    def wait(self, **options: Any) -> None:
        if self.launched is None:
            self._launch_all()
        assert self.launched is not None
        self.launched.wait(**options)


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
        """Give NaN tensors to the small parameters, which stock DeepSpeed keeps gathered after a step, until a gather.

        A Trainer counts ``p.numel()`` after each step, which needs the shape. Code that reads ``.data`` without a
        gather must not mistake an old value for a new one.
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
        """Gather the small parameters. Before, ``.data`` is NaN after a step, or empty in a checkpoint's save or load.

        All ranks must call this method, at a time when no update runs. DeepSpeed's status of the parameters remains
        "partitioned", so that DeepSpeed gathers them again in each forward.
        """
        self.show_persistent()
        for parameter, _ in self._stand_ins:
            value = parameter.data
            parameter.partition()
            parameter.data = value
        self._at_rest = True

    def blank(self) -> None:
        """Make small ZeRO-3 parameters empty, like other partitioned ones, as DeepSpeed's checkpoints require."""
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
    """Install functions that are called before DeepSpeed gathers parameters. Return a function that removes them.

    All code that reads a partitioned parameter (forward, GatheredParameters, a state_dict) calls ``param.all_gather``
    or ``param.all_gather_coalesced``. Modules call the latter for their own parameters and for those of later modules,
    and wait for the handle that it returns.

    Args:
        gate: Waits, for example, for the updates of the parameters that DeepSpeed gathers next.
        fetch: Gets the parameters and DeepSpeed's own gather from ``all_gather_coalesced``. It may bring the parameters
            to the GPU itself and return a handle. If it returns None, ``gate`` is called and DeepSpeed gathers.
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
