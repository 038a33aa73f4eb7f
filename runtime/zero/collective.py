"""A launcher of the gathers of ZeRO-3 parameters. It makes several ranks launch their gathers in the same order.

Ranks that launch gathers in different orders hang. The orders could differ because a gather waits for the updates of
its parameters, and updates end earlier on some ranks than on others. If some ranks may still have to wait for an
update, all ranks delay the gather until a module that needs a parameter of this subgroup begins.
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
        """Create the launcher.

        Args:
            small: The parameters that stay gathered until the end of a step (``optimizer.persistent_parameters``).
            in_flight: DeepSpeed's handles of parameters that are being gathered (``ds_inflight_param_registry``).
        """
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
