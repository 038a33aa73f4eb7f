"""Hooks on modules that fetch and release ZeRO-3 parameters as DeepSpeed's hooks do, with less Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from ebbtide.runtime.zero.checks import private
from ebbtide.runtime.zero.checks.coordinator import (
    PartitionedParameterCoordinator,
    Use,
    begins,
    ends,
    quickened,
    slowed,
)
from ebbtide.runtime.zero.checks.module_hooks import Hook, ModuleHooks, Node, applied, module_stack, through


class LeanHooks:
    """Hooks in the places of DeepSpeed's, for parameters that must be gathered or copied for each use.

    They ask DeepSpeed's own coordinator for parameters, at the same moments and in the same order as DeepSpeed's hooks
    do, so that gathers, memory and results are the same.
    """

    def __init__(
        self, optimizer: Any, before: Callable[[list[Any]], None] | None, after: Callable[[], None] | None
    ) -> None:
        self._optimizer, self._before, self._after = optimizer, before, after
        self._hooks: ModuleHooks | None = None  # DeepSpeed's, while these are in their places

    @property
    def on(self) -> bool:
        """Return whether these hooks are in the places of DeepSpeed's."""
        return self._hooks is not None

    def begin(self) -> None:
        """Take the places of DeepSpeed's hooks, if these and the coordinator are those that are known."""
        hooks = None if self.on else ModuleHooks.of(self._optimizer)
        coordinator = None if hooks is None else quickened(self._optimizer, self._before, self._after)
        if hooks is None or coordinator is None:
            return
        uses = {module: Use.of(module) for module in hooks.modules}
        hooks.replace(*_hooks(coordinator, uses, self._optimizer.parameter_offload.module, hooks.releases()))
        self._hooks = hooks

    def end(self) -> None:
        """Put DeepSpeed's hooks back into their places."""
        hooks, self._hooks = self._hooks, None
        if hooks is not None:
            hooks.restore()
            slowed(self._optimizer)


def _hooks(
    coordinator: PartitionedParameterCoordinator,
    uses: dict[torch.nn.Module, Use],
    root: torch.nn.Module,
    releases: dict[torch.nn.Module, Hook],
) -> tuple[Hook, Hook]:
    stack = module_stack()
    entered, left = applied(_entered(coordinator)), applied(_left(coordinator))

    def before(module: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        if module is root:
            with private.tensors_for_training():
                coordinator.reset_step()
        use = uses[module]
        stack.append(module)
        begins(coordinator, use, forward=True)
        use.inputs = 0

        def entering(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.requires_grad:
                return tensor.detach()
            use.inputs += 1
            return entered(tensor, use)

        return tuple([through(value, entering) for value in inputs])

    def after(module: torch.nn.Module, inputs: Any, output: Any) -> Any:
        use = uses[module]
        if _may_hold_parameters(output):  # DeepSpeed makes them parameters of the module around this one
            with private.tensors_for_training():
                releases[module](module, inputs, output)
        else:
            stack.pop()
            ends(coordinator, use, forward=True)

        def leaving(tensor: torch.Tensor) -> torch.Tensor:
            use.outputs += 1
            return left(tensor, use) if tensor.requires_grad else tensor.detach()

        return through(output, leaving)

    return torch.compiler.disable(before), torch.compiler.disable(after)


def _may_hold_parameters(output: Any) -> bool:
    kind = type(output)
    if kind is torch.Tensor:
        return hasattr(output, "ds_param_alias")
    if kind is tuple or kind is list:
        return any(map(_may_hold_parameters, output))
    return output is not None


def _entered(coordinator: PartitionedParameterCoordinator) -> type[torch.autograd.Function]:
    class Entered(Node):
        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
            use: Use = ctx.of
            use.inputs -= 1
            if use.inputs == 0:
                ends(coordinator, use, forward=False)
            return gradient, None

    return Entered


def _left(coordinator: PartitionedParameterCoordinator) -> type[torch.autograd.Function]:
    class Left(Node):
        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
            use: Use = ctx.of
            if use.outputs > 0:
                begins(coordinator, use, forward=False)
                use.outputs -= 1
            return gradient, None

    return Left
