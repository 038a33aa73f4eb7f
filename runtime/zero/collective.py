"""A launcher of the gathers of ZeRO-3 parameters. It makes several ranks launch their gathers in the same order.

Ranks that launch gathers in different orders hang. The orders could differ because a gather waits for the updates of
its parameters, and updates end earlier on some ranks than on others. If some ranks may still have to wait for an
update, all ranks delay the gather until the module of its parameters begins.
"""

import threading
from collections.abc import Callable
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
    ended, two ranks could launch gathers in different orders and hang.

    DeepSpeed requests the parameters of later modules in advance. Such a gather is launched immediately if all ranks
    know that it need not wait for an update. They know this after the first gather from a subgroup, because every rank
    waited for the subgroup's update before it took part. Any other gather is launched when its module begins. On a GPU
    the host thread runs a module ahead, so that such a gather still runs during the previous module.

    The training thread calls the methods, and autograd's thread during backward.

    Attributes:
        awaited: Subgroups without any gather since their latest update was launched. All ranks have the same set.
        own_precision: True if the next gather of small parameters keeps their own dtype, because stock DeepSpeed would
            have gathered them at the end of a step, or after a save or load of a checkpoint. False if the gather uses
            the dtype that forward computes in, because stock DeepSpeed would gather them in forward.
    """

    def __init__(self, partitions: Partitions) -> None:
        self._partitions = partitions
        self.awaited = set[int]()
        self.own_precision = False
        self._due = frozenset[int]()  # ds_ids of the parameters of the module that begins
        self._begun = set[int]()  # ds_ids of modules that began before it, since own_precision was set
        self._asks: list[_Ask] = []  # asks with a gather that is not launched yet, in the order of asking
        self._lock = threading.RLock()

    def stay_gathered(self, stay: bool) -> None:
        """Set the precision of the next gathers of small parameters to the precision that stock DeepSpeed would use.

        After a step or a checkpoint, stock DeepSpeed gathers small parameters in their own precision, and keeps them
        gathered. If they are not gathered yet, forward gathers them, in the precision of ``torch_autocast``.

        Args:
            stay: True for the parameters' own precision, because stock DeepSpeed would have the small parameters
                gathered already. False for the precision of ``torch_autocast``.
        """
        self.own_precision, self._due = stay, frozenset()
        self._begun.clear()

    def updates_launched(self) -> None:
        """Record that an update of every subgroup has been launched. Later parameter gathers wait for the updates."""
        self.awaited = set(self._partitions.subgroup_of.values())

    def gathered(self, params: list[Any]) -> None:
        """Record that all ranks have waited for the updates of the given parameters.

        Later gathers of these parameters' subgroups then do not wait.
        """
        self.awaited -= set(self._partitions.subgroups(params))

    def module_begins(self, params: list[Any]) -> None:
        """Launch the delayed gathers of a module's parameters, because the module's forward or backward begins."""
        self._begun |= self._due
        self._due = frozenset(param.ds_id for param in params)
        self._launch(lambda param: param.ds_id in self._due)

    def fetch(self, params: list[Any], gather: Gather, executor: Executor) -> Fetches:
        """Launch the gathers of parameters that DeepSpeed requests, or delay them. Return handles through which
        DeepSpeed waits for the parameters.

        All ranks must launch gathers in the same order, or they hang. A gather has to wait for the latest update of its
        parameters, and updates end earlier on some ranks than on others. If some ranks may not have waited for this
        update yet, all ranks delay the gather until the forward or backward of the parameter's module begins. On a
        device without streams all gathers are delayed, because the calling thread would otherwise wait while parameters
        are copied from host memory to the device.

        Args:
            gather: DeepSpeed's own gather for any of these parameters.
        """
        ask = _Ask(self._partitions, self._as_stock(gather), executor)
        with self._lock:
            in_order = sorted(params, key=lambda p: p.ds_id)
            put_off = {p: self._put_off(p, executor) for p in in_order}
            later = [p for p in in_order if put_off[p]]
            now = [p for p in in_order if not put_off[p]]
            if later:
                ask.put_off(later, [p for p in later if not self._awaits(p)])
                self._asks.append(ask)
            if now:
                ask.launch(now)
                self.gathered(now)
        return Fetches({p: _Gathering(p, ask, self._launch_all) for p in in_order})

    def _as_stock(self, gather: Gather) -> Gather:
        def gather_as_stock(params: list[Any]) -> private.Handle:
            # A parameter that an earlier module used is gathered again, because DeepSpeed may have released it.
            # DeepSpeed releases all of them while it records the order of modules again.
            stays = [p for p in params if p.ds_persist and p.ds_id not in self._begun]
            with private.in_own_precision(stays if self.own_precision else []):
                return gather(params)

        return gather_as_stock

    def _put_off(self, param: Any, executor: Executor) -> bool:
        if param.ds_id in self._due:
            return False
        device = executor.device
        # Without streams, the calling thread itself would wait for the copy to the GPU.
        return self._awaits(param) or not (device.unified or device.training_streams())

    def _awaits(self, param: Any) -> bool:
        return self._partitions.subgroup_of.get(param.ds_id) in self.awaited

    def _launch_all(self) -> None:
        self._launch(lambda _: True)

    def _launch(self, wanted: Callable[[Any], bool]) -> None:
        with self._lock:
            for ask in self._asks:
                params = [param for param in ask.waiting if wanted(param)]
                if params:
                    ask.launch(params)
                    self.gathered(params)
            self._asks = [ask for ask in self._asks if ask.waiting]


class _Ask:
    """The parameters that DeepSpeed requested to gather in one call, and their gathers.

    Attributes:
        waiting: Parameters that are not being gathered yet, in the order of their ids.
    """

    def __init__(self, partitions: Partitions, gather: Gather, executor: Executor) -> None:
        self._partitions, self._gather, self._executor = partitions, gather, executor
        self._stream = private.current_stream()
        self.waiting: list[Any] = []
        self.handles: dict[Any, private.Handle] = {}
        self._copies: dict[Any, tuple[torch.Tensor, list[Completion]]] = {}
        # Id of a gather's handle -> copies that the gather has waited for.
        self._copied: dict[int, list[Completion]] = {}

    def put_off(self, params: list[Any], new: list[Any]) -> None:
        private.mark_in_flight(params)
        self.waiting = params
        self._bring(new)

    def _bring(self, params: list[Any]) -> None:
        away = [p for p in params if self._partitions.live_on_host(p, self._executor)]
        away = [p for p in away if p not in self._copies and private.is_plain(p)]
        self._copies |= self._partitions.bring(away, self._executor)

    @private.tensors_for_training()
    def launch(self, params: list[Any]) -> None:
        private.mark_partitioned(params)
        with private.on_stream(self._stream):
            self._executor.wait_parameters(self._partitions.subgroups(params))
            self._bring(params)
            copies = {p: self._copies.pop(p) for p in params if p in self._copies}
            for _, ends in copies.values():
                self._executor.device.training_waits(ends)
            with private.partitions_at({p: tensor for p, (tensor, _) in copies.items()}):
                handle = self._gather(params)
        self._copied[id(handle)] = [end for _, ends in copies.values() for end in ends]
        self.handles |= dict.fromkeys(params, handle)
        self.waiting = [p for p in self.waiting if p not in self.handles]

    @private.tensors_for_training()
    def wait(self, param: Any, **options: Any) -> None:
        handle = self.handles[param]
        self._executor.device.will_wait(self._copied.pop(id(handle), ()))
        handle.wait(**options)


class _Gathering:
    """A handle of one parameter that is being gathered. DeepSpeed can wait for this parameter alone."""

    def __init__(self, param: Any, ask: _Ask, launch_all: Callable[[], None]) -> None:
        self._param, self._ask, self._launch_all = param, ask, launch_all

    def wait(self, **options: Any) -> None:
        if self._param not in self._ask.handles:
            self._launch_all()
        self._ask.wait(self._param, **options)
