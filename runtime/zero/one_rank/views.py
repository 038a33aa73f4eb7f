"""Parameters that are shown as views of their partitions, without DeepSpeed's hooks on modules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from ebbtide.runtime.zero.checks import private
from ebbtide.runtime.zero.checks.module_hooks import (
    ModuleHooks,
    Node,
    applied,
    external_parameters,
    forget_trace,
    module_stack,
    own_parameters,
    through,
)
from ebbtide.runtime.zero.fetches import Partitions


@dataclass(frozen=True, slots=True)
class _Held:
    """Parameters that are shown together, and their subgroups."""

    params: list[Any]
    subgroups: list[int]


class Views:
    """The parameters of a single rank that holds them whole on the GPU, shown without DeepSpeed's hooks on modules.

    A gathered parameter is then a view of its own partition, so gathers and releases move nothing, and what is left of
    DeepSpeed's hooks is this:

    - Before a module's first forward of a step, its parameters are shown. Their updates have ended then.
    - All parameters are partitioned at each step, before its updates begin, and the large ones also at the end of a
      backward, or of a forward that records no gradients. Other code thus finds them as DeepSpeed leaves them.
    - If a parameter is partitioned before backward needs it, it is shown again by the next module in backward.
    - A module's inputs and outputs pass through a node of autograd each, as under DeepSpeed. Without the nodes,
      gradients would be added up in another order, and the code of modules would see other tensors:
      ``self.attention(x, x, x)`` gets three.

    Everything else that reads a partitioned parameter gathers it, and waits for its update (see `Gathers`).

    Attributes:
        trace: The modules of the first forward and backward, in order, as DeepSpeed would record them. None before.
    """

    def __init__(self, optimizer: Any, partitions: Partitions | None, parameters: list[Any]) -> None:
        self._optimizer, self._partitions, self.parameters = optimizer, partitions, parameters
        self.trace: list[torch.nn.Module] | None = None
        self._order: list[torch.nn.Module] = []
        self._held: dict[torch.nn.Module, _Held] = {}
        self._shown: dict[int, _Held] = {}  # since the last step
        self._hidden = False  # True if some of them may be partitioned again
        self._depth = 0  # modules with a running forward
        self._hooks: ModuleHooks | None = None  # DeepSpeed's, while others are in their places
        self._undo: list[Callable[[], None]] = []

    @property
    def on(self) -> bool:
        """Return whether these hooks are in the places of DeepSpeed's."""
        return self._hooks is not None

    def choose(self) -> None:
        """Use these hooks or DeepSpeed's, as the plan needs. A plan with parameters in host memory needs DeepSpeed's.

        Call this method when a plan has been attached or switched.
        """
        fits = self.fits()
        if fits and not self.on:
            self._begin()
        elif self.on and not fits:
            self.end()

    def fits(self) -> bool:
        """Return whether these hooks can be used with the present plan."""
        device = private.training_device().type
        return self._optimizer.partition_count == 1 and all(
            private.is_whole(param) and param.ds_tensor.device.type == device and not self._on_host(param)
            for param in self.parameters
        )

    def _on_host(self, param: Any) -> bool:
        assert self._partitions is not None
        return self._partitions.live_on_host(param, self._optimizer._ebbtide.executor)

    def _begin(self) -> None:
        hooks = ModuleHooks.of(self._optimizer)
        if hooks is None:  # leave DeepSpeed as it is
            return
        for module in hooks.modules:
            if params := own_parameters(module):
                self._held[module] = self._hold(params)
        root = self._optimizer.parameter_offload.module
        before, after = _hooks(self, root)
        hooks.replace(before, after)
        self._hooks = hooks
        for param in self.parameters:
            self._undo.append(_noticed(param, self._notice))

    def end(self) -> None:
        """Put DeepSpeed's hooks back into their places."""
        hooks = self._hooks
        if hooks is None:
            return
        forget_trace(self._optimizer)
        self._hooks = None
        hooks.restore()
        while self._undo:
            self._undo.pop()()
        self._held.clear()
        self.stepped()

    def _hold(self, params: list[Any]) -> _Held:
        return _Held(params, self._subgroups(params))

    def _subgroups(self, params: list[Any]) -> list[int]:
        assert self._partitions is not None
        return self._partitions.subgroups(params)

    def _notice(self) -> None:
        self._hidden = True

    # -- forward -----------------------------------------------------------------------------

    def begins(self, module: torch.nn.Module, *, root: bool) -> None:
        """Show a module's parameters before its forward. On CUDA the current stream waits for their updates."""
        if root:
            self._depth = 0  # the forward before may have ended with an error
            self._order = []
        self._depth += 1
        self._note(module)
        held = self._held.get(module)
        if held is not None:
            self._show(held)
        for param in external_parameters(module):
            self._show(self._hold([param]))

    def _note(self, module: torch.nn.Module) -> None:
        if self.trace is None:
            self._order.append(module)

    def _show(self, held: _Held) -> None:
        self._wait(held.subgroups)
        if private.show_partitions(self._optimizer, held.params):
            self._shown[id(held.params[0])] = held

    def _wait(self, subgroups: list[int]) -> None:
        executor = self._optimizer._ebbtide.executor
        if executor.busy:
            ends = executor.updates_of(subgroups)
            executor.device.will_wait(ends)
            executor.device.training_waits(ends)

    def gathered(self, params: list[Any]) -> None:
        """Record that other code has gathered parameters, which forward may use."""
        for param in params if self.on else ():
            if id(param) not in self._shown:
                self._shown[id(param)] = self._hold([param])

    def ends(self) -> None:
        self._depth -= 1
        if self._depth <= 0 and not torch.is_grad_enabled():
            self._hide()

    # -- backward ----------------------------------------------------------------------------

    def backward_begins(self, module: torch.nn.Module) -> None:
        """Show parameters again that backward needs and that were partitioned since their forward."""
        self._note(module)
        if self._hidden:
            self._hidden = False
            if self.on:
                for held in list(self._shown.values()):
                    self._show(held)
            else:  # the plan was switched after forward
                private.gather(param for held in self._shown.values() for param in held.params)

    def backward_ends(self) -> None:
        if self.on:
            recorded = self.trace is None and bool(self._order)
            if recorded:
                self.trace = self._order
            self._hide(small=recorded)  # DeepSpeed also releases the small ones while it records its trace

    def stepped(self) -> None:
        """Forget which parameters were shown, because a step has partitioned all."""
        self._shown.clear()
        self._hidden = False

    def _hide(self, *, small: bool = False) -> None:
        private.hide_partitions(param for param in self.parameters if small or not param.ds_persist)
        self._hidden = True


def _noticed(parameter: Any, notice: Callable[[], None]) -> Callable[[], None]:
    partition = parameter.partition

    def noticed(*args: Any, **kwargs: Any) -> Any:
        notice()
        with private.tensors_for_training():
            return partition(*args, **kwargs)

    parameter.partition = noticed

    def restore() -> None:
        parameter.partition = partition

    return restore


def _hooks(views: Views, root: torch.nn.Module) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return hooks that are no methods, because a copy of the model would otherwise include a copy of the optimizer.

    torch.compile breaks its graphs at them as it does at DeepSpeed's, so that it fuses the same kernels.
    """
    stack, left = module_stack(), applied(_left(views))

    def before(module: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        stack.append(module)
        views.begins(module, root=module is root)
        return tuple([through(value, _entering) for value in inputs])

    def after(module: torch.nn.Module, inputs: Any, output: Any) -> Any:
        del inputs
        stack.pop()
        views.ends()

        def leaving(tensor: torch.Tensor) -> torch.Tensor:
            return left(tensor, module) if tensor.requires_grad else tensor.detach()

        return through(output, leaving)

    return torch.compiler.disable(before), torch.compiler.disable(after)


class _ViewEntered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        del ctx
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        del ctx
        return gradient


_entered = applied(_ViewEntered)


def _entering(tensor: torch.Tensor) -> torch.Tensor:
    return _entered(tensor) if tensor.requires_grad else tensor.detach()


def _left(views: Views) -> type[torch.autograd.Function]:
    class ViewLeft(Node):
        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
            views.backward_begins(ctx.of)
            return gradient, None

    return ViewLeft
