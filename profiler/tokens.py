"""A function that derives the number of tokens in a forward pass from the shapes of the model's inputs."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

_IDS = (torch.int64, torch.int32)


def tokens_of(model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
    """Return the number of tokens in a model's inputs, or None if it cannot be derived from their shapes.

    The tokens are in the argument ``input_ids``, or else in the first tensor. That tensor must be an integer
    matrix (batch, sequence), the model must have an embedding, and all integer matrices (such as targets and
    masks) must have the same shape.
    """
    if not any(isinstance(module, torch.nn.Embedding) for module in model.modules()):
        return None
    named = dict(_named(args, kwargs))
    ids = named.get("input_ids")
    if ids is not None:
        return ids.numel() if _are_ids(ids) else None
    tensors = list(named.values())
    if not tensors or not _are_ids(tensors[0]):
        return None
    shapes = {t.shape for t in tensors if _are_ids(t)}
    return tensors[0].numel() if len(shapes) == 1 else None


def _named(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for number, value in enumerate(args):
        if isinstance(value, Mapping):
            yield from _named((), value)
        elif isinstance(value, torch.Tensor):
            yield str(number), value
    for name, value in kwargs.items():
        if isinstance(value, torch.Tensor):
            yield name, value


def _are_ids(tensor: torch.Tensor) -> bool:
    return tensor.dtype in _IDS and tensor.dim() == 2
