"""Parameters that wait at their first use, so that the updates of ZeRO-1 and 2 run during the next forward.

Under ZeRO-1 and 2 any code may read a parameter at any time. While the update of a parameter runs, the parameter has
the class `Pending`. The first function of torch that gets the parameter waits for the update. A module's own parameters
are waited for when its forward begins, which also serves C++ code and compiled modules. All parameters are waited for
when a backward pass begins, because autograd reads parameters without Python.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from ebbtide.runtime.devices.base import Device
from ebbtide.runtime.devices.lane import Completion
from torch import nn

logger = logging.getLogger("ebbtide")

# torch's functions that give tensors to C++ code without asking the tensor's class: module, name.
UNASKED = (
    ("torch.autograd", "_engine_run_backward"),
    ("torch.autograd.graph", "_engine_run_backward"),  # torch.compiler puts it into torch.autograd again
    ("torch._functorch.eager_transforms", "_wrap_for_grad"),
    ("torch.utils.dlpack", "to_dlpack"),
    ("torch", "to_dlpack"),
)
MOST_COMPILED_STEPS = 3  # so many steps may compile code that reads waiting parameters

_waiting: dict[int, FirstTouch] = {}  # by the id of a parameter that has the class `Pending`
_lock = threading.RLock()


class _AsParameter(type(nn.Parameter)):  # type: ignore[misc]
    """The metaclass of a class that equals `torch.nn.Parameter`, so that tables by type find what they have for it."""

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is nn.Parameter

    def __hash__(cls) -> int:
        return hash(nn.Parameter)


class Pending(nn.Parameter, metaclass=_AsParameter):
    """The class of a parameter while its update runs. The first read of its values waits, and ends the class."""

    def __new__(cls, *args: Any, **kwargs: Any) -> nn.Parameter:  # type: ignore[misc]
        # Libraries make new parameters with `type(parameter)(...)`.
        return nn.Parameter(*args, **kwargs)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        del types
        if func in VALUELESS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func in WHOLE or not (_settle(args) | _settle(kwargs or {})):
            settle_all()  # also if the parameter is in a container of another kind
        return func(*args, **(kwargs or {}))

    def as_subclass(self, cls: Any) -> Any:
        settle_one(self)
        return self.as_subclass(cls)


def _getters(*names: str) -> set[Any]:
    return {getattr(torch.Tensor, name).__get__ for name in names}


_GRADIENT: Any = torch.Tensor.grad
# Functions that use no value of a parameter, and so need not wait.
VALUELESS = frozenset(
    {
        *_getters("shape", "dtype", "device", "requires_grad", "grad", "is_leaf", "layout"),
        _GRADIENT.__set__,
        _GRADIENT.__delete__,
        torch.Tensor.numel,
        torch.Tensor.nelement,
    }
)
# Functions that use the flat buffer of a parameter, with its neighbours.
WHOLE = frozenset(
    {
        torch.Tensor.share_memory_,
        torch.Tensor.untyped_storage,
        torch.Tensor.storage,
        torch.Tensor._typed_storage,
        torch.Tensor.data_ptr,
        torch.Tensor.as_strided,
        *_getters("_backward_hooks"),  # multiprocessing asks for it first, and then moves the flat buffer
    }
)


def _settle(given: Any) -> bool:
    if type(given) is Pending:
        settle_one(given)
        return True
    if isinstance(given, Mapping):
        given = list(given.values())
    if isinstance(given, (list, tuple)):
        return bool(sum(_settle(one) for one in given))
    return False


def settle_one(parameter: Any) -> None:
    """Wait until a parameter has its new values."""
    if type(parameter) is Pending:
        touch = _waiting.get(id(parameter))
        if touch is not None:  # None if another thread has settled the parameter meanwhile
            touch.settle([id(parameter)])


def settle_all() -> None:
    """Wait until all parameters of this process have their new values."""
    for touch in set(_waiting.values()):
        touch.settle_all()


@dataclass(slots=True)
class Touched:
    """A parameter of the optimizer, and what it shows.

    Attributes:
        value: The parameter's part of DeepSpeed's flat buffer.
        stand_in: NaN in the parameter's shape, for code in C++ that asks no class.
        may_wait: False if the parameter's class cannot be changed.
    """

    parameter: nn.Parameter
    subgroups: frozenset[int]
    value: torch.Tensor
    stand_in: torch.Tensor
    may_wait: bool

    def begin(self) -> None:
        """Let the parameter wait. Call this and `end` with torch's functions of subclasses disabled."""
        self.parameter.__class__ = Pending
        self.parameter.data = self.stand_in

    def end(self) -> None:
        self.parameter.data = self.value
        self.parameter.__class__ = nn.Parameter  # last, because other threads may look


class FirstTouch:
    """The parameters of one engine, and the updates that they wait for. Any thread may read a parameter.

    Attributes:
        waits_in_step: True if compiled code outside of modules reads parameters. Steps then wait for their updates.
    """

    def __init__(self, module: nn.Module, subgroups_of: Callable[[Any], Iterable[int]], device: Device) -> None:
        self.waits_in_step = False
        self._device, self._subgroups_of = device, subgroups_of
        self._touched: list[Touched] = []
        self._of_subgroup: dict[int, list[Touched]] = {}
        self._pending: dict[int, Touched] = {}
        self._ends: Mapping[int, Completion] = {}
        self._settled = set[int]()  # subgroups with an update that has been waited for since the step
        self._streams: list[Any] = []
        self._compiled_steps, self._compiles = 0, False
        self._modules = list(module.modules())
        self._scripted = {p for m in self._modules if isinstance(m, torch.jit.ScriptModule) for p in m.parameters()}
        # By module: parameters to wait for before its forward. They include those of modules inside it that are not
        # called, because the module's own code reads them.
        self._before: dict[nn.Module, list[int]] = {m: [] for m in self._modules}
        self._needs: dict[nn.Module, set[int]] = {m: set() for m in self._modules}  # the subgroups of these parameters
        self._parents = {child: m for m in self._modules for child in m.children()}
        self._called: set[nn.Module] = set()
        self._assigned: set[nn.Module] | None = None
        self._undo: list[Callable[[], None]] = []
        for one in self._modules:
            if not isinstance(one, torch.jit.ScriptModule):
                hook = one.register_forward_pre_hook(_before_forward(self), prepend=True)
                self._undo.append(hook.remove)
        _open_doors()

    def find(self, values: Iterable[tuple[nn.Parameter, torch.Tensor]]) -> None:
        """Store what each parameter shows. Call this again whenever DeepSpeed has replaced its flat buffers."""
        self.settle_all()
        nan = dict[Any, torch.Tensor]()
        self._touched, self._of_subgroup = [], {}
        for parameter, value in values:
            kind = value.dtype, value.device
            if kind not in nan:
                nan[kind] = torch.full((), float("nan"), dtype=value.dtype, device=value.device)
            subgroups = frozenset(self._subgroups_of(parameter))
            may_wait = type(parameter) is nn.Parameter and parameter not in self._scripted
            one = Touched(parameter, subgroups, value, nan[kind].expand(value.shape), may_wait)
            self._touched.append(one)
            for subgroup in subgroups:
                self._of_subgroup.setdefault(subgroup, []).append(one)

    # -- a step ------------------------------------------------------------------------------

    def updates_launched(self, ends: Mapping[int, Completion]) -> None:
        """Make each parameter wait for its updates.

        Args:
            ends: By subgroup: the operation after which its parameters have their new values.
        """
        self._watch_compiler()
        self._assign()
        self._ends, self._streams = ends, self._device.training_streams()
        running = {subgroup for subgroup, end in ends.items() if not end.ended or end.error}
        self._settled = ends.keys() - running
        now = [one for one in self._touched if self.waits_in_step or not one.may_wait]
        first = {subgroup for one in now for subgroup in one.subgroups & running}
        self._wait(first)
        self._settled |= first
        running -= first
        with _lock, torch._C.DisableTorchFunctionSubclass():
            for one in self._touched:
                if one.may_wait and not running.isdisjoint(one.subgroups):
                    self._pending[id(one.parameter)] = one
                    _waiting[id(one.parameter)] = self
                    one.begin()
                else:
                    one.parameter.data = one.value

    def settle(self, ids: Iterable[int]) -> None:
        """Wait for the updates of parameters. Other parameters that these updates make ready end their wait too.

        Raises:
            BackgroundError: An update failed.
        """
        with _lock:
            wanted = {subgroup for i in ids if i in self._pending for subgroup in self._pending[i].subgroups}
            if not wanted:
                return
            self._wait(wanted - self._settled)
            settled = self._settled | wanted
            with torch._C.DisableTorchFunctionSubclass():
                for subgroup in wanted:
                    for one in self._of_subgroup[subgroup]:
                        if id(one.parameter) in self._pending and one.subgroups <= settled:
                            self._show(one)
            self._settled = settled  # last, because other threads may look

    def settle_all(self) -> None:
        """Wait for the updates of all parameters."""
        if self._pending:
            self.settle(list(self._pending))

    def _wait(self, subgroups: set[int]) -> None:
        if not subgroups:
            return
        ends = [self._ends[subgroup] for subgroup in sorted(subgroups)]
        self._device.will_wait(ends)
        self._device.training_waits(ends)
        for stream in self._streams:  # that of the step too, with which other streams are ordered
            for end in ends:
                end.wait_on(stream)

    def _show(self, one: Touched) -> None:
        one.end()
        del self._pending[id(one.parameter)], _waiting[id(one.parameter)]

    def close(self) -> None:
        """Remove the hooks, and end the wait of all parameters without waiting."""
        for undo in self._undo:
            undo()
        self._undo.clear()
        with _lock, torch._C.DisableTorchFunctionSubclass():
            for one in list(self._pending.values()):
                self._show(one)

    # -- modules -----------------------------------------------------------------------------

    def before(self, module: nn.Module) -> None:
        """Wait for what a module reads in its own forward, outside the modules that it calls."""
        needs = self._needs.get(module)
        if needs is None:  # a copy of a module has its hooks too
            return
        self._called.add(module)
        if not self._pending:
            return
        if not module.training or _is_compiled(module):
            # In evaluation, some modules of torch choose other kernels for parameters of a class of their own.
            self.settle(id(parameter) for parameter in module.parameters())
        elif not needs <= self._settled:
            self.settle(self._before[module])

    def _assign(self) -> None:
        # Give each module's parameters to the module itself if it was called since the latest step. Otherwise give them
        # to the nearest module around it that was called.
        if self._called != self._assigned:
            self._before = {module: [] for module in self._modules}
            for module in self._modules:
                owner = module
                while owner not in self._called and owner in self._parents:
                    owner = self._parents[owner]
                self._before[owner] += [id(parameter) for parameter in module._parameters.values()]
            parts = {id(one.parameter): one.subgroups for one in self._touched}
            none = frozenset[int]()
            self._needs = {m: set().union(*(parts.get(i, none) for i in ids)) for m, ids in self._before.items()}
            self._assigned = self._called
        self._called = set()
        for module in self._modules:
            if module._compiled_call_impl is not None:
                _settle_before_compiled(module)

    def _watch_compiler(self) -> None:
        callback: Any = sys.modules.get("torch._dynamo.callback")
        if callback is not None and _compile_begins not in callback.callback_handler.start_callbacks:
            callback.callback_handler.register_start_callback(_compile_begins)
        self._compiled_steps = self._compiled_steps + 1 if self._compiles else 0
        self._compiles = False
        if self._compiled_steps == MOST_COMPILED_STEPS:
            self.waits_in_step = True
            logger.info(
                "ebbtide: a function that torch.compile has compiled reads parameters outside of their modules. From "
                'now on, steps wait for their updates, as with "overlap_forward": false'
            )

    def compile_begins(self) -> None:
        """Wait for all parameters, because torch.compile must see their usual class."""
        if self._pending:
            self._compiles = True
            self.settle_all()


def _before_forward(touch: FirstTouch) -> Callable[..., None]:
    def before_forward(module: nn.Module, _: Any) -> None:
        if not torch.compiler.is_compiling():  # hooks inside a compiled region are compiled to nothing
            touch.before(module)

    return before_forward


def _is_compiled(module: nn.Module) -> bool:
    forward = module.__dict__.get("forward")  # also of the module that torch.compile(module) returns
    return forward is not None and hasattr(forward, "_torchdynamo_orig_callable")


def _settle_before_compiled(module: nn.Module) -> None:
    compiled: Any = module._compiled_call_impl
    if getattr(compiled, "settles", False):
        return

    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            for parameter in module.parameters():
                settle_one(parameter)
        return compiled(*args, **kwargs)

    call.settles = True  # type: ignore[attr-defined]
    module._compiled_call_impl = call


def _open_doors() -> None:
    for where, name in UNASKED:
        holder = importlib.import_module(where)
        call = getattr(holder, name, None)
        if call is not None and not hasattr(call, "settles"):
            setattr(holder, name, _settling(call, everything=name == "_engine_run_backward"))


def _settling(call: Callable[..., Any], *, everything: bool) -> Callable[..., Any]:
    def settled(*args: Any, **kwargs: Any) -> Any:
        if _waiting and not torch.compiler.is_compiling():
            settle_all() if everything else _settle(args)
        return call(*args, **kwargs)

    settled.settles = True  # type: ignore[attr-defined]
    return settled


def _compile_begins(*_: Any) -> None:
    for touch in set(_waiting.values()):
        touch.compile_begins()


os.register_at_fork(before=settle_all)  # in the new process no thread would end the updates
