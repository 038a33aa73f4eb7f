"""Functions for model and optimizer state in nested dicts, lists and tuples with tensors in them."""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch


def tensors_of(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield the tensors in nested dicts, lists and tuples, each with its path, in pickling order.

    Tensors inside objects of other classes are left out.
    """
    if isinstance(tree, torch.Tensor):
        yield path, tree
    elif type(tree) in (dict, OrderedDict):
        for key, value in tree.items():
            yield from tensors_of(value, (*path, key))
    elif type(tree) in (list, tuple):
        for number, value in enumerate(tree):
            yield from tensors_of(value, (*path, number))


def of_the_kind(like: Any, tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor``, wrapped in a `torch.nn.Parameter` if the tensor ``like`` is a parameter."""
    if isinstance(like, torch.nn.Parameter):
        return torch.nn.Parameter(tensor, requires_grad=like.requires_grad)
    return tensor


def replace_tensors(tree: Any, replace: Any) -> Any:
    """Return a copy of nested dicts, lists and tuples, with each dense tensor replaced by the result of ``replace``.

    Tensors that consist of several others, or of more than their bytes, are left as they are: sparse, nested and
    quantized ones, for example.
    """
    if isinstance(tree, torch.Tensor):
        return replace(tree) if _is_dense(tree) else tree
    if type(tree) in (dict, OrderedDict):
        return type(tree)((k, replace_tensors(v, replace)) for k, v in tree.items())
    if type(tree) in (list, tuple):
        return type(tree)(replace_tensors(v, replace) for v in tree)
    return tree


def _is_dense(tensor: torch.Tensor) -> bool:
    made_of_others = tensor.is_nested or hasattr(tensor, "__tensor_flatten__")
    return tensor.layout == torch.strided and not tensor.is_quantized and not made_of_others
