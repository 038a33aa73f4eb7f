"""DeepSpeed's ZeRO-3 hooks on modules: where they are, and how other hooks take their places and leave them again."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

# The hooks that DeepSpeed gives to a module, by the list of `DeepSpeedZeRoOffload` with their handles.
_FORWARD = ("_pre_forward_module_hook", "_post_forward_module_hook")
_BACKWARD = ("_pre_backward_module_hook", "_post_backward_module_hook")
_START = "_start_of_forward_hook"

Hook = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class _Site:
    """The ids of DeepSpeed's hooks in the dicts of one module.

    Each of the two dicts has two hooks of DeepSpeed, and DeepSpeed has registered the second right after the first.
    """

    module: torch.nn.Module
    before: tuple[int, int]
    after: tuple[int, int]


class ModuleHooks:
    """DeepSpeed's ZeRO-3 hooks on the modules of a model. Other hooks can take their places for a while.

    Hooks of other code keep their places before or after DeepSpeed's.
    """

    def __init__(self, root: torch.nn.Module, start: int, sites: list[_Site]) -> None:
        self._root, self._start, self._sites = root, start, sites
        self._taken: list[tuple[dict[int, Any], dict[int, Hook]]] = []
        self.modules = [site.module for site in sites]

    @classmethod
    def of(cls, optimizer: Any) -> "ModuleHooks | None":
        """Return the hooks of a ZeRO-3 optimizer, or None if they are not those of a DeepSpeed that was tested."""
        offload = getattr(optimizer, "parameter_offload", None)
        names = ("forward_hooks", "backward_hooks", "fwd_pre_hook", "module")
        forward, backward, start, root = (getattr(offload, name, None) for name in names)
        if not forward or not backward or start is None or root is None:
            return None
        sites = list(_sites(root, forward, backward))
        there = _name(root._forward_pre_hooks, start.id) == _START
        return cls(root, start.id, sites) if there and None not in sites else None  # type: ignore[arg-type]

    def replace(self, before: Hook, after: Hook) -> None:
        """Put ``before`` into the place of DeepSpeed's hooks before each module's forward, and ``after`` into the place
        of those after it. After an error, DeepSpeed's are in their places.
        """
        try:
            for site in self._sites:
                for hooks, (first, second), new in (
                    (site.module._forward_pre_hooks, site.before, before),
                    (site.module._forward_hooks, site.after, after),
                ):
                    self._taken.append((hooks, {first: hooks[first], second: hooks[second]}))
                    hooks[first] = new
                    del hooks[second]
            hooks = self._root._forward_pre_hooks
            self._taken.append((hooks, {self._start: hooks[self._start]}))
            del hooks[self._start]
        except BaseException:
            self.restore()
            raise

    def releases(self) -> dict[torch.nn.Module, Hook]:
        """Return DeepSpeed's hook after the forward of each module, which releases the module's parameters."""
        return {site.module: site.module._forward_hooks[site.after[0]] for site in self._sites}

    def restore(self) -> None:
        """Put DeepSpeed's hooks back into their places, except for those that DeepSpeed has removed meanwhile. After an
        error too, all that can come back is back.
        """
        try:
            self._restore()
        except BaseException:
            self._restore()
            raise

    def _restore(self) -> None:
        while self._taken:
            hooks, taken = self._taken[-1]
            if self._start not in taken:
                _insert(hooks, next(iter(taken)), taken)
            elif self._start not in hooks:  # DeepSpeed has registered it before all others of the root
                first = next((site.before[0] for site in self._sites if site.module is self._root), -1)
                _insert(hooks, first, taken | {first: hooks[first]} if first in hooks else {})
            del self._taken[-1]


def _insert(hooks: dict[int, Any], place: int, new: dict[int, Hook]) -> None:
    if place not in hooks:
        return
    after: dict[int, Any] = {}
    for key, hook in hooks.items():
        after |= new if key == place else {key: hook}
    try:
        hooks.clear()
        hooks.update(after)
    except BaseException:
        hooks.update(after)
        raise


def _sites(root: torch.nn.Module, forward: list[Any], backward: list[Any]) -> Iterator[_Site | None]:
    modules = {id(module._forward_pre_hooks): module for module in root.modules()}
    if len(forward) != len(backward) or len(forward) % 2:
        yield None
        return
    for i in range(0, len(forward), 2):
        fetch, release, outputs, inputs = *forward[i : i + 2], *backward[i : i + 2]
        module = modules.get(id(fetch.hooks_dict_ref()))
        if module is None:
            yield None
            return
        before, after = module._forward_pre_hooks, module._forward_hooks
        found = (_name(before, fetch.id), _name(after, release.id), _name(after, outputs.id), _name(before, inputs.id))
        yield _Site(module, (fetch.id, inputs.id), (release.id, outputs.id)) if found == _FORWARD + _BACKWARD else None


def _name(hooks: dict[int, Any], key: int) -> str:
    hook: Any = hooks.get(key)
    if getattr(hook, "__name__", "") == "wrapped_fn":  # DeepSpeed's instrument_w_nvtx
        hook = next((cell.cell_contents for cell in hook.__closure__ if callable(cell.cell_contents)), hook)
    return getattr(hook, "__name__", "")


def module_stack() -> list[Any]:
    """Return DeepSpeed's list of modules with a running forward, the outermost first."""
    from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK

    return FWD_MODULE_STACK


def to_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Return a module's input or output with ``function`` applied to its tensors, as DeepSpeed applies its own."""
    from deepspeed.runtime.zero.utils import apply_to_tensors_only

    return apply_to_tensors_only(function, value)


def own_parameters(module: torch.nn.Module) -> list[Any]:
    """Return the ZeRO-3 parameters that DeepSpeed would gather for a module's forward, without external ones."""
    from deepspeed.utils import z3_leaf_module

    return [p for p in module.parameters(recurse=z3_leaf_module(module)) if hasattr(p, "ds_id")]


def external_parameters(module: torch.nn.Module) -> list[Any]:
    return list(vars(module).get("_external_params", {}).values())


def forget_trace(optimizer: Any) -> None:
    """Make DeepSpeed record the order of modules anew, because modules have run without its hooks."""
    coordinator = optimizer.parameter_offload.get_param_coordinator()
    if not coordinator.is_invalid_trace():
        coordinator._invalidate_trace()


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
