"""Nodes of autograd on the inputs and outputs of modules, as DeepSpeed's ZeRO-3 hooks put there."""

from collections.abc import Callable
from typing import Any

import torch
from ebbtide.runtime.zero.checks.module_hooks import to_tensors

_PLAIN = (type(None), bool, int, float, str)


def through(value: Any, node: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a module's input or output with ``node`` applied to its tensors, as DeepSpeed does with its own nodes."""
    if type(value) is torch.Tensor:
        return node(value)
    return value if type(value) in _PLAIN else to_tensors(node, value)


class Node(torch.autograd.Function):
    """A node that changes nothing in forward, and keeps what it belongs to (``ctx.of``) for its backward."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, of: Any) -> torch.Tensor:
        ctx.of = of
        return tensor.detach()


def applied(node: type[torch.autograd.Function]) -> Callable[..., torch.Tensor]:
    """Return the function that adds a node, without torch's checks for the transforms of ``torch.func``."""
    quick: Callable[..., torch.Tensor] = super(torch.autograd.Function, node).apply  # type: ignore[misc]

    def apply(*args: Any) -> torch.Tensor:
        if torch._C._are_functorch_transforms_active():
            return node.apply(*args)  # type: ignore[no-any-return]
        return quick(*args)

    return apply
